"""A replay shows what would run and runs it after a yes; a run may only set typed variables from a list."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlk_repro.base.errors import SpecError
from rlk_repro.base.files import write_json
from rlk_repro.base.units import format_number
from rlk_repro.plan import Plan
from rlk_repro.probes.node import probe_node
from rlk_repro.rundir.paths import RunDir, runs_root
from rlk_repro.submit.consent import list_what_runs
from rlk_repro.submit.planning import render
from rlk_repro.workloads import WORKLOADS
from rlk_repro.workloads.environment import RUN_ENV
from tests import ROOT
from tests.security.hostile import pack_stranger, with_workload
from tests.support.slurm.examples import plan_for

CODE = ("PYTHONPATH", "PYTHONWARNINGS", "BROWSER", "LD_PRELOAD", "PYTHONSTARTUP", "HF_HUB_OFFLINE", "RAY_ADDRESS",
        "VLLM_PLUGINS", "NCCL_NET_PLUGIN", "TRITON_CACHE_DIR", "CUDA_VISIBLE_DEVICES", "GIT_SSH_COMMAND")  # fmt: skip
VALUES = {"NCCL_NVLS_ENABLE": "0", "NCCL_ALGO": "Ring", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
          "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # fmt: skip


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return pack_stranger(tmp_path / "id")


def submitted() -> list[Path]:
    return list(runs_root().glob("*/*/plan.json"))


def describe_here(run_dir: RunDir) -> None:
    """Write the manifest of this machine, so that no drift stops a replay."""
    shutil.rmtree(run_dir.nodes)
    write_json(run_dir.node("node0").manifest, probe_node("node0").to_json())


def test_without_a_terminal_and_a_yes_nothing_runs(call, tmp_path: Path) -> None:
    code, out, err = call("replay", str(pack_stranger(tmp_path / "id", change=describe_here)))
    assert (code, submitted()) == (2, [])
    assert err == (
        "rlk-repro: replay: would run the bundle's code, which you have not confirmed, expected --yes, or a terminal\n"
        "  hint: --dry-run shows what would run; --yes runs it\n"
    )
    shown = "what would run here:\n  run          smoke: reference, lane live, stack host\n  trials       2, 3 steps"
    assert shown in out


def test_the_cost_is_what_the_limits_allow_and_foreign_code_comes_last_one_a_line() -> None:
    plan = plan_for("vime-smoke", "h200")
    layout = plan.layout.model_copy(update={"num_nodes": 512, "gpus_per_node": 8})
    run = plan.run.model_copy(update={"layouts": {"h200": layout}, "time_limit_min": 60.0})
    arguments = {"vllm-worker-cls": "e\u3164.W", "rm-url": "http://e"}
    plan = with_workload(dataclasses.replace(plan, run=run), arguments=arguments)
    shown = list_what_runs(plan, plan.profile)
    assert shown["nodes"] == "512 nodes × 8 GPUs of h200 (cuda)"
    hours = plan.all_limits_min / 60
    assert hours >= len(plan.trials)
    assert shown["cost"].startswith(f"at most {format_number(hours * 512 * 8)} GPU-hours")
    assert "the author estimates" in shown["trials"] or "not estimated" in shown["trials"]
    foreign = {name: shown[name] for name in list(shown)[-2:]}
    assert list(foreign) == ["FOREIGN 1 of 2", "FOREIGN 2 of 2"]
    names = {"--rm-url http://e (needs --trust)", "--vllm-worker-cls e\\u3164.W (needs --trust)"}
    assert set(foreign.values()) == names


@pytest.mark.parametrize("option", ["--dry-run", "--analyze-only"])
def test_dry_run_and_analyze_only_ask_nothing(call, bundle: Path, option: str) -> None:
    assert (call("replay", str(bundle), option)[0], submitted()) == (0, [])


def answer(bundle: Path, word: str) -> subprocess.CompletedProcess[str]:
    """Replay on a terminal, with a typed answer."""
    terminal, inner = os.openpty()
    os.write(terminal, f"{word}\n".encode())
    argv = [sys.executable, "-m", "rlk_repro", "replay", str(bundle)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        return subprocess.run(
            argv, stdin=inner, capture_output=True, text=True, env=env, cwd=bundle.parent, timeout=240, check=False
        )
    finally:
        os.close(terminal)
        os.close(inner)


def test_a_typed_no_runs_nothing(bundle: Path) -> None:
    done = answer(bundle, "n")
    assert (done.returncode, submitted()) == (6, [])
    assert "Run this, in spite of " in done.stderr
    assert "replay: you did not agree to run the experiment" in done.stderr


@pytest.mark.real
def test_one_typed_yes_is_enough(bundle: Path) -> None:
    done = answer(bundle, "y")
    assert (len(submitted()), done.stderr.count("Run this")) == (1, 1), done.stderr
    assert "replay level: " in done.stdout


@pytest.mark.parametrize("what", ["nodes", "sections"])
def test_missing_manifests_are_blocking(call, tmp_path: Path, what: str) -> None:
    change = (lambda run_dir: shutil.rmtree(run_dir.nodes)) if what == "nodes" else None
    bundle = str(pack_stranger(tmp_path / "id", change=change))
    found = json.loads(call("replay", bundle, "--dry-run", "--json")[1])["missing"]
    assert {item["level"] for item in found} == {"blocking"}
    wanted = {"nodes"} if what == "nodes" else {"nodes.node0.code", "nodes.node0.host"}
    assert wanted <= {item["where"] for item in found}
    code, _, err = call("replay", bundle)
    assert (code, submitted()) == (6, [])
    assert "differs from the recorded machine" in err
    assert "--yes runs the replay anyway" in err


def with_env(env: dict[str, str]) -> Plan:
    """Return a plan of vime whose run sets variables, as a bundle or a file may hold it."""
    plan = plan_for("vime-smoke", "h200")
    placements = plan.run.workload.placements  # type: ignore[union-attr]
    placement = placements["h200"].model_copy(update={"env": env})
    return with_workload(plan, placements={**placements, "h200": placement})


def test_a_run_sets_no_other_variable_than_those_listed() -> None:
    with pytest.raises(SpecError) as caught:
        render(with_env(dict.fromkeys(CODE, "1")), None)
    refused = {item.where for item in caught.value.problems if item.what == "a run may not set this variable"}
    assert {where.rpartition(".")[2] for where in refused} == set(CODE)


@pytest.mark.parametrize("value", ["/tmp/evil.so", "1;id", "$(id)", "1\n", "", "a b", "%s", "x" * 1000, "../up"])
def test_a_listed_variable_has_a_value_of_its_type(value: str) -> None:
    with pytest.raises(SpecError) as caught:
        render(with_env(dict.fromkeys(RUN_ENV, value)), None)
    refused = {problem.where.rpartition(".")[2] for problem in caught.value.problems if problem.what == "wrong value"}
    assert refused == set(RUN_ENV)


def test_listed_variables_are_set_and_documented() -> None:
    plan = render(with_env(VALUES), None).plan
    env = WORKLOADS["vime"].trainer_command(plan, plan.trials[0], RunDir(ROOT)).env
    assert {name: env[name] for name in VALUES} == VALUES
    page = (ROOT / "docs" / "replay.md").read_text().partition("## Variables that a run may set")[2].partition("## ")[0]
    assert set(re.findall(r"`([A-Z][A-Z0-9_]+)`", page)) == set(RUN_ENV)
