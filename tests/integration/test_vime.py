"""What the integration does to vime: its loss module, its optimizer, and where a step ends."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from rlk_repro.base.errors import EnvironmentMissing
from rlk_repro.integration import vime
from rlk_repro.integration.vime_abi import UPDATERS
from tests import ROOT
from tests.support.loss_examples import load_loss_module, make_args, train_once

REPOSITORY = ROOT
PACKAGE = "vime.backends.megatron_utils"


class Optimizer:
    def __init__(self) -> None:
        self.num_steps = 0

    def step(self) -> tuple[bool, float, None]:
        self.num_steps += 1
        return True, 0.5, None


class FakeVime:
    """The two modules of vime that are touched: its loss module here is the reference trainer's core."""

    def __init__(self) -> None:
        self.loss, self.actor = load_loss_module(), ModuleType(f"{PACKAGE}.actor")
        self.perf_lines: list[tuple[int, Any]] = []

        def initialize_model_and_optimizer(args: Any, role: str = "actor") -> tuple[str, Optimizer, None, int]:
            return "model", Optimizer(), None, -1

        def log_perf_data(rollout_id: int, args: Any, extra_metrics: dict[str, Any] | None = None) -> None:
            self.perf_lines.append((rollout_id, extra_metrics))

        def forward_only(f: Any, args: Any, model: Any, data_iterator: Any, num_microbatches: Any,
                         store_prefix: str = "", use_rollout_top_p_replay: bool = False) -> str:  # fmt: skip
            return f"{store_prefix}passed"

        def train(rollout_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any, data_iterator: Any,
                  num_microbatches: Any, global_batch_sizes: Any) -> str:  # fmt: skip
            return "trained"

        def get_data_iterator(rollout_data: Any) -> list[Any]:
            return [rollout_data]

        for name in UPDATERS:
            setattr(self.actor, name, type(name, (), {"connect_rollout_engines": lambda *_: None}))
        self.actor.get_data_iterator = get_data_iterator  # type: ignore[attr-defined]
        self.actor.forward_only, self.actor.train = forward_only, train  # type: ignore[attr-defined]
        self.actor.initialize_model_and_optimizer = initialize_model_and_optimizer  # type: ignore[attr-defined]
        self.actor.log_perf_data = log_perf_data  # type: ignore[attr-defined]

    def place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        names = PACKAGE.split(".")
        for number in range(1, len(names) + 1):
            monkeypatch.setitem(sys.modules, ".".join(names[:number]), ModuleType(names[number - 1]))
        for name, module in (("actor", self.actor), ("loss", self.loss)):
            setattr(sys.modules[PACKAGE], name, module)


pytestmark = pytest.mark.usefixtures("without_rl_kernel")


@pytest.fixture
def fake_vime(monkeypatch: pytest.MonkeyPatch) -> FakeVime:
    fake = FakeVime()
    fake.place(monkeypatch)
    for name in ("VIME_RL_KERNEL", "VIME_RL_KERNEL_MODE", "VIME_RL_KERNEL_OPS", "VIME_RL_KERNEL_SCHEDULE",
                 "VIME_RL_KERNEL_COMMIT", "RLK_REPRO_OPS_DIR"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    return fake


def make_vime_args(**changes: Any) -> argparse.Namespace:
    return make_args(tensor_model_parallel_size=1, context_parallel_size=1, **changes)


def read_events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "0.jsonl").read_text().splitlines()]


def test_with_nothing_asked_for_nothing_is_touched(fake_vime: FakeVime) -> None:
    before = dict(vars(fake_vime.loss)), dict(vars(fake_vime.actor))
    assert vime.install(make_vime_args()) is None
    assert before == (vars(fake_vime.loss), vars(fake_vime.actor))


