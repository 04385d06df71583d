"""The process that measures claims, on a CPU with a double of RL-Kernel; speed is nobody's business here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from rlk_repro import __version__
from rlk_repro.bench.claims import (
    CLASSES,
    FUNCTIONS,
    load_operator,
    make_call,
    make_inputs,
    sample_natively,
)
from rlk_repro.bench.implementation import Blocked
from rlk_repro.claims.check import check_claims
from rlk_repro.claims.files import Claim, Pass
from rlk_repro.claims.processes import Bench, measure_claim
from rlk_repro.claims.results import Cell, Task, Word
from rlk_repro.claims.text import check_lines
from rlk_repro.rundir.operator_results import OperatorStatus
from tests import ROOT, SUPPORT
from tests.support.claim_examples import CLAIM, MEASURABLE, cell, make_claim

DOUBLE = SUPPORT / "fake_rl_engine"
TWO_ROWS = CLAIM.replace(
    "rows:\n",
    "rows:\n  - row: first\n    shape: {sequences: 1, tokens: 1, vocab: 8}\n"
    "    published: {native: {time: 1}, triton: {time: 1}}\n",
    1,
)
SHAPE = {"sequences": 4, "prompts": 2, "samples": 2, "tokens": 3, "hidden": 8, "vocab": 50}


@pytest.fixture
def bench() -> Bench:
    return make_bench(DOUBLE)


def make_bench(*folders: Path, timeout_s: float = 60.0) -> Bench:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT))), "OMP_NUM_THREADS": "1"}
    env.pop("RLK_SRC", None)
    return Bench(device="cpu", warmup=1, repeats=2, timeout_s=timeout_s, env=env)


def make_task(operator: str, implementation: str, pass_: Pass = "forward") -> tuple[Task, Cell]:
    measurable = MEASURABLE[operator]
    settings = {"clip_eps": 0.2, "beta": 0.04, "top_k": 5, "top_p": 0.9}
    cell = Cell(row="small", implementation=implementation, pass_=pass_)
    task = Task(
        operator=operator,
        settings={name: settings[name] for name in measurable.settings},
        dtype="float32",
        device="cpu",
        warmup=0,
        repeats=1,
        shapes={cell.row: {name: SHAPE[name] for name in measurable.dimensions}},
        cells=(cell,),
    )
    return task, cell


def test_the_process_can_call_everything_that_a_claim_may_name() -> None:
    named = {(operator, name) for operator, item in MEASURABLE.items() for name in item.implementations}
    assert named == set(CLASSES) | FUNCTIONS


@pytest.mark.parametrize(
    ("operator", "pass_"), [(name, pass_) for name, item in MEASURABLE.items() for pass_ in item.passes]
)
def test_the_native_side_of_every_operator_runs(operator: str, pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOUBLE))
    task, cell = make_task(operator, "native", pass_)
    inputs = make_inputs(task, cell.row)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    make_call(task, cell, load_operator(task, cell), inputs)()
    assert all(torch.equal(before[name], tensor) for name, tensor in inputs.items())


@pytest.mark.parametrize(
    ("operator", "implementation"),
    [key for key in CLASSES if key[1] in {"fused", "triton", "sm90"}],
)
def test_kernels_are_refused_before_they_are_called_where_there_is_no_gpu(operator: str, implementation: str) -> None:
    assert load_operator(*make_task(operator, implementation)) == Blocked("needs a GPU")


def test_native_sampling_draws_from_the_nucleus_of_the_largest() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([[0.0, 5.0, 4.9, -3.0], [9.0, 0.0, 0.0, 0.0]])
    drawn = {tuple(sample_natively(logits, top_k=2, top_p=0.6).flatten().tolist()) for _ in range(60)}
    assert drawn == {(1, 0), (2, 0)}


def test_a_claim_is_measured_in_a_process_of_its_own(bench: Bench) -> None:
    found = measure_claim(make_claim(), bench)
    native, triton = found.measurements[cell("native")], found.measurements[cell("triton")]
    assert (native.status, native.ran, len(native.samples_s)) == (OperatorStatus.PASSED, "NativeRatioKLOp", 2)
    assert native.input_bytes == 2 * 2 * 4 * 4096 * 4 + 2 * 4 * (8 + 1 + 4) + 2 * 4
    assert native.peak_extra_bytes is None
    assert (triton.status, triton.reason) == (OperatorStatus.BLOCKED, "needs a GPU")
    assert found.process["device"] == "cpu"
    assert {"commit", "is_dirty", "is_compiled"} <= set(found.process["rl_kernel"])


def test_a_cold_cell_is_one_call_of_a_fresh_process(bench: Bench) -> None:
    claim = make_claim(CLAIM.replace("candidate: triton}", "candidate: triton, is_cold: true}"))
    found = measure_claim(claim, bench).measurements
    assert len(found[cell("native", is_cold=True)].samples_s) == 1
    assert len(found[cell("native")].samples_s) == 2


def write_operator(folder: Path, body: str) -> Path:
    """An rl_engine whose native ratio_kl does ``body`` when it is called."""
    path = folder / "rl_engine" / "kernels" / "ops" / "pytorch" / "loss" / "ratio_kl.py"
    path.parent.mkdir(parents=True)
    for parent in path.relative_to(folder).parents:
        if parent != Path():
            (folder / parent / "__init__.py").touch()
    path.write_text(
        f"import os, signal, sys, time\nclass NativeRatioKLOp:\n    def __call__(self, *args):\n        {body}\n"
    )
    return folder


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "the measuring process was killed by SIGSEGV"),
        ("os._exit(7)", "the measuring process ended with exit code 7"),
    ],
)
def test_a_cell_that_kills_its_process_says_how_it_ended(tmp_path: Path, body: str, reason: str) -> None:
    found = measure_claim(make_claim(), make_bench(write_operator(tmp_path, body))).measurements
    assert (found[cell("native")].status, found[cell("native")].reason) == (OperatorStatus.FAILED, reason)


def test_a_cell_that_fails_never_ends_the_rest(tmp_path: Path) -> None:
    """And its reason tells no folder of this machine."""
    folder = write_operator(tmp_path, f"raise ValueError('{Path.home()}/x is broken')")
    found = measure_claim(make_claim(TWO_ROWS), make_bench(folder)).measurements
    statuses = {(item.cell.row, item.cell.implementation): item.status for item in found.values()}
    assert statuses == {
        ("first", "native"): OperatorStatus.FAILED,
        ("first", "triton"): OperatorStatus.BLOCKED,
        ("small", "native"): OperatorStatus.FAILED,
        ("small", "triton"): OperatorStatus.BLOCKED,
    }
    assert {item.reason for item in found.values() if item.status is OperatorStatus.FAILED} == {
        "ValueError: ~/x is broken"
    }


def test_an_implementation_that_hangs_is_given_up_once_and_for_all(tmp_path: Path) -> None:
    bench = make_bench(write_operator(tmp_path, "time.sleep(90)"), timeout_s=20.0)  # the others import torch meanwhile
    found = measure_claim(make_claim(TWO_ROWS), bench).measurements
    assert {(item.status, item.reason) for item in found.values() if item.cell.implementation == "native"} == {
        (OperatorStatus.FAILED, "the measuring process exceeded its time limit")
    }
    assert {item.status for item in found.values() if item.cell.implementation == "triton"} == {OperatorStatus.BLOCKED}


def test_without_torch_every_cell_fails_at_once_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    found = measure_claim(make_claim(), make_bench(tmp_path)).measurements
    assert {(item.status, item.reason) for item in found.values()} == {
        (OperatorStatus.FAILED, "ModuleNotFoundError: No module named 'torch'")
    }


def test_where_rl_kernel_is_absent_the_cell_says_so(tmp_path: Path) -> None:
    (tmp_path / "rl_engine.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'rl_engine'\", name='rl_engine')\n"
    )
    found = measure_claim(make_claim(), make_bench(tmp_path)).measurements
    assert found[cell("native")].status is OperatorStatus.BLOCKED
    where = "rl_engine.kernels.ops.pytorch.loss.ratio_kl"
    assert found[cell("native")].reason == f"{where} needs the module rl_engine, which is not installed"


def test_a_machine_without_a_gpu_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlk_repro.claims.check.gpu.probe", lambda: {"vendor": "none", "count": 0, "devices": []})
    monkeypatch.setattr("rlk_repro.claims.check.measure_claim", lambda *_: pytest.fail("a process was started"))
    found = check_claims([make_claim()])
    assert [row.word for row in found.results[0].rows] == [Word.ARITHMETIC]
    assert not found.has_measured
    assert (found.version, found.process) == (__version__, {})


def test_on_a_gpu_every_claim_is_announced_and_its_environment_recorded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is a CPU underneath; only the name of the GPU is made up."""
    devices = {"vendor": "nvidia", "count": 1, "driver": "580.1", "devices": [{"name": "NVIDIA H200"}]}
    monkeypatch.setattr("rlk_repro.claims.check.gpu.probe", lambda: devices)
    heard: list[str] = []
    claim: Claim = make_claim()
    found = check_claims([claim], bench, heard.append)
    assert heard == ["example (1 of 1)"]
    assert found.results[0].here == "NVIDIA H200"
    assert found.results[0].is_same_hardware is False
    assert found.process["torch"] == str(torch.__version__)
    assert found.environment["code"]["rl_kernel"]["is_compiled"] is False
    with_what = next(line for line in check_lines(found) if line.startswith("measured with "))
    assert with_what.startswith(f"measured with cpu, driver 580.1, torch {torch.__version__}, RL-Kernel at ")


@pytest.mark.gpu
def test_a_claim_runs_on_this_gpu() -> None:
    env = dict(os.environ)
    found = measure_claim(make_claim(), Bench(env=env))
    assert found.measurements[cell("native")].status in {OperatorStatus.PASSED, OperatorStatus.BLOCKED}
