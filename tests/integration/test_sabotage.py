"""Ways to make "enabled" mean something else, each caught, named, and a stop or a void by the mode.

RL-Kernel is the double of tests/support/fake_rl_engine, its operators replaced by broken ones.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from importlib.metadata import Distribution
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlk_repro.analysis.proof import Proof, prove
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, SpecError
from rlk_repro.integration.measure.installation import Installation
from rlk_repro.integration.measure.ranks import check_ranks_agree
from rlk_repro.integration.route import rl_kernel as installed
from rlk_repro.integration.route.api import RouteContext, resolve
from rlk_repro.integration.route.rl_kernel import LoadedOperator, RouteFailed
from rlk_repro.integration.route.table import ROUTES
from rlk_repro.integration.switch import Mode, Settings, install_into
from rlk_repro.logs.ops import read_ops
from rlk_repro.operators import Case, Refusal
from rlk_repro.rundir.paths import TrialDir
from rlk_repro.rundir.results import ProofStatus
from tests.support.loss_examples import load_loss_module, make_args, run_ranks, train_once

OPS = ("logp", "ratio_kl")
CPU = Case(platform="cpu")
pytestmark = pytest.mark.usefixtures("rl_kernel")


def make_settings(folder: Path, mode: Mode) -> Settings:
    return Settings(mode=mode, ops=OPS, ops_dir=folder / "ops")


def install(module: ModuleType, folder: Path, mode: Mode = Mode.REQUIRE, case: Case = CPU) -> Installation:
    return install_into(module, make_settings(folder, mode), trainer="example", case=case)


def train(folder: Path, mode: Mode) -> None:
    module = load_loss_module()
    with install(module, folder, mode) as installation:
        train_once(module, make_args())
        installation.end_step(0)


def judge(folder: Path) -> Proof:
    return prove(read_ops(TrialDir(folder)), variant="enabled", requested_ops=OPS, platform="cpu")


def count_calls(folder: Path) -> int:
    return sum(count.calls for count in read_ops(TrialDir(folder)).calls.values())


def change_method(op: Any, name: str, change: Callable[[Any], Any]) -> Any:
    """An operator of the same class name with one method's answers changed."""
    original = getattr(op, name)
    return type(type(op).__name__, (type(op),), {name: lambda _, *args: change(original(*args))})()