def test_a_step_ends_when_vime_has_logged_it_and_holds_the_optimizer(
    fake_vime: FakeVime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLK_REPRO_OPS_DIR", str(tmp_path / "ops"))
    before = dict(vars(fake_vime.loss)), dict(vars(fake_vime.actor))
    args, actor = make_vime_args(), fake_vime.actor
    installation = vime.install(args)
    assert installation is not None
    assert vime.install(args) is installation
    _, optimizer, _, iteration = actor.initialize_model_and_optimizer(args, "actor")
    assert iteration == -1
    for rollout_id in (5, 6):
        assert actor.forward_only(None, args, [], [], [], store_prefix="ref_") == "ref_passed"
        assert actor.train(rollout_id, [], optimizer, None, [], [], []) == "trained"
        train_once(fake_vime.loss, args)
        assert optimizer.step() == (True, 0.5, None)
        actor.log_perf_data(rollout_id, args, extra_metrics={"x": 1})
    installation.undo()
    assert before == (vars(fake_vime.loss), vars(fake_vime.actor))
    assert optimizer.num_steps == 2
    assert fake_vime.perf_lines == [(5, {"x": 1}), (6, {"x": 1})]
    header, *steps, end = read_events(tmp_path / "ops")
    assert (header["trainer"], header["is_requested"], end["event"]) == ("vime", False, "end")
    assert [step["step"] for step in steps] == [5, 6]
    assert all({"optimizer", "step", "grpo_loss_backward"} <= set(step["timers"]) for step in steps)
    phases = {f"peak_rss_bytes{phase}" for phase in ("", "_in_forward_only", "_in_update")}
    assert all(set(step["memory"]) == phases for step in steps)
    assert (tmp_path / "libraries" / "0.json").is_file()


def plan_session(monkeypatch: pytest.MonkeyPatch, ops: Path, schedule: str) -> None:
    switches = {"": "1", "_MODE": "auto", "_OPS": "logp", "_SCHEDULE": schedule}
    for name, value in switches.items():
        monkeypatch.setenv(f"VIME_RL_KERNEL{name}", value)
    monkeypatch.setenv("RLK_REPRO_OPS_DIR", str(ops))


def test_a_schedule_switches_before_the_actor_trains_a_rollout(
    fake_vime: FakeVime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, actor = make_vime_args(), fake_vime.actor
    before, expected = dict(vars(actor)), train_once(fake_vime.loss, args)
    plan_session(monkeypatch, tmp_path / "ops", "beb")
    installation = vime.install(args)
    assert installation is not None
    for rollout_id in range(3):
        assert actor.get_data_iterator("data") == ["data"]
        assert all(map(torch.equal, train_once(fake_vime.loss, args), expected))
        actor.log_perf_data(rollout_id, args)
    installation.undo()
    assert before == dict(vars(actor))
    steps = [event for event in read_events(tmp_path / "ops") if event["event"] == "step"]
    assert [step["variant"] for step in steps] == ["baseline", "enabled", "baseline"]
    assert [step["calls"]["logp"]["fallbacks"] > 0 for step in steps] == [False, True, False]


class RoutingReplay:
    """What is read of vime's class: choices for one router, and how many of them it took."""

    all_routing_replays: ClassVar[list[RoutingReplay]] = []

    def __init__(self) -> None:
        self.top_indices_list: list[str] = []
        self.forward_index = self.backward_index = 0
        self.all_routing_replays.append(self)

    @staticmethod
    def clear_all_forward() -> None:
        for item in RoutingReplay.all_routing_replays:
            item.forward_index = 0

    @staticmethod
    def clear_all() -> None:
        for item in RoutingReplay.all_routing_replays:
            item.forward_index = item.backward_index = 0
            item.top_indices_list = []


@pytest.mark.parametrize(
    ("taken", "counts"),
    [
        (((2, 0), (2, 2)), {"routers": 3, "routers_replayed": 3}),  # with recomputation
        (((2, 0), (2, 0)), {"routers": 3, "routers_replayed": 3}),  # without
        (((2, 0), (0, 0)), {"routers": 3, "routers_replayed": 2}),  # not in the training pass
        (((1, 0), (2, 2)), {"routers": 3, "routers_replayed": 2}),  # not all in the old-policy pass
        (((2, 0), (2, 1)), {"routers": 3, "routers_replayed": 2}),  # not all in the recomputation
    ],
)
def test_a_session_counts_the_routers_that_took_all_of_the_rollouts_experts(
    fake_vime: FakeVime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    taken: Sequence[tuple[int, int]], counts: dict[str, int],
) -> None:  # fmt: skip
    module = ModuleType("vime.utils.routing_replay")
    module.RoutingReplay = RoutingReplay  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vime.utils", ModuleType("vime.utils"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(RoutingReplay, "all_routing_replays", [])
    plan_session(monkeypatch, tmp_path / "ops", "b")
    args, before = make_vime_args(use_rollout_routing_replay=True), dict(vars(RoutingReplay))
    with vime.install(args) as installation:  # type: ignore[union-attr]
        assert installation is not None
        fake_vime.actor.get_data_iterator("data")
        routers = [RoutingReplay() for _ in range(3)]
        for router in routers:
            router.top_indices_list = ["microbatch 0", "microbatch 1"]
        ends = (RoutingReplay.clear_all_forward, RoutingReplay.clear_all)
        for clear, last in zip(ends, taken, strict=True):
            for router in routers[:2]:
                router.forward_index = 2
            routers[2].forward_index, routers[2].backward_index = last
            clear()
        fake_vime.actor.log_perf_data(0, args)
    assert before == dict(vars(RoutingReplay))
    (step,) = (event for event in read_events(tmp_path / "ops") if event["event"] == "step")
    assert {name: step["counts"][name] for name in counts} == counts


@pytest.mark.usefixtures("fake_vime")
def test_the_layout_decides_what_may_be_routed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("", "1"), ("_MODE", "auto"), ("_OPS", "grpo_loss,logp")):
        monkeypatch.setenv(f"VIME_RL_KERNEL{name}", value)
    args = make_vime_args()
    args.tensor_model_parallel_size = 4
    installation = vime.install(args)
    assert installation is not None
    installation.undo()
    assert [decision.reason for decision in installation.ledger.decisions] == [
        "needs the whole vocabulary on one rank (tensor parallel size 4)",
        "RL-Kernel cannot be imported",
    ]


def test_output_layers_are_deferred_in_the_actors_model_only(
    fake_vime: FakeVime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[Any] = []
    monkeypatch.setattr(vime, "defer_output_layers", lambda _, model: models.append(model))
    monkeypatch.setenv("RLK_REPRO_OPS_DIR", str(tmp_path / "ops"))
    args = make_vime_args()
    installation = vime.install(args)
    assert installation is not None
    with installation:
        fake_vime.actor.initialize_model_and_optimizer(args, "critic")
        assert models == []
        fake_vime.actor.initialize_model_and_optimizer(args)
        assert models == ["model"]


def test_another_vime_is_refused_before_anything_is_replaced(
    fake_vime: FakeVime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLK_REPRO_OPS_DIR", str(tmp_path / "ops"))
    del fake_vime.actor.log_perf_data
    before = dict(vars(fake_vime.loss))
    with pytest.raises(EnvironmentMissing, match=r"actor\.log_perf_data: no such function"):
        vime.install(make_vime_args())
    assert before == vars(fake_vime.loss)
    assert not (tmp_path / "ops").exists()
