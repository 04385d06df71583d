"""linear_logp beneath a trainer's loss: hidden states in the place of logits, and nobody who takes them for logits.

RL-Kernel is the double of tests/support/fake_rl_engine; Megatron's own model is in test_integration_linear_agreement.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from rlk_repro.base.errors import CheckFailed, EnvironmentMissing
from rlk_repro.integration.measure.installation import Installation, find_installation
from rlk_repro.integration.output_layers import defer_output_layers
from rlk_repro.integration.route.errors import RouteFailed
from rlk_repro.integration.route.linear_logp import SM90, Head, HiddenStates, find_weight_refusal
from rlk_repro.integration.switch import TIMERS, Mode, Settings, install_into
from rlk_repro.integration.vime_abi import NEWEST
from rlk_repro.loss_options import LossOptions
from rlk_repro.operators import Case, Reason, Refusal
from rlk_repro.refengine import core
from rlk_repro.refengine.__main__ import main
from tests import SUPPORT
from tests.support.loss_examples import LENGTHS, VOCABULARY, load_loss_module, make_args, make_batch

DOUBLE = SUPPORT / "fake_rl_engine"
NUM_ROWS, HIDDEN = sum(total for total, _ in LENGTHS), 8
CPU = Case(platform="cpu")
NEVER = "expected a call that the route supports, because a fallback would need logits"


@pytest.fixture(autouse=True)
def rl_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The double's registry, alone in this process."""
    for name in [name for name in sys.modules if name.split(".")[0] == "rl_engine"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(DOUBLE))
    yield importlib.import_module("rl_engine.kernels.registry").kernel_registry
    for name in [name for name in sys.modules if name.split(".")[0] == "rl_engine"]:
        del sys.modules[name]


def install(module: ModuleType, mode: Mode = Mode.REQUIRE, case: Case = CPU, **settings: Any) -> Installation:
    asked = Settings(mode=mode, ops=("linear_logp",), **{"has_entropy_metric": False, **settings})
    return install_into(module, asked, trainer="example", case=case)


def make_problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, NUM_ROWS, HIDDEN, generator=generator)
    weight, bias = (torch.randn(*shape, generator=generator) for shape in ((VOCABULARY, HIDDEN), (VOCABULARY,)))
    return hidden, weight, bias


