"""linear_logp beneath a trainer's loss: hidden states in the place of logits, and nobody who takes them for logits.

RL-Kernel is the double of tests/support/fake_rl_engine; Megatron's own model is in test_integration_linear_agreement.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from rlk_repro.base.errors import CheckFailed, EnvironmentMissing
from rlk_repro.integration.measure.installation import Installation
from rlk_repro.integration.output_layers import defer_output_layers
from rlk_repro.integration.route.linear_logp import Head, HiddenStates
from rlk_repro.integration.route.rl_kernel import RouteFailed
from rlk_repro.integration.switch import Mode, Settings, install_into
from rlk_repro.logs.ops import read_ops
from rlk_repro.loss_options import LossOptions
from rlk_repro.operators import Case
from rlk_repro.rundir.paths import TrialDir
from tests.support.loss_examples import LENGTHS, VOCABULARY, load_loss_module, make_args, make_batch
from tests.support.reference_runs import SMALL, run_trainer

NUM_ROWS, HIDDEN = sum(total for total, _ in LENGTHS), 8
CPU = Case(platform="cpu")
pytestmark = pytest.mark.usefixtures("rl_kernel")
NEVER = "expected a call that the route supports, because a fallback would need logits"


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
                                           DistributedDataParallel(model)])  # fmt: skip
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
        defer_output_layers(installation, [Model(sound), chunk])
        assert [item.reason for item in installation.ledger.decisions] == ["", reason]
        assert "forward" not in vars(sound)
    with install(load_loss_module()) as installation, pytest.raises(CheckFailed, match=re.escape(reason)):
        defer_output_layers(installation, [Model(sound), chunk])


@pytest.mark.usefixtures("torch_as_it_was")
@pytest.mark.parametrize("flags", ["", "--untie-embeddings-and-output-weights"])
def test_the_reference_trainer_learns_the_same_from_hidden_states(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: str
) -> None:
    flags, no_entropy = f"{SMALL} --num-rollout 2 {flags}", {"RLK_REPRO_ENTROPY_METRIC": "0"}
    expected = run_trainer(caplog, flags, **no_entropy)
    switches = {"VIME_RL_KERNEL": "1", "VIME_RL_KERNEL_OPS": "linear_logp"}
    switches["RLK_REPRO_OPS_DIR"] = str(tmp_path / "ops")
    found = run_trainer(caplog, flags, **no_entropy | switches)
    assert read_ops(TrialDir(tmp_path)).calls["linear_logp"].calls == 2 * 6
    assert len(found) == len(expected) == 4
    for one, other in zip(found, expected, strict=True):
        numbers = (ast.literal_eval(line.partition(": ")[2]) for line in (one, other))
        assert next(numbers) == pytest.approx(next(numbers), rel=1e-4, abs=2e-6)
