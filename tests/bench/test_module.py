"""The module tier: its process alone, and the whole road with the real vime, Megatron-LM and RL-Kernel on a CPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk_repro.base import proc
from rlk_repro.base.errors import EnvironmentMissing, SpecError
from rlk_repro.base.files import load_json
from rlk_repro.bench.measure import make_device
from rlk_repro.bench.module import find_rank, format_warning, load_vime_loss, make_perf_metrics
from rlk_repro.bundle.verify import open_verified
from rlk_repro.rundir.paths import RunDir
from tests import ROOT

SOURCES = ("VIME_SRC", "MEGATRON_SRC", "RLK_SRC")
needs_sources = pytest.mark.skipif(
    not all(os.environ.get(name) for name in SOURCES), reason=f"{', '.join(SOURCES)} do not all name checkouts"
)


def test_a_step_is_the_sum_of_its_phases() -> None:
    found = make_perf_metrics({"ref_log_probs": 0.5, "actor_train": 2.0}, 1000)
    assert found == {
        "perf/ref_log_probs_time": 0.5,
        "perf/actor_train_time": 2.0,
        "perf/train_time": 2.5,
        "perf/actor_train_tok_per_s": 500.0,
        "perf/step_time": 2.5,
    }


def test_a_warning_names_no_folder_of_the_machine() -> None:
    text = format_warning("no apex", UserWarning, "/secret/place/optimizer.py", 7)
    assert text == "optimizer.py:7: UserWarning: no apex\n"


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SpecError, match="differs from the number of processes, got 2, expected 4"):
        find_rank(2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(EnvironmentMissing, match="torch sees too few GPUs, got 0, expected 1"):
        make_device("cuda")
    for name in ("vime", "megatron"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EnvironmentMissing) as caught:
        load_vime_loss()
    hints = [problem.hint for problem in caught.value.problems]
    assert hints == ["set VIME_SRC", "set MEGATRON_SRC"]


def bench_module(folder: Path, *arguments: str) -> RunDir:
    """``submit --run module-smoke`` on checkouts, in a folder of its own; the run directory of a run that went well."""
    inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *inherited])}
    environment["RLK_REPRO_RUNS"] = str(folder)
    argv = [sys.executable, "-m", "rlk_repro", "submit", "--run", "module-smoke", "--wait"]
    argv += ["--json", "--exploratory", "--set", "measure.scored_steps=2", *arguments]
    argv += ["--set", "workload.batch.num_microbatches=1"]
    done = proc.run(argv, cwd=folder, env=environment, timeout_s=280)
    assert done.is_ok, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["is_ok"], result
    return RunDir(Path(result["bundle"]).parent)


@pytest.fixture(scope="module", params=[1, 2], ids=["whole vocabulary", "split vocabulary"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, RunDir]:
    num_ranks: int = request.param
    setting = f"layouts.cpu.tensor_parallel={num_ranks}"
    return num_ranks, bench_module(tmp_path_factory.mktemp("bench"), "--set", setting)


def find_values(trial: dict[str, Any], metric: str) -> list[float]:
    return next(item["values"] for item in trial["series"] if item["metric"] == metric)


@needs_sources
def test_rl_kernel_runs_inside_vimes_functions_and_the_numbers_agree(bench: tuple[int, RunDir]) -> None:
    baseline, enabled = load_json(bench[1].analysis)["trials"]
    assert (baseline["proof"], enabled["proof"]) == ("not requested", "native")
    for metric in ("loss", "kl_loss", "entropy", "pg_clipfrac", "grad_norm", "train_rollout_logprob_abs_diff"):
        expected = find_values(baseline, metric)
        assert len(expected) == 3
        assert all(value > 0 for value in expected if metric != "loss")
        assert find_values(enabled, metric) == pytest.approx(expected, rel=1e-3, abs=1e-6), metric
    for name in ("step_time_s", "log_probs_time_s", "ref_log_probs_time_s", "actor_train_time_s", "peak_memory_bytes"):
        assert all(value > 0 for trial in (baseline, enabled) for value in find_values(trial, name))


@needs_sources
def test_one_rank_prints_and_every_rank_records(bench: tuple[int, RunDir]) -> None:
    num_ranks, run_dir = bench
    for folder in run_dir.trial_dirs():
        assert folder.stdout.read_text().count(" - step 0: ") == 1
        assert sorted(path.name for path in folder.ops.iterdir()) == [f"{rank}.jsonl" for rank in range(num_ranks)]


@needs_sources
def test_no_checkout_of_the_machine_is_in_the_bundle(bench: tuple[int, RunDir]) -> None:
    places = [os.environ[name].rstrip("/") + "/" for name in SOURCES] + [sys.prefix, f"{ROOT}/"]
    with open_verified(bench[1].bundle) as (run_dir, _):
        for path in filter(Path.is_file, run_dir.root.rglob("*")):
            text = path.read_text(errors="replace")
            assert [place for place in places if place in text] == [], path


@needs_sources
def test_without_the_entropy_metric_neither_variant_computes_it(tmp_path: Path) -> None:
    run_dir = bench_module(tmp_path, "--set", "entropy_metric=false")
    for trial in load_json(run_dir.analysis)["trials"]:
        assert set(find_values(trial, "entropy")) <= {0.0, None}
        assert all(value != 0 for value in find_values(trial, "loss"))