def train(module: ModuleType, multiply: Callable[..., torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """A pass without gradient and one with, from hidden states that became logits by ``multiply``, or did not."""
    leaves = [leaf.requires_grad_() for leaf in make_problem()]
    args, batch = make_args(**options), make_batch()
    with torch.no_grad():
        passed, _ = module.find_response_log_probs(args, batch, multiply(*leaves))
    reducer = module.make_sum_of_sample_mean(batch["loss_masks"], batch["rollout_mask_sums"])
    loss, metrics = module.policy_loss_function(args, batch, multiply(*leaves), reducer)
    return [*passed, *metrics.values(), *torch.autograd.grad(loss, leaves)]


def hand_over(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> HiddenStates:
    return HiddenStates.of(hidden, Head(weight, bias))


def test_loss_metrics_and_gradients_are_those_of_the_logits() -> None:
    module = load_loss_module()
    with install_into(module, Settings(has_entropy_metric=False), trainer="example", case=CPU):
        expected = train(module, nn.functional.linear)
    with install(module) as installation:
        found = train(module, hand_over)
        assert installation._watch.settle() == {}
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_trainer_s_way_they_keep_every_bit_their_head_and_their_gradient(dtype: torch.dtype) -> None:
    hidden = torch.randn(5, 1, 4).to(dtype).requires_grad_()
    head = Head(torch.randn(7, 4).to(dtype))
    carried = HiddenStates.of(hidden, head).transpose(0, 1).contiguous().float().squeeze(0).contiguous()
    carried = carried.view_as(carried)
    assert isinstance(carried, HiddenStates)
    assert (carried.shape, carried.dtype, carried.head) == ((5, 4), torch.float32, head)
    rows = carried.recover()
    assert type(rows) is torch.Tensor
    assert torch.equal(rows, hidden.squeeze(1))
    (gradient,) = torch.autograd.grad(rows.float().square().sum(), hidden)
    assert torch.equal(gradient, 2 * hidden)


COMPUTATIONS: tuple[Callable[[Any], Any], ...] = (
    lambda x: x / 0.7,
    lambda x: x * 1.0,
    lambda x: x @ torch.zeros(4, 2),
    lambda x: torch.zeros(2, 6) @ x,
    lambda x: x[1:3],
    lambda x: x.max(dim=-1),
    lambda x: x.log_softmax(dim=-1),
    lambda x: torch.nn.functional.cross_entropy(x, torch.zeros(6, dtype=torch.long)),
    lambda x: x.gather(1, torch.zeros(6, 1, dtype=torch.long)),
    lambda x: x.sub_(1),
    lambda x: torch.cat([torch.zeros(1, 4), x]),
    lambda x: torch.split(x, 2),
    lambda x: x.clone(),
    lambda x: x.to(torch.float64),
    lambda x: x.numpy(),
    lambda x: x.tolist(),
    lambda x: core.calculate_log_probs_and_entropy(x, torch.zeros(6, dtype=torch.long), None),
)


@pytest.mark.parametrize("compute", COMPUTATIONS)
def test_code_that_uses_hidden_states_as_logits_raises(compute: Callable[[Any], Any]) -> None:
    hidden = HiddenStates.of(torch.randn(6, 4), Head(torch.randn(4, 4)))
    with pytest.raises(RouteFailed, match="linear_logp: hidden states were used as logits, got '"):
        compute(hidden)


def test_the_sum_that_keeps_a_graph_connected_is_an_ordinary_zero() -> None:
    hidden = torch.randn(6, 4, requires_grad=True)
    zero = 0 * HiddenStates.of(hidden, Head(torch.randn(4, 4))).sum()
    assert type(zero) is torch.Tensor
    (gradient,) = torch.autograd.grad(zero, hidden)
    assert not gradient.any()


def test_a_cast_on_the_way_must_be_exact() -> None:
    expected = "hidden states: have another dtype than the output layer's weight, got 'torch.float32', expected torch"
    with pytest.raises(RouteFailed, match=expected):
        HiddenStates.of(torch.randn(2, 4), Head(torch.randn(7, 4).bfloat16()))


@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.REQUIRE])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"with_entropy": True, "with_entropy_grad": True},
         f"linear_logp: a call cannot be served: does not compute the entropy that this run reports, {NEVER}"),
        ({"log_prob_keep_mask": torch.ones(1)},
         "linear_logp: a call cannot be served: cannot leave out the columns that top-p sampling removed, "
         f"{NEVER}"),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_served_stops_in_every_mode(mode: Mode, options: dict[str, Any], expected: str) -> None:
    module = load_loss_module()
    hidden, weight, _ = make_problem()
    rows = HiddenStates.of(hidden.squeeze(0), Head(weight))
    with install(module, mode) as installation:
        with pytest.raises(RouteFailed) as caught:
            module.calculate_log_probs_and_entropy(rows, torch.zeros(NUM_ROWS, dtype=torch.long), None, **options)
        assert [item.is_rl_kernel for item in installation.ledger.decisions] == [True]
    assert str(caught.value) == expected


@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.REQUIRE])
def test_a_temperature_stops_before_it_could_round_anything(mode: Mode) -> None:
    module = load_loss_module()
    with install(module, mode), pytest.raises(RouteFailed, match="hidden states were used as logits, got 'div'"):
        train(module, hand_over, rollout_temperature=0.7)


def test_ordinary_logits_go_to_the_trainer_where_the_mode_allows_it() -> None:
    module = load_loss_module()
    expected = train(module, nn.functional.linear)
    with install(module, Mode.AUTO) as installation:
        found = train(module, nn.functional.linear)
        reasons = [item.reason for item in installation.ledger.decisions]
    assert reasons == ["", "needs hidden states, and this call has logits"]
    assert all(torch.equal(one, other) for one, other in zip(found[:3], expected[:3], strict=True))
    with (
        install(module),
        pytest.raises(CheckFailed, match=r"needs hidden states, and this call has logits, expected no"),
    ):
        train(module, nn.functional.linear)