def change_logp(registry: Any, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    original = registry.get_op
    broken = change_method(original("logp"), "online_fp32", change)
    monkeypatch.setattr(registry, "get_op", lambda name: broken if name == "logp" else original(name))


def test_whole_and_sound_it_is_proved_to_have_been_invoked(tmp_path: Path) -> None:
    train(tmp_path, Mode.REQUIRE)
    assert (judge(tmp_path).status, count_calls(tmp_path)) == (ProofStatus.NATIVE, 4)


def test_1_the_extension_is_missing(tmp_path: Path) -> None:
    case = Case(platform="cuda")
    with pytest.raises(EnvironmentMissing) as caught:
        install(load_loss_module(), tmp_path, case=case)
    assert caught.value.problems[0].what.startswith(
        "logp: resolved to an implementation that is not accepted (NativeLogpOp, because rl_engine._C cannot be"
    )
    found = resolve("ratio_kl", RouteContext(case=case, native=print, args=None), ROUTES)
    assert isinstance(found, Refusal)
    assert found.detail.startswith("NativeRatioKLOp, because rl_engine._C cannot be imported")


def test_2_an_operator_s_name_is_misspelt() -> None:
    with pytest.raises(SpecError, match="VIME_RL_KERNEL_OPS: unknown or repeated operator, got 'logp,ratio-kl'"):
        Settings.from_env({"VIME_RL_KERNEL": "1", "VIME_RL_KERNEL_OPS": "logp,ratio-kl"})


def test_3_the_registry_answers_with_another_operator(
    tmp_path: Path, rl_kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rl_kernel, "_backends", {})
    with pytest.raises(EnvironmentMissing, match=r"ratio_kl: resolved to an implementation .* \(NativeLogpOp"):
        install(load_loss_module(), tmp_path)
    train(tmp_path, Mode.AUTO)
    assert "NativeLogpOp" in judge(tmp_path).reason


def test_4_a_kernel_raises_midway(tmp_path: Path, rl_kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(result: Any) -> Any:
        if len(calls) == 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        calls.append(result)
        return result

    calls: list[Any] = []
    change_logp(rl_kernel, monkeypatch, fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        train(tmp_path, Mode.AUTO)
    assert judge(tmp_path).reason == "no step was recorded"


@pytest.mark.parametrize("value", [float("nan"), 0.5])
def test_5_answers_that_are_no_log_probs(
    tmp_path: Path, rl_kernel: Any, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    change_logp(rl_kernel, monkeypatch, lambda result: result.index_fill(0, torch.tensor([2]), value))
    with pytest.raises(CheckFailed) as caught:
        train(tmp_path / "require", Mode.REQUIRE)
    assert str(caught.value).startswith(f"logp, step 0: the operator returned {value}, expected a value of at most 0")
    train(tmp_path / "auto", Mode.AUTO)
    proof = judge(tmp_path / "auto")
    assert (proof.status, proof.reason) == (
        ProofStatus.MISSING,
        f"logp: ops/0.jsonl:4: the operator returned {value}, expected a value of at most 0",
    )


def test_6_an_answer_of_the_wrong_shape(tmp_path: Path, rl_kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    change_logp(rl_kernel, monkeypatch, lambda result: result[:-1])
    with pytest.raises(RouteFailed, match=r"logp: the result is not as documented, got '\(19,\)"):
        train(tmp_path, Mode.AUTO)


def test_7_a_gradient_is_cut_off(tmp_path: Path, rl_kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = rl_kernel.get_op
    broken = change_method(original("ratio_kl"), "__call__", lambda result: (result[0].detach(), result[1]))
    monkeypatch.setattr(rl_kernel, "get_op", lambda name: broken if name == "ratio_kl" else original(name))
    with pytest.raises(RouteFailed, match="ratio_kl: returned a result without gradient"):
        train(tmp_path, Mode.AUTO)


def test_8_the_trainer_s_function_takes_other_arguments(tmp_path: Path) -> None:
    module = load_loss_module()

    def calculate_log_probs_and_entropy(logits: Any, tokens: Any, tp_group: Any, temperature: float) -> None:
        """A later trainer's."""

    module.calculate_log_probs_and_entropy = calculate_log_probs_and_entropy  # type: ignore[attr-defined]
    for mode in (Mode.AUTO, Mode.REQUIRE):
        with pytest.raises(EnvironmentMissing, match=r"takes other arguments, got .*temperature"):
            install(module, tmp_path, mode)


def test_9_it_is_installed_twice(tmp_path: Path) -> None:
    module = load_loss_module()
    with install(module, tmp_path) as installation:
        assert install(module, tmp_path) is installation
        train_once(module, make_args())
        installation.end_step(0)
    assert count_calls(tmp_path) == 4


def test_10_it_is_half_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rl_engine.kernels.registry", None)
    with pytest.raises(EnvironmentMissing, match=r"RL-Kernel cannot be imported \(.*rl_engine\.kernels\.registry"):
        install(load_loss_module(), tmp_path)
    train(tmp_path, Mode.AUTO)
    assert judge(tmp_path).status is ProofStatus.FALLBACK


def run_rank(rank: int, folder: str, choices: tuple[str | None, str | None]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    choice = choices[rank]
    with contextlib.suppress(CheckFailed):
        try:
            if choice is not None:
                check_ranks_agree(rank, 2, choice, wait_s=1 if None in choices else 60)
            Path(folder, str(rank)).write_text("went on")
        except CheckFailed as error:
            Path(folder, str(rank)).write_text(str(error))
            raise
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        (("on", None), ("rank 1: has not reported its settings, expected the settings of rank 0: on", "went on")),
        (
            ("on", "off"),
            ("rank 1: has other settings, got 'off', expected the settings of rank 0: on",
             "rank 0: has other settings, got 'on', expected the settings of rank 1: off"),
        ),
    ],
)  # fmt: skip
def test_11_the_environment_reached_one_rank_only(
    tmp_path: Path, choices: tuple[str | None, str | None], expected: tuple[str, str]
) -> None:
    run_ranks(run_rank, str(tmp_path), choices)
    assert [(tmp_path / str(rank)).read_text().splitlines()[0] for rank in range(2)] == list(expected)


def test_11_and_where_no_rank_notices_the_proof_does(tmp_path: Path) -> None:
    train(tmp_path, Mode.REQUIRE)
    with install_into(
        load_loss_module(), Settings(ops_dir=tmp_path / "other"), trainer="example", case=CPU
    ) as installation:
        installation.end_step(0)
    text = (tmp_path / "other" / "0.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    lines[0] |= {"rank": 1, "world_size": 2}
    (tmp_path / "ops" / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert judge(tmp_path).reason == "ops/1.jsonl: the trainer was started with RL-Kernel off"


# Which generation of RL-Kernel is taken, and the commit that a decision names.


@pytest.mark.parametrize("generation", ["kernels", "runtime"])
def test_the_newest_registry_that_is_there_is_asked(
    rl_kernel: Any, monkeypatch: pytest.MonkeyPatch, generation: str
) -> None:
    if generation == "runtime":
        newer: Any = SimpleNamespace(kernel_registry=rl_kernel)
        monkeypatch.setitem(sys.modules, "rl_engine.runtime.registry", newer)
    found = installed.load_operator("ratio_kl", "cpu")
    assert isinstance(found, LoadedOperator)
    assert found.implementation == "NativeRatioKLOp"
    assert found.version.endswith(f" (rl_engine.{generation}.registry)")


@pytest.mark.parametrize(
    ("records", "commit"),
    [
        ({"rlk_repro_build.json": {"commit": "036450b82b551dd7"}}, "036450b82b551dd7"),
        ({"direct_url.json": {"vcs_info": {"commit_id": "202f0e30e56729d1"}}}, "202f0e30e56729d1"),
        ({"direct_url.json": {"dir_info": {}}, "rlk_repro_build.json": {"commit": None}}, None),
        ({}, None),
    ],
)
def test_an_installation_may_record_its_commit(tmp_path: Path, records: Any, commit: Any) -> None:
    for name, value in records.items():
        (tmp_path / name).write_text(json.dumps(value))
    assert installed.find_commit(Distribution.at(tmp_path)) == commit
