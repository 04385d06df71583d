"""Which of the required metrics a run of vime yields, from where, and which its settings leave out.

What the log holds is read by ``logs.vime`` and named by ``logs.metrics``; timers and memory come from the ops files
that the integration writes in both variants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

from rlk_repro.division import vime_of
from rlk_repro.loss_options import read_loss_options
from rlk_repro.plan import Plan


class State(StrEnum):
    """``VOID`` is printed and says nothing about what it is named after."""

    PRESENT = "yes"
    ABSENT = "no"
    VOID = "void"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What decides which metrics there are."""

    lane: str
    has_old_policy_pass: bool
    has_reference_pass: bool
    has_entropy: bool = True
    has_rollout_log_probs: bool = True

    @classmethod
    def of(cls, plan: Plan) -> Setting:
        options = vime_of(plan).loss_options
        without_reference: Mapping[str, Any] = {**options, "use_kl_loss": False}
        return cls(
            lane=plan.run.lane,
            has_old_policy_pass=read_loss_options(without_reference).has_no_grad_pass,
            has_reference_pass=bool(options.get("use_kl_loss")),
            has_entropy=plan.run.entropy_metric,
            has_rollout_log_probs=plan.run.workload.has_rollout_log_probs(plan.run.lane),
        )


Rule: TypeAlias = Callable[[Setting], State]


def _always(_: Setting) -> State:
    return State.PRESENT


def _old_policy(setting: Setting) -> State:
    return State.PRESENT if setting.has_old_policy_pass else State.ABSENT


def _reference(setting: Setting) -> State:
    return State.PRESENT if setting.has_reference_pass else State.ABSENT


def _any_pass(setting: Setting) -> State:
    return State.PRESENT if setting.has_old_policy_pass or setting.has_reference_pass else State.ABSENT


def _ratio(setting: Setting) -> State:
    """Without a pass of its own the old policy is the current one: every ratio is 1."""
    return State.PRESENT if setting.has_old_policy_pass else State.VOID


def _entropy(setting: Setting) -> State:
    return State.PRESENT if setting.has_entropy else State.VOID


def _agreement(setting: Setting) -> State:
    return State.PRESENT if setting.has_rollout_log_probs else State.ABSENT


def _generated(setting: Setting) -> State:
    """Fixed rollouts are read from files, and a lane without inference servers prints no line about them."""
    return {"live": State.PRESENT, "fixed-rollout": State.VOID}.get(setting.lane, State.ABSENT)


def _rewarded(setting: Setting) -> State:
    return State.PRESENT if setting.lane == "live" else State.VOID


def _synced(setting: Setting) -> State:
    """vime's timer runs around a function that returns at once where there is no server."""
    return State.VOID if setting.lane == "train-only" else State.PRESENT


@dataclass(frozen=True, kw_only=True)
class Required:
    """One required quantity: ``metrics`` as analysis names them, ``source`` as vime or we write it."""

    what: str
    metrics: tuple[str, ...]
    source: str
    state: Rule = _always
    note: str = ""

    @property
    def is_in_log(self) -> bool:
        return self.source.startswith("log")