@pytest.mark.parametrize(
    ("case", "settings", "reason"),
    [
        (CPU, {"has_entropy_metric": True}, "does not compute the entropy that this run reports"),
        (Case(platform="cpu", loss=LossOptions(rollout_temperature=0.8)), {},
         "would round the hidden states after dividing them by the temperature (0.8)"),
        (Case(platform="cpu", has_output_layer=False), {},
         "needs access to the hidden states before the output layer (this workload has no output layer)"),
    ],
)  # fmt: skip
def test_impossible_options_are_refused_at_the_start(case: Case, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(EnvironmentMissing) as caught:
        install(load_loss_module(), case=case, **settings)
    assert caught.value.problems[0].what == f"linear_logp: {reason}"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda result: result.detach(), "linear_logp: returned a result without gradient"),
        (lambda result: result[:-1], "linear_logp: RL-Kernel's result is not as documented, got"),
        (lambda result: result.double(), "linear_logp: RL-Kernel's result is not as documented, got"),
    ],
)
def test_an_answer_of_another_form_stops(
    rl_kernel: Any, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any], expected: str
) -> None:
    original = type(rl_kernel.get_op("linear_logp"))

    def answer(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original.apply(self, *args, **kwargs)
        return change(result) if torch.is_grad_enabled() else result

    monkeypatch.setattr(original, "__call__", answer)
    module = load_loss_module()
    with install(module, Mode.AUTO), pytest.raises(RouteFailed, match=expected):
        train(module, hand_over)


def test_an_answer_that_is_not_a_log_prob_is_reported_at_the_end_of_the_step(
    rl_kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = type(rl_kernel.get_op("linear_logp"))
    monkeypatch.setattr(original, "__call__", lambda self, *args, **rest: -original.apply(self, *args, **rest))
    module = load_loss_module()
    with install(module) as installation:
        train(module, hand_over)
        with pytest.raises(CheckFailed, match=r"linear_logp, step 0: RL-Kernel returned [\d.]+, expected a value"):
            installation.end_step(0)


@pytest.mark.parametrize(
    ("dtype", "columns", "detail"),
    [
        (torch.bfloat16, 64, None),
        (torch.float32, 64, f"{SM90} passes torch.float32 weights of hidden size 64 to another class of RL-Kernel"),
        (torch.bfloat16, 40, f"{SM90} passes torch.bfloat16 weights of hidden size 40 to another class of RL-Kernel"),
    ],
)
def test_a_class_that_would_delegate_in_silence_is_refused(dtype: torch.dtype, columns: int, detail: str) -> None:
    weight = torch.empty(7, columns, dtype=dtype)
    expected = Refusal(Reason.NOT_ACCEPTED, detail) if detail else None
    assert find_weight_refusal(weight, SM90) == expected
    assert find_weight_refusal(weight, "TritonLinearLogpOp") is None


class ColumnParallelLinear(nn.Module):
    """As much of Megatron's as is looked at."""

    def __init__(self, *, is_tied: bool = False, **changes: bool) -> None:
        super().__init__()
        self.weight = None if is_tied else nn.Parameter(make_problem()[1])
        self.bias, self.tp_group, self.sequence_parallel = None, None, False
        self.gather_output = self.skip_bias_add = self.disable_grad_reduce = False
        self.config = argparse.Namespace(mtp_num_layers=None, defer_embedding_wgrad_compute=False)
        for name, value in changes.items():
            setattr(self.config if hasattr(self.config, name) else self, name, value)

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        assert not runtime_gather_output
        matrix = self.weight if weight is None else weight
        assert matrix is not None
        return nn.functional.linear(input_, matrix), None


class Model(nn.Module):
    def __init__(self, layer: nn.Module | None, *, post_process: bool = True) -> None:
        super().__init__()
        self.post_process = post_process
        self.embedding = nn.Parameter(2 * make_problem()[1])
        if layer is not None:
            self.output_layer = layer

    def shared_embedding_or_output_weight(self) -> torch.Tensor:
        return self.embedding


class DistributedDataParallel(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class FullyShardedDataParallel(DistributedDataParallel):
    """Megatron has one; its weights are gone when the loss is computed."""


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_output_layer_hands_over_what_it_is_given_until_it_is_undone(is_tied: bool) -> None:
    layer = ColumnParallelLinear(is_tied=is_tied)
    model = Model(layer)
    hidden, weight = torch.randn(5, 1, HIDDEN), model.embedding if is_tied else None
    expected, _ = layer(hidden, weight)
    with install(load_loss_module()) as installation:
        defer_output_layers(installation, [DistributedDataParallel(Model(None, post_process=False)),
                                           DistributedDataParallel(model)], NEWEST)  # fmt: skip
        found, bias = layer(hidden, weight)
        assert isinstance(found, HiddenStates)
        assert torch.equal(found.recover(), hidden)
        assert found.head.weight is (model.embedding if is_tied else layer.weight)
        assert (found.head.bias, bias) == (None, None)
        with pytest.raises(CheckFailed, match="this rank's logits, got 'a request for gathered logits'"):
            layer(hidden, weight, runtime_gather_output=True)
        installation.turn.is_enabled = False
        assert torch.equal(layer(hidden, weight)[0], expected)
    assert "forward" not in vars(layer)
    assert torch.equal(layer(hidden, weight)[0], expected)


def test_without_the_operator_output_layers_stay_as_they_are() -> None:
    layer = ColumnParallelLinear()
    with install_into(load_loss_module(), Settings(has_entropy_metric=False), trainer="example", case=CPU) as none:
        defer_output_layers(none, [Model(layer)], NEWEST)
        assert "forward" not in vars(layer)


@pytest.mark.parametrize(
    ("chunk", "detail"),
    [
        (Model(nn.Linear(2, 2)), "Model has a Linear"),
        (Model(None), "Model has none"),
        (FullyShardedDataParallel(Model(ColumnParallelLinear())), "FullyShardedDataParallel is an unknown wrapper"),
        (Model(ColumnParallelLinear(mtp_num_layers=True)), "multi-token prediction"),
        (Model(ColumnParallelLinear(gather_output=True, skip_bias_add=True)),
         "the layer gathers its output, the layer does not add its bias"),
        (Model(ColumnParallelLinear(defer_embedding_wgrad_compute=True)), "the layer defers its weight's gradient"),
        (Model(ColumnParallelLinear(disable_grad_reduce=True)), "the layer does not all-reduce its input's gradient"),
    ],
)  # fmt: skip
def test_an_output_layer_that_is_not_understood_leaves_all_of_them_alone(chunk: Any, detail: str) -> None:
    sound = ColumnParallelLinear()
    reason = f"needs access to the hidden states before the output layer ({detail})"
    with install(load_loss_module(), Mode.AUTO) as installation:
        defer_output_layers(installation, [Model(sound), chunk], NEWEST)
        assert [item.reason for item in installation.ledger.decisions] == ["", reason]
        assert "forward" not in vars(sound)
    with install(load_loss_module()) as installation, pytest.raises(CheckFailed, match=re.escape(reason)):
        defer_output_layers(installation, [Model(sound), chunk], NEWEST)


def test_the_output_layer_of_another_megatron_stops() -> None:
    class Later(ColumnParallelLinear):
        def forward(self, input_: torch.Tensor, scale: float) -> Any:  # type: ignore[override]
            """A later Megatron's."""

    Later.__name__ = "ColumnParallelLinear"
    with (
        install(load_loss_module(), Mode.AUTO) as installation,
        pytest.raises(EnvironmentMissing, match=r"ColumnParallelLinear\.forward: takes other arguments \(lacks weight"),
    ):
        defer_output_layers(installation, [Model(Later())], NEWEST)


RUN = (
    "--num-rollout 3 --rollout-batch-size 4 --n-samples-per-prompt 4 --micro-batch-size 8 --use-kl-loss "
    "--kl-loss-coef 0.1 --entropy-coef 0 --num-threads 1 --device cpu "
    "--custom-megatron-init-path rlk_repro.integration.reference.install"
)


def run_trainer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *flags: str, switch: str) -> Any:
    """Metrics of every optimizer step, and the calls that RL-Kernel served."""
    for name, value in (("VIME_RL_KERNEL", switch), ("VIME_RL_KERNEL_MODE", "require"),
                        ("VIME_RL_KERNEL_OPS", "linear_logp"), ("RLK_REPRO_ENTROPY_METRIC", "0")):  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RLK_REPRO_OPS_DIR", raising=False)
    caplog.clear()
    with caplog.at_level("INFO"):
        assert main([*RUN.split(), *flags]) == 0
    installation = find_installation(core, TIMERS)
    assert installation is not None
    calls = {op: count["calls"] for op, count in installation.ledger._total.items()}
    installation.undo()
    lines = [re.fullmatch(r"step \d+: (\{.*\})", message) for message in caplog.messages]
    return [ast.literal_eval(line[1]) for line in lines if line], calls


@pytest.mark.usefixtures("torch_as_it_was")
@pytest.mark.parametrize("flags", [(), ("--untie-embeddings-and-output-weights",)], ids=["tied", "untied"])
def test_the_reference_trainer_learns_the_same_from_hidden_states(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, flags: tuple[str, ...]
) -> None:
    expected, none = run_trainer(monkeypatch, caplog, *flags, switch="0")
    found, calls = run_trainer(monkeypatch, caplog, *flags, switch="1")
    assert (none, calls) == ({}, {"linear_logp": 18})
    assert len(found) == len(expected) == 3
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=2e-6)
