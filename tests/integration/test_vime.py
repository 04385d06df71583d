"""What the integration does to vime: its loss module, its optimizer, and where a step ends."""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rlk_repro.base import proc
from rlk_repro.base.errors import EnvironmentMissing
from rlk_repro.integration import vime
from rlk_repro.integration.vime_abi import UPDATERS
from tests import ROOT
from tests.support.loss_examples import load_loss_module, make_args, make_batch, train_once

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


@pytest.fixture(autouse=True)
def without_rl_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not it is installed here."""
    monkeypatch.setitem(sys.modules, "rl_engine", None)


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


def test_a_schedule_switches_before_the_actor_trains_a_rollout(
    fake_vime: FakeVime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, actor = make_vime_args(), fake_vime.actor
    before, expected = dict(vars(actor)), train_once(fake_vime.loss, args)
    for name, value in (("VIME_RL_KERNEL", "1"), ("VIME_RL_KERNEL_MODE", "auto"), ("VIME_RL_KERNEL_OPS", "logp"),
                        ("VIME_RL_KERNEL_SCHEDULE", "beb"), ("RLK_REPRO_OPS_DIR", str(tmp_path / "ops"))):  # fmt: skip
        monkeypatch.setenv(name, value)
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


def test_the_layout_decides_what_may_be_routed(
    fake_vime: FakeVime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLK_REPRO_OPS_DIR", str(tmp_path / "ops"))
    monkeypatch.setenv("VIME_RL_KERNEL", "1")
    monkeypatch.setenv("VIME_RL_KERNEL_MODE", "auto")
    monkeypatch.setenv("VIME_RL_KERNEL_OPS", "grpo_loss,logp")
    args = make_vime_args()
    args.tensor_model_parallel_size = 4
    installation = vime.install(args)
    assert installation is not None
    installation.undo()
    decisions = [event["reason"] for event in read_events(tmp_path / "ops") if event["event"] == "decision"]
    assert decisions == [
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


needs_vime = pytest.mark.skipif(
    not (os.environ.get("VIME_SRC") and os.environ.get("MEGATRON_SRC")),
    reason="VIME_SRC and MEGATRON_SRC do not name checkouts of vime and Megatron-LM",
)


def run_seam(folder: Path, world: int) -> list[dict[str, Any]]:
    """What each rank says of vime's own loss, the vocabulary being split over all of them."""
    sources = [str(REPOSITORY), os.environ["VIME_SRC"], os.environ["MEGATRON_SRC"], os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sources), "OMP_NUM_THREADS": "1"}

    def run(rank: int) -> proc.Completed:
        command = [sys.executable, "-m", "tests.support.vime_seam", str(rank), str(world), str(folder)]
        return proc.run(command, cwd=REPOSITORY, env=environment, timeout_s=240)

    with ThreadPoolExecutor(world) as pool:
        completed = list(pool.map(run, range(world)))
    assert all(item.is_ok for item in completed), completed[0].stderr
    return [json.loads(item.stdout.splitlines()[-1]) for item in completed]


@needs_vime
def test_a_session_over_a_split_vocabulary_switches_on_both_ranks(tmp_path: Path) -> None:
    for result in run_seam(tmp_path, 2):
        assert result["is_same"]
        assert result["is_same_by_turn"] == [True, False, True, True]
        assert [(shadow["step"], shadow["case"]) for shadow in result["shadows"]] == [(3, "as trained"), (3, "peaked")]
        assert not any("error" in shadow for shadow in result["shadows"])


@needs_vime
def test_vime_s_own_loss_is_bitwise_the_same_under_the_timers(tmp_path: Path) -> None:
    (result,) = run_seam(tmp_path, 1)
    assert result["is_same"]
    assert result["is_same_by_turn"] == [True, False, True, True]
    assert [(shadow["step"], shadow["case"]) for shadow in result["shadows"]] == [(3, "as trained"), (3, "peaked")]
    batch = make_batch()
    pairs = zip(batch["log_probs"], batch["rollout_log_probs"], strict=True)
    differences = torch.cat([(ours - theirs).abs() for ours, theirs in pairs])
    for step in result["agreement"]:
        assert step["tokens"] == len(differences)
        assert step["largest"]["abs"] == pytest.approx(differences.max().item())
        assert sum(sum(row[8:]) for row in step["by_log_prob"]) == (differences > 1).sum().item()
    for shadow in result["shadows"]:
        assert (shadow["log_probs"]["max_abs"], shadow["logits_grad"]["max_abs"]) == (0.0, 0.0)
        off_by = 0.01 * shadow["log_probs_no_grad"]["max_abs_baseline"]
        assert shadow["log_probs_no_grad"]["max_abs"] == pytest.approx(off_by, rel=1e-3)
        assert shadow["loss"]["baseline"] == shadow["loss"]["enabled"] != 0
    assert set(result["timers"]) == {
        "step",
        "log_probs_forward",
        "log_probs_backward",
        "log_probs_no_grad",
        "clip_kl_forward",
        "clip_kl_backward",
        "grpo_loss_forward",
        "grpo_loss_backward",
    }
    assert result["timers"]["grpo_loss_backward"] > result["timers"]["log_probs_backward"] > 0
