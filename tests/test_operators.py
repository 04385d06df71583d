"""What operators.py promises: the table is complete, and eligibility names its reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.loss_options import LossOptions, read_loss_options
from rlk_repro.operators import (
    DEFAULT_OPS,
    HAS_BATCH_INVARIANT_LOGP,
    OPERATORS,
    Calls,
    Case,
    Platform,
    Reason,
    Refusal,
    find_conflicts,
    find_refusal,
)

OLDER, NEWER = HAS_BATCH_INVARIANT_LOGP
QWEN3_4B = {
    "advantage_estimator": "grpo",
    "use_kl_loss": True,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "low_var_kl",
    "entropy_coef": 0.0,
    "eps_clip": 0.2,
    "eps_clip_high": 0.28,
    "rollout_batch_size": 32,
    "n_samples_per_prompt": 8,
    "global_batch_size": 256,
}


def make_linear_case(**changes: Any) -> Case:
    """One in which nothing stands against ``linear_logp``."""
    return Case(**{"platform": "cuda", "has_entropy_metric": False, **changes})


def test_the_narrow_seam_is_what_is_routed_by_default() -> None:
    assert DEFAULT_OPS == ("logp", "ratio_kl")
    assert find_conflicts(DEFAULT_OPS) == []


@pytest.mark.parametrize("op", OPERATORS)
def test_every_operator_is_named_as_its_key_and_runs_natively_on_cpu(op: str) -> None:
    operator = OPERATORS[op]
    assert operator.name == op
    assert all(item.is_native for item in operator.implementations[Platform.CPU])
    assert not any(
        item.is_native
        for platform in (Platform.CUDA, Platform.ROCM)
        for item in operator.implementations.get(platform, ())
    )


@pytest.mark.parametrize(
    ("op", "case", "expected"),
    [
        ("logp", Case(platform="cuda", tensor_parallel=8, context_parallel=2), None),
        ("ratio_kl", Case(platform="rocm", tensor_parallel=4), None),
        ("logp", Case(platform="rocm"), None),
        ("logp", Case(platform="rocm", commit=NEWER), None),
        ("logp", Case(platform="rocm", commit=OLDER), Refusal(Reason.PLATFORM, "rocm, RL-Kernel 202f0e30e567")),
        ("ratio_kl", Case(platform="rocm", commit=OLDER), None),
        ("logp", Case(platform="tpu"), Refusal(Reason.PLATFORM, "tpu")),
        ("logp", Case(platform="cuda", loss=LossOptions(has_no_grad_pass=False)), Refusal(Reason.NO_SUCH_CALL)),
        ("ratio_kl", Case(platform="cuda", loss=LossOptions(has_entropy_gradient=True)),
         Refusal(Reason.ENTROPY_GRADIENT)),
        ("ratio_kl", Case(platform="cuda", loss=LossOptions(is_top_p_replayed=True)),
         Refusal(Reason.TOP_P_REPLAY)),
        ("grpo_loss", Case(platform="cuda"), None),
        ("grpo_loss", Case(platform="cuda", tensor_parallel=2),
         Refusal(Reason.TENSOR_PARALLEL, "tensor parallel size 2")),
        ("grpo_loss", Case(platform="cuda", context_parallel=2),
         Refusal(Reason.CONTEXT_PARALLEL, "context parallel size 2")),
        ("grpo_loss", Case(platform="cuda", loss=LossOptions(is_clip_symmetric=False)),
         Refusal(Reason.LOSS_OPTIONS, "asymmetric clip")),
        ("grpo_loss", Case(platform="cuda", loss=LossOptions(kl_loss_type="k3")),
         Refusal(Reason.LOSS_OPTIONS, "KL type k3 from stored log-probs")),
        ("grpo_loss", Case(platform="cuda", loss=LossOptions(has_other_terms=True)),
         Refusal(Reason.LOSS_OPTIONS, "correction terms")),
        ("linear_logp", make_linear_case(), None),
        ("linear_logp", make_linear_case(tensor_parallel=8, context_parallel=2), None),
        ("linear_logp", make_linear_case(platform="rocm"), None),
        ("linear_logp", make_linear_case(platform="rocm", tensor_parallel=8),
         Refusal(Reason.TENSOR_PARALLEL, "TritonLinearLogpOp is plain PyTorch with tensor parallel size 8")),
        ("linear_logp", make_linear_case(has_entropy_metric=True), Refusal(Reason.ENTROPY_METRIC)),
        ("linear_logp", make_linear_case(has_output_layer=False), Refusal(
        Reason.OUTPUT_LAYER, "this workload has no output layer"
        )),
        ("linear_logp", make_linear_case(loss=LossOptions(has_multi_token_prediction=True)),
         Refusal(Reason.OUTPUT_LAYER, "multi-token prediction")),
        ("linear_logp", make_linear_case(loss=LossOptions(loss_type="sft_loss")),
         Refusal(Reason.LOSS_TYPE, "sft_loss")),
        ("linear_logp", make_linear_case(loss=LossOptions(rollout_temperature=0.8)),
         Refusal(Reason.TEMPERATURE, "0.8")),
        ("linear_logp", make_linear_case(loss=LossOptions(has_entropy_gradient=True)),
         Refusal(Reason.ENTROPY_GRADIENT)),
        ("linear_logp", make_linear_case(loss=LossOptions(is_top_p_replayed=True)),
         Refusal(Reason.TOP_P_REPLAY)),
        ("vocab_parallel_logp", Case(platform="rocm", tensor_parallel=8, context_parallel=2), None),
    ],
)  # fmt: skip
def test_a_case_is_refused_for_its_first_reason(op: str, case: Case, expected: Refusal | None) -> None:
    assert find_refusal(op, case) == expected


def test_a_refusal_reads_as_words() -> None:
    refusal = find_refusal("grpo_loss", Case(platform="cuda", tensor_parallel=4))
    assert str(refusal) == "needs the whole vocabulary on one rank (tensor parallel size 4)"
    no_platform = find_refusal("logp", Case(platform="tpu"))
    assert str(no_platform) == "has no accepted implementation on this platform (tpu)"


def test_an_implementation_counts_by_class_or_backend_name_and_only_on_its_platform() -> None:
    logp = OPERATORS["logp"]
    generic = logp.find_implementation("cuda", "FusedLogpGenericOp")
    assert generic is not None
    assert generic is logp.find_implementation("cuda", "CUDA_FUSED_LOGP_GENERIC")
    assert logp.find_implementation("cuda", "NativeLogpOp") is None
    assert logp.find_implementation("rocm", "NativeLogpOp") is None
    native = logp.find_implementation("cpu", "NativeLogpOp")
    assert native is not None
    assert native.is_native


@pytest.mark.parametrize(
    ("op", "served"),
    [
        ("logp", {False}),
        ("ratio_kl", {True}),
        ("grpo_loss", {True}),
        ("linear_logp", {True, False}),
        ("vocab_parallel_logp", {True, False}),
    ],
)
def test_which_calls_an_operator_serves(op: str, served: set[bool]) -> None:
    assert {needs_grad for needs_grad in (True, False) if OPERATORS[op].serves(needs_grad=needs_grad)} == served


@given(st.sets(st.sampled_from(list(OPERATORS))))
def test_operators_conflict_exactly_where_they_would_serve_one_call(ops: set[str]) -> None:
    conflicts = find_conflicts(ops)
    for one, other in conflicts:
        assert one < other
    same_function = {
        (one, other)
        for one in ops
        for other in ops
        if one < other
        and OPERATORS[one].function == OPERATORS[other].function
        and (
            Calls.ALL in {OPERATORS[one].calls, OPERATORS[other].calls}
            or OPERATORS[one].calls == OPERATORS[other].calls
        )
    }
    assert same_function <= set(conflicts)


def test_options_of_the_stock_recipe() -> None:
    options = read_loss_options(QWEN3_4B)
    assert options == LossOptions(is_clip_symmetric=False)


@pytest.mark.parametrize(
    ("changes", "has_pass"),
    [
        ({"use_kl_loss": False}, False),
        ({"use_kl_loss": False, "kl_coef": 0.1}, True),
        ({"use_kl_loss": False, "global_batch_size": 128}, True),
        ({"use_kl_loss": False, "num_steps_per_rollout": 2}, True),
        ({"use_kl_loss": False, "num_steps_per_rollout": 2, "use_rollout_logprobs": True}, False),
        ({"use_kl_loss": False, "advantage_estimator": "gspo"}, True),
        ({"use_kl_loss": False, "use_critic": True}, True),
        ({"loss_type": "sft_loss", "compute_advantages_and_returns": False}, False),
        ({"loss_type": "sft_loss", "compute_advantages_and_returns": False, "num_steps_per_rollout": 2}, False),
        ({"use_kl_loss": False, "use_routing_replay": True}, True),
        ({"use_kl_loss": False, "use_routing_replay": True, "use_rollout_routing_replay": True}, False),
    ],
)
def test_a_pass_without_gradient_is_found_where_vime_makes_one(changes: dict[str, Any], has_pass: bool) -> None:
    assert read_loss_options(QWEN3_4B | changes).has_no_grad_pass is has_pass


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"entropy_coef": 0.01}, "has_entropy_gradient", True),
        ({"rollout_top_p": 0.9}, "is_top_p_replayed", True),
        ({"eps_clip_high": None}, "is_clip_symmetric", True),
        ({"kl_loss_coef": 0.001}, "kl_loss_type", "low_var_kl"),
        ({"use_tis": True}, "has_other_terms", True),
        ({"advantage_estimator": "gspo"}, "has_other_terms", True),
        ({"loss_type": "custom_loss"}, "has_other_terms", True),
        ({"loss_type": "custom_loss"}, "loss_type", "custom_loss"),
        ({"rollout_temperature": 0.9}, "rollout_temperature", 0.9),
        ({"mtp_num_layers": 1}, "has_multi_token_prediction", True),
    ],
)
def test_each_option_is_seen(changes: dict[str, Any], field: str, value: object) -> None:
    assert getattr(read_loss_options(QWEN3_4B | changes), field) == value