REQUIRED: Final[tuple[Required, ...]] = (
    Required(what="step time, mean and percentiles", metrics=("step_time_s",), source="log: `perf/step_time`",
             note="p90 needs 20 scored steps, p99 needs 200"),
    Required(what="tokens/s, end to end", metrics=("tokens_per_s",),
             source="log: `perf/actor_train_tok_per_s` x `perf/actor_train_time` / `perf/step_time`"),
    Required(what="tokens/s of the training", metrics=("train_tokens_per_s",),
             source="log: `perf/actor_train_tok_per_s`"),
    Required(what="tokens/s of the rollout", metrics=("rollout_tokens_per_gpu_per_s",),
             source="log: `perf/tokens_per_gpu_per_sec`", state=_generated),
    Required(what="peak memory", metrics=("peak_memory_bytes",), source="ops: torch's allocator, by phase and rank"),
    Required(what="old-policy pass", metrics=("log_probs_time_s",), source="log: `perf/log_probs_time`",
             state=_old_policy, note="needs at least two optimizer steps per rollout"),
    Required(what="reference pass", metrics=("ref_log_probs_time_s",), source="log: `perf/ref_log_probs_time`",
             state=_reference, note="needs `use_kl_loss`; its coefficient may be 0"),
    Required(what="log-prob without gradient", metrics=("module_log_probs_no_grad_s",),
             source="ops: timer of `calculate_log_probs_and_entropy`", state=_any_pass),
    Required(what="log-prob with gradient", metrics=("module_log_probs_forward_s", "module_log_probs_backward_s"),
             source="ops: timer of `calculate_log_probs_and_entropy`"),
    Required(what="ratio and KL", metrics=("module_clip_kl_forward_s", "module_clip_kl_backward_s"),
             source="ops: timer of `compute_policy_loss` and `compute_approx_kl`"),
    Required(what="GRPO loss", metrics=("module_grpo_loss_forward_s", "module_grpo_loss_backward_s"),
             source="ops: timer of `policy_loss_function`"),
    Required(what="update", metrics=("actor_train_time_s",), source="log: `perf/actor_train_time`"),
    Required(what="optimizer", metrics=("module_optimizer_s",), source="ops: timer of the optimizer's `step`"),
    Required(what="weight sync", metrics=("weight_sync_time_s",),
             source="log: `perf/update_weights_time` in the line of the next rollout", state=_synced),
    Required(what="rollout time", metrics=("rollout_time_s",), source="log: `perf/rollout_time`", state=_generated),
    Required(what="raw reward", metrics=("raw_reward",), source="log: `rollout/raw_reward`", state=_rewarded,
             note="for stored rollouts, the reward that was stored with them"),
    Required(what="train/rollout log-prob difference", metrics=("train_rollout_logprob_abs_diff",),
             source="log: `train/train_rollout_logprob_abs_diff`", state=_agreement,
             note="absent where rollouts are made from a seed, because such rollouts hold no log-probs"),
    Required(what="loss", metrics=("loss", "pg_loss", "grad_norm"),
             source="log: `train/loss`, `train/pg_loss`, `train/grad_norm`"),
    Required(what="KL to the reference", metrics=("kl_loss",), source="log: `train/kl_loss`", state=_reference),
    Required(what="ratio away from 1", metrics=("ppo_kl", "pg_clipfrac"),
             source="log: `train/ppo_kl`, `train/pg_clipfrac`", state=_ratio),
    Required(what="entropy", metrics=("entropy",), source="log: `train/entropy_loss`", state=_entropy),
    Required(what="response length", metrics=("response_length_mean",), source="log: `rollout/response_lengths`"),
)  # fmt: skip

SHOWN: Final[Mapping[str, Setting]] = {
    "live": Setting(lane="live", has_old_policy_pass=True, has_reference_pass=True),
    "live, one optimizer step": Setting(lane="live", has_old_policy_pass=False, has_reference_pass=True),
    "live, no KL loss": Setting(lane="live", has_old_policy_pass=True, has_reference_pass=False),
    "fixed-rollout": Setting(lane="fixed-rollout", has_old_policy_pass=True, has_reference_pass=True),
    "train-only": Setting(lane="train-only", has_old_policy_pass=True, has_reference_pass=True),
}


def metric_states(setting: Setting) -> dict[str, State]:
    """By metric, as analysis names it."""
    return {metric: item.state(setting) for item in REQUIRED for metric in item.metrics}


def render_table() -> str:
    """The table of docs/metrics.md."""
    head = ["quantity", "metrics", "source", *SHOWN, "note"]
    rows = [head, ["---"] * len(head)]
    for item in REQUIRED:
        names = ", ".join(f"`{metric}`" for metric in item.metrics)
        states = [item.state(setting).value for setting in SHOWN.values()]
        rows.append([item.what, names, item.source, *states, item.note])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
