"""Read the trainer's options that decide which operators compute exactly a run's loss, and which passes it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The loss options that decide which operators compute exactly the run's loss; the defaults are vime's."""

    has_no_grad_pass: bool = True
    has_entropy_gradient: bool = False
    is_top_p_replayed: bool = False
    is_clip_symmetric: bool = True
    kl_loss_type: str | None = None
    has_other_terms: bool = False
    loss_type: str = "policy_loss"
    rollout_temperature: float = 1.0
    has_multi_token_prediction: bool = False


def read_loss_options(options: Mapping[str, Any]) -> LossOptions:
    """Read a trainer's options, by vime's argument names; an absent option has vime's default."""
    kl_loss_coef = options.get("kl_loss_coef") or 0.0
    loss_type, estimator = options.get("loss_type", "policy_loss"), options.get("advantage_estimator", "grpo")
    has_reference_pass = options.get(_ADVANTAGES, True) and any(map(options.get, ("use_kl_loss", "kl_coef", "use_opd")))
    is_plain = (loss_type, estimator) == ("policy_loss", "grpo")
    return LossOptions(
        has_no_grad_pass=bool(has_reference_pass) or has_old_policy_pass(options),
        has_entropy_gradient=bool(options.get("entropy_coef")),
        is_top_p_replayed=options.get("rollout_top_p", 1.0) != 1.0,
        is_clip_symmetric=options.get("eps_clip_high") in {None, options.get("eps_clip", 0.2)},
        kl_loss_type=options.get("kl_loss_type", "k1") if options.get("use_kl_loss") and kl_loss_coef else None,
        has_other_terms=any(options.get(name) for name in _CORRECTIONS) or not is_plain,
        loss_type=loss_type,
        rollout_temperature=options.get("rollout_temperature", 1.0),
        has_multi_token_prediction=bool(options.get("mtp_num_layers")),
    )


_ADVANTAGES: Final = "compute_advantages_and_returns"
_CORRECTIONS: Final = (
    "use_tis", "use_opsm", "use_opd", "use_unbiased_kl", "get_mismatch_metrics", "custom_pg_loss_reducer_function_path"
)  # fmt: skip


def has_old_policy_pass(options: Mapping[str, Any]) -> bool:
    """Whether vime runs an old-policy pass with these options."""
    has_stored = options.get("use_rollout_logprobs") and not options.get("get_mismatch_metrics")
    if has_stored or not options.get(_ADVANTAGES, True):
        return False
    obstacles = ("get_mismatch_metrics", "keep_old_actor", "use_critic", "use_opd", "kl_coef")
    return (
        _num_steps_per_rollout(options) > 1
        or any(options.get(name) for name in obstacles)
        or options.get("loss_type", "policy_loss") != "policy_loss"
        or options.get("advantage_estimator") in {"gspo", "ppo"}
        or bool(options.get("use_routing_replay") and not options.get("use_rollout_routing_replay"))
    )


def _num_steps_per_rollout(options: Mapping[str, Any]) -> int:
    if options.get("num_steps_per_rollout"):
        return int(options["num_steps_per_rollout"])
    num_samples = options.get("rollout_batch_size", 0) * options.get("n_samples_per_prompt", 1)
    return int(num_samples // options["global_batch_size"]) if options.get("global_batch_size") else 1
