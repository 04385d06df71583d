"""What is installed into a trainer, when, and how it comes out again."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, SpecError
from rlk_repro.integration.measure.installation import Installation
from rlk_repro.integration.route.api import Call, Route, RouteContext, RouteFactory, resolve
from rlk_repro.integration.route.table import ROUTES
from rlk_repro.integration.switch import TIMERS, Mode, Settings, install_into
from rlk_repro.loss_options import LossOptions
from rlk_repro.operators import HAS_BATCH_INVARIANT_LOGP, Case, Reason, Refusal
from tests.support.loss_examples import LENGTHS, load_loss_module, make_args, train_once

CPU = Case(platform="cpu")
NUM_ROWS = sum(total for total, _ in LENGTHS)


pytestmark = pytest.mark.usefixtures("without_rl_kernel")


def make_settings(tmp_path: Path, mode: Mode = Mode.AUTO, *ops: str) -> Settings:
    trial = tmp_path / "trial"
    return Settings(mode=mode, ops=ops, ops_dir=trial / "ops")


def install(
    module: ModuleType, settings: Settings, *, case: Case = CPU, routes: Mapping[str, RouteFactory] = ROUTES
) -> Installation:
    return install_into(module, settings, trainer="example", case=case, routes=routes)


def accept(call: Call) -> None:
    """Refuses nothing."""


def read_events(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "trial" / "ops" / "0.jsonl").read_text().splitlines()]


def make_route(context: RouteContext) -> Route:
    """A route that runs the trainer's own function under the name of RL-Kernel's native operator."""
    return Route(
        implementation="NativeLogpOp",
        version="0.1.0",
        refuse=lambda call: Refusal(Reason.ENTROPY_METRIC) if call["with_entropy"] else None,
        run=lambda call: context.native(**call),
    )


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Settings()),
        ({"VIME_RL_KERNEL": "0", "VIME_RL_KERNEL_MODE": "require"}, Settings()),
        ({"VIME_RL_KERNEL": "1", "VIME_RL_KERNEL_MODE": "off"}, Settings()),
        ({"VIME_RL_KERNEL": "1"}, Settings(mode=Mode.REQUIRE, ops=("logp", "ratio_kl"))),
        ({"VIME_RL_KERNEL": "1", "VIME_RL_KERNEL_MODE": "auto", "VIME_RL_KERNEL_OPS": "logp"},
         Settings(mode=Mode.AUTO, ops=("logp",))),
        ({"RLK_REPRO_GC_FREEZE_AFTER": "6"}, Settings(gc_freeze_after=6)),
        ({"RLK_REPRO_AGREEMENT_RECORD": "0", "VIME_RL_KERNEL_SCHEDULE": "be"}, Settings(agreement_record="0")),
        ({"RLK_REPRO_AGREEMENT_RECORD": "scheduled", "VIME_RL_KERNEL_SCHEDULE": "be"},
         Settings(agreement_record="scheduled", schedule="be")),
        ({"RLK_REPRO_DEMO_WAIT": "scheduled", "VIME_RL_KERNEL_SCHEDULE": "be"}, Settings(schedule="be")),
        ({"RLK_REPRO_OPS_DIR": "/t/ops"}, Settings(ops_dir=Path("/t/ops"))),
    ],
)  # fmt: skip
def test_settings_are_read_from_the_environment(environ: dict[str, str], expected: Settings) -> None:
    assert Settings.from_env(environ) == expected
    assert expected.is_active == bool(expected.ops or expected.ops_dir or expected.gc_freeze_after)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("VIME_RL_KERNEL", "yes", "unknown value, got 'yes', expected one of 1, 0"),
        ("VIME_RL_KERNEL_MODE", "strict", "unknown value, got 'strict', expected one of off, auto"),
        ("VIME_RL_KERNEL_OPS", "logp, ratio_kl", "unknown or repeated operator, got 'logp, "),
        ("VIME_RL_KERNEL_OPS", "ratio_kl,grpo_loss", "operators serve the same calls, got 'ratio"),
        ("RLK_REPRO_GC_FREEZE_AFTER", "-1", "is not a number, got '-1', expected a number of"),
        ("VIME_RL_KERNEL_SCHEDULE", "bxe", "is not a valid schedule, got 'bxe', expected a"),
    ],
)
def test_values_that_mean_nothing_are_refused_all_at_once(name: str, value: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        Settings.from_env({"VIME_RL_KERNEL_BASELINE_OPS": "x", name: value})
    assert f"{name}: {said}" in str(caught.value)
    found = {problem.where for problem in caught.value.problems}
    assert found == {"VIME_RL_KERNEL_BASELINE_OPS", name}


def test_every_replacement_is_logged_once_and_undone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    module = load_loss_module()
    before = {name: getattr(module, name) for name in TIMERS}
    with install(module, make_settings(tmp_path, Mode.OFF)) as installation:
        assert all(getattr(module, name) is not before[name] for name in TIMERS)
        assert caplog.messages == [f"rlk-repro: loss_example.{name} replaced: timers" for name in TIMERS]
        once = {name: getattr(module, name) for name in TIMERS}
        assert install(module, make_settings(tmp_path)) is installation
        assert once == {name: getattr(module, name) for name in TIMERS}
    assert before == {name: getattr(module, name) for name in TIMERS}
    installation.undo()
    with install(module, Settings()) as again:
        assert again is not installation


def test_require_names_every_reason(tmp_path: Path) -> None:
    case = Case(
        platform="rocm", loss=LossOptions(has_entropy_gradient=True), commit=next(iter(HAS_BATCH_INVARIANT_LOGP))
    )
    with pytest.raises(EnvironmentMissing) as caught:
        install(load_loss_module(), make_settings(tmp_path, Mode.REQUIRE, "logp", "ratio_kl"), case=case)
    assert [problem.what for problem in caught.value.problems] == [
        "logp: has no accepted implementation on this platform (rocm, RL-Kernel 202f0e30e567)",
        "ratio_kl: computes no gradient of the entropy bonus",
    ]


def test_auto_without_rl_kernel_warns_once_and_counts_every_fallback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module, args = load_loss_module(), make_args()
    expected = train_once(module, args)
    with install(module, make_settings(tmp_path, Mode.AUTO, "logp", "ratio_kl")) as installation:
        found = train_once(module, args)
        installation.end_step(0)
        train_once(module, args)
        installation.end_step(1)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"rlk-repro: {op} falls back to loss_example: RL-Kernel cannot be imported" for op in ("logp", "ratio_kl")
    ]
    header, *events = read_events(tmp_path)
    assert (header["mode"], header["is_requested"]) == ("auto", True)
    assert header["ops"] == ["logp", "ratio_kl"]
    assert (header["trainer"], header["target"], header["rank"]) == ("example", "loss_example", 0)
    assert [event["event"] for event in events] == ["decision", "decision", "step", "step", "end"]
    assert (events[0]["implementation"], events[0]["version"]) == ("loss_example", "")
    assert events[0]["reason"] == "RL-Kernel cannot be imported"
    assert events[0]["is_rl_kernel"] is False
    two = {"calls": 0, "tokens": 0, "fallbacks": 2}
    assert [event["calls"] for event in events[2:4]] == [{"logp": two, "ratio_kl": two}] * 2
    four = two | {"fallbacks": 4}
    assert events[4] == {"event": "end", "num_steps": 2, "calls": {"logp": four, "ratio_kl": four}}


def test_a_route_serves_its_calls_and_no_others(tmp_path: Path) -> None:
    module, args = load_loss_module(), make_args()
    expected = train_once(module, args)
    settings = make_settings(tmp_path, Mode.REQUIRE, "logp")
    with install(module, settings, routes={"logp": make_route}) as installation:
        found = train_once(module, args)
        installation.end_step(0)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    decision, step = read_events(tmp_path)[1:3]
    assert (decision["implementation"], decision["version"], decision["is_rl_kernel"]) == (
        "NativeLogpOp",
        "0.1.0",
        True,
    )
    assert step["calls"] == {"logp": {"calls": 2, "tokens": 2 * NUM_ROWS, "fallbacks": 0}}


def test_a_call_that_a_route_refuses_falls_back_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = load_loss_module()
    logits, tokens = torch.zeros(2, 3), torch.tensor([0, 1])
    settings = make_settings(tmp_path, Mode.AUTO, "logp")
    with install(module, settings, routes={"logp": make_route}) as installation:
        for _ in range(2):
            module.calculate_log_probs_and_entropy(logits, tokens, None, with_entropy=True)
        installation.end_step(0)
    reason = "does not compute the entropy that this run reports"
    assert caplog.messages == [f"rlk-repro: logp falls back to loss_example: {reason}"]
    events = read_events(tmp_path)
    assert [event["reason"] for event in events if event["event"] == "decision"] == ["", reason]
    assert events[3]["calls"] == {"logp": {"calls": 0, "tokens": 0, "fallbacks": 2}}


def test_in_require_a_refused_call_stops_the_trainer(tmp_path: Path) -> None:
    module = load_loss_module()
    installation = install(module, make_settings(tmp_path, Mode.REQUIRE, "logp"), routes={"logp": make_route})
    with installation, pytest.raises(CheckFailed) as caught:
        module.calculate_log_probs_and_entropy(torch.zeros(2, 3), torch.tensor([0, 1]), None, with_entropy=True)
    assert str(caught.value) == (
        "logp: a call cannot be served: does not compute the entropy that this run reports, "
        "expected no fallback, because the mode is require"
    )


@pytest.mark.parametrize(
    ("case", "implementation", "reason"),
    [
        (Case(platform="cuda"), "NativeLogpOp", "resolved to an implementation that is not accepted (NativeLogpOp)"),
        (CPU, "FusedLogpGenericOp", "resolved to an implementation that is not accepted (FusedLogpGenericOp)"),
    ],
)
def test_an_implementation_that_does_not_count_is_a_fallback(case: Case, implementation: str, reason: str) -> None:
    def make_wrong(context: RouteContext) -> Route:
        return Route(implementation=implementation, version="", refuse=accept, run=accept)

    found = resolve("logp", RouteContext(case=case, native=print, args=None), {"logp": make_wrong})
    assert isinstance(found, Refusal)
    assert str(found) == reason


def test_an_ops_file_that_is_there_already_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "trial" / "ops" / "0.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("another trial's\n")
    module = load_loss_module()
    before = module.policy_loss_function
    with pytest.raises(SpecError) as caught:
        install(module, make_settings(tmp_path))
    assert str(caught.value) == (
        f"{path}: exists already, written by another process, expected a folder of its own for every trial\n"
        "  hint: set RLK_REPRO_OPS_DIR to another folder, or move the old files away"
    )
    assert path.read_text() == "another trial's\n"
    assert module.policy_loss_function is before
