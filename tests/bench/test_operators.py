"""The operator tier on a CPU: its cases, what counts as which kind, and what becomes of implementations that fail."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk_repro.base.errors import SpecError
from rlk_repro.bench.cases import CaseTensors, expand_grids, find_floor_s, make_inputs
from rlk_repro.bench.implementation import BenchedImplementation, Builder, NotMeasuredError, Ready, make_call
from rlk_repro.bench.measure import Rates
from rlk_repro.bench.operators import Harness, list_implementations, parse_args
from rlk_repro.bench.peers import list_peers
from rlk_repro.bench.references import check_call, compute_truth
from rlk_repro.logs.operators import parse_operators
from rlk_repro.rundir.operator_results import OperatorCase, OperatorKind, OperatorStatus
from rlk_repro.spec import OperatorsWorkload
from rlk_repro.spec.workloads import Grid
from tests import ROOT

CPU = torch.device("cpu")
RATES = Rates(bytes_per_s=1e9, flops_per_s={"float32": 1e9, "bfloat16": 1e9})
OPERATORS = ("logp", "ratio_kl", "grpo_loss", "linear_logp")


def make_case(operator: str = "logp", **changes: Any) -> OperatorCase:
    settings: dict[str, Any] = {
        "operator": operator,
        "num_tokens": 24,
        "vocab_size": 40,
        "hidden_size": 16 if operator == "linear_logp" else None,
        "dtype": "float32",
        "density": 1.0,
        "work": "forward_backward",
    }
    return OperatorCase(**(settings | changes))


def make_suite(**changes: Any) -> OperatorsWorkload:
    grid = {"operator": "logp", "num_tokens": [24], "vocab_size": [40]}
    settings = {"kind": "operators", "grids": [grid], "warmup_calls": 0, "timed_calls": 2, "oracle_rows": 4}
    return OperatorsWorkload.model_validate_json(json.dumps(settings | changes))


def selected(inputs: CaseTensors) -> torch.Tensor:
    """Log-probs of the tokens, or the losses, by plain torch."""
    leaves = inputs.leaves
    logits = leaves[0] if len(leaves) == 1 else leaves[0] @ leaves[1].t()
    log_probs = logits.float().log_softmax(-1).gather(1, inputs.tokens.unsqueeze(1)).squeeze(1)
    if inputs.case.operator in {"logp", "linear_logp"}:
        return log_probs
    from rlk_repro.bench.implementation import clip_losses, reduce_losses

    return reduce_losses(clip_losses((log_probs - inputs.old_log_probs).exp(), inputs), inputs)


def make_implementation(build: Builder, name: str = "mine") -> BenchedImplementation:
    return BenchedImplementation(name=name, operator="logp", kind=OperatorKind.PEER, build=build)


def ready(forward: Callable[[], torch.Tensor]) -> Ready:
    return Ready(forward=forward, kind=OperatorKind.PEER, class_name="plain", version="1")


def records(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("operator ")) for line in caplog.messages]


def put_through(
    caplog: pytest.LogCaptureFixture, *implementations: BenchedImplementation, suite: OperatorsWorkload | None = None
) -> list[dict[str, Any]]:
    caplog.set_level(logging.INFO)
    harness = Harness(suite or make_suite(), implementations, CPU, RATES, seed=1)
    for case in expand_grids((suite or make_suite()).grids):
        harness.time_case(case, 0)
        harness.check_case(case)
    return records(caplog)


def test_a_grid_gives_every_combination_once() -> None:
    grid = Grid(
        operator="logp",
        num_tokens=(8, 16),
        vocab_size=(32,),
        densities=(1.0, 0.5),
        passes=("forward", "forward_backward"),
    )
    cases = expand_grids([grid, grid])
    assert len(cases) == len(set(cases)) == 8
    assert {case.hidden_size for case in cases} == {None}


def test_tensors_follow_from_the_seed_alone() -> None:
    first, second, other = (make_inputs(make_case("ratio_kl"), CPU, seed) for seed in (1, 1, 2))
    assert first.logits is not None
    assert second.logits is not None
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(first.old_log_probs, second.old_log_probs)
    assert not torch.equal(first.tokens, other.tokens)


@pytest.mark.parametrize(("density", "wanted"), [(1.0, 24), (0.5, 16), (0.34, 8), (0.001, 8)])
def test_the_wanted_rows_are_the_end_of_every_sample(density: float, wanted: int) -> None:
    inputs = make_inputs(make_case(density=density), CPU, 1)
    assert inputs.num_samples == 8
    assert len(inputs.rows) == wanted
    assert inputs.mask.view(8, 3)[:, -1].all()
    assert inputs.weights.sum() == pytest.approx(1.0)


def test_only_tensors_that_need_a_gradient_are_marked() -> None:
    marks = {
        (operator, work): make_inputs(make_case(operator, work=work), CPU, 1).leaves[0].requires_grad
        for operator in OPERATORS
        for work in ("forward", "forward_backward")
    }
    assert [key for key, is_marked in marks.items() if not is_marked] == [
        ("logp", "forward"),
        ("linear_logp", "forward"),
    ]


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_wrong_gradient_is_seen(operator: str) -> None:
    inputs = make_inputs(make_case(operator), CPU, 3)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, values: torch.Tensor) -> torch.Tensor:
            return values.clone()

        @staticmethod
        def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return 2 * grad

    def forward() -> torch.Tensor:
        found: torch.Tensor = Doubled.apply(selected(inputs))  # type: ignore[no-untyped-call]
        return found

    check = check_call(make_call(inputs, ready(forward)), compute_truth(inputs, 8))
    assert check.error < 3e-6
    assert check.gradient_error == pytest.approx(1.0, rel=1e-4)


def test_the_floor_is_traffic_for_logits_and_arithmetic_for_large_products() -> None:
    forward = make_case(work="forward")
    assert find_floor_s(forward, RATES) == pytest.approx(24 * 40 * 4 / 1e9)
    assert find_floor_s(make_case(), RATES) == pytest.approx(3 * 24 * 40 * 4 / 1e9)
    assert find_floor_s(make_case(density=0.5), RATES) == pytest.approx((2 * 16 + 24) * 40 * 4 / 1e9)
    slow = Rates(bytes_per_s=1e15, flops_per_s={"float32": 1e9})
    assert find_floor_s(make_case("linear_logp"), slow) == pytest.approx(6 * 24 * 16 * 40 / 1e9)


def test_running_out_of_memory_is_a_result_and_the_next_one_is_measured(caplog: pytest.LogCaptureFixture) -> None:
    def run_out() -> torch.Tensor:
        raise RuntimeError("CUDA out of memory. Tried to allocate 5.22 GiB.")

    found = put_through(
        caplog,
        make_implementation(lambda _: ready(run_out), "large"),
        make_implementation(lambda inputs: ready(lambda: selected(inputs)), "small"),
    )
    times = {item["implementation"]: item for item in found if item["event"] == "time"}
    assert times["large"]["status"] == OperatorStatus.OOM
    assert times["large"]["reason"] == "RuntimeError: CUDA out of memory. Tried to allocate 5.22 GiB."
    assert times["small"]["status"] == OperatorStatus.PASSED
    assert [item["implementation"] for item in found if item["event"] == "check"] == ["small"]


def test_values_that_are_not_numbers_fail_the_check(caplog: pytest.LogCaptureFixture) -> None:
    found = put_through(caplog, make_implementation(lambda inputs: ready(lambda: selected(inputs) * float("nan"))))
    assert found[-1]["event"] == "check"
    assert (found[-1]["status"], found[-1]["reason"]) == ("failed", "returned values that are not finite")


def test_a_missing_peer_is_blocked_and_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", None)
    (apple,) = [item for item in list_peers() if item.name == "cut-cross-entropy"]
    with pytest.raises(NotMeasuredError, match="needs the module cut_cross_entropy, which is"):
        apple.build(make_inputs(make_case("linear_logp"), CPU, 1))


def test_a_suite_may_choose_its_implementations_and_unknown_names_are_refused() -> None:
    chosen = list_implementations(make_suite(implementations=["vime", "rl-kernel-online"]))
    assert [item.name for item in chosen] == ["vime", "rl-kernel-online"]
    with pytest.raises(SpecError) as caught:
        list_implementations(make_suite(implementations=["vime", "rlkernel"]))
    assert str(caught.value) == (
        "workload.implementations: no such implementation, got 'rlkernel', expected any of vime, vime-entropy, "
        "rl-kernel-fp32, rl-kernel-online, rl-kernel-indexed, rl-kernel-online-indexed, rl-kernel-batch-invariant, "
        "rl-kernel-native, torch-compile-logsumexp, torch-compile, liger"
    )


def test_an_invalid_suite_is_an_argument_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--seed", "1", "--num-rollout", "1", "--device", "cpu", "--suite", "{}"])
    assert caught.value.code == 2
    assert "argument --suite: not a workload" in capsys.readouterr().err


def run_process(tmp_path: Path, sources: list[Path | str]) -> Path:
    """The real process on a small suite, its standard output in a file."""
    grids = [
        {"operator": "logp", "num_tokens": [24], "vocab_size": [40], "densities": [0.5]},
        {"operator": "ratio_kl", "num_tokens": [24], "vocab_size": [40], "passes": ["forward_backward"]},
        {"operator": "grpo_loss", "num_tokens": [24], "vocab_size": [40], "passes": ["forward_backward"]},
        {"operator": "linear_logp", "num_tokens": [24], "vocab_size": [40], "hidden_size": [16],
         "passes": ["forward_backward"]},
    ]  # fmt: skip
    suite = make_suite(grids=grids).model_dump_json()
    path = os.pathsep.join(map(str, (ROOT, *sources, os.environ.get("PYTHONPATH", ""))))
    flags = ["--seed", "5", "--num-rollout", "2", "--device", "cpu", "--suite", suite]
    done = subprocess.run(
        [sys.executable, "-m", "rlk_repro.bench.operators", *flags],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RLK_REPRO_OPS_DIR": f"{tmp_path}/ops"},
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()
    log = tmp_path / "stdout.log"
    log.write_bytes(done.stdout)
    return log


def test_the_process_distinguishes_native_from_fused_operators(tmp_path: Path) -> None:
    log = run_process(tmp_path, [os.environ.get("RLK_SRC") or ROOT / "tests/support/fake_rl_engine"])
    parsed = parse_operators(log)
    assert parsed.num_rejects == {}
    assert parsed.device is not None
    assert json.loads((tmp_path / "libraries" / "0.json").read_text())["torch"] == torch.__version__
    found = {(case.operator, name): sweeps for (case, name), sweeps in parsed.times.items()}
    native = {"rl-kernel", "rl-kernel-native", "rl-kernel-fp32", "rl-kernel-indexed"}
    cells = {key: sweeps for key, sweeps in found.items() if key[1] in native}
    assert {key[0] for key in cells} == set(OPERATORS)
    for key, sweeps in cells.items():
        times = [time for _, time in sweeps.values()]
        assert [(time.kind, time.status) for time in times] == [(OperatorKind.NATIVE, OperatorStatus.PASSED)] * 2, key
        assert times[0].class_name.startswith("Native")
    errors = {key: check.error for key, check in parsed.checks.items() if key[1] in native}
    assert len(errors) == len(cells)
    assert all(error is not None and error < 3e-6 for error in errors.values())
    steps = [line for line in log.read_text().splitlines() if " - perf " in line]
    assert len(steps) == 2


@pytest.mark.skipif(not os.environ.get("VIME_SRC"), reason="VIME_SRC names no checkout of vime")
def test_vime_s_own_functions_are_the_reference(tmp_path: Path) -> None:
    parsed = parse_operators(run_process(tmp_path, [os.environ["VIME_SRC"]]))
    for (case, name), check in parsed.checks.items():
        if name in {"vime", "vime-entropy"}:
            assert check.error is not None
            assert check.error < 3e-6, (case, name)
    names = [name for (_, name), sweeps in parsed.times.items() for _, time in sweeps.values()
             if time.kind is OperatorKind.TRAINER]  # fmt: skip
    assert set(names) == {"vime", "vime-entropy"}
