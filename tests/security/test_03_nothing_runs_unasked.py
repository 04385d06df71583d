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
from rlk_repro.base.units import format_number
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir, runs_root
from rlk_repro.spec import VimeWorkload
from rlk_repro.submit.consent import list_what_runs
from rlk_repro.submit.planning import render
from rlk_repro.workloads import WORKLOADS
from rlk_repro.workloads.environment import RUN_ENV
from tests import ROOT
from tests.security.strangers import pack_stranger
from tests.support.slurm.examples import plan_for


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return pack_stranger(tmp_path / "id")


def submitted() -> list[Path]:
    return list(runs_root().glob("*/*/plan.json"))


def test_without_a_terminal_and_a_yes_nothing_runs(call, tmp_path: Path) -> None:
    def describe_here(run_dir: RunDir) -> None:
        """Write the manifest of this machine, so that no drift stops a replay."""
        from rlk_repro.base.files import write_json
        from rlk_repro.probes.node import probe_node

        shutil.rmtree(run_dir.nodes)
        write_json(run_dir.node("node0").manifest, probe_node("node0").to_json())

    code, out, err = call("replay", str(pack_stranger(tmp_path / "id", change=describe_here)))
    assert (code, submitted()) == (2, [])
    assert err == (
        "rlk-repro: replay: would run the bundle's code, which you have not confirmed, expected --yes, or a terminal\n"
        "  hint: --dry-run shows what would run; --yes runs it\n"
    )
    assert (
        "what would run here:\n  run          smoke: reference, lane live, stack host\n  trials       2, 3 steps" in out
    )


def test_the_cost_is_what_the_limits_allow_and_foreign_code_comes_last_one_a_line() -> None:
    plan = plan_for("vime-smoke", "h200")
    layout = plan.layout.model_copy(update={"num_nodes": 512, "gpus_per_node": 8})
    run = plan.run.model_copy(update={"layouts": {"h200": layout}, "time_limit_min": 60.0})
    plan = with_arguments(dataclasses.replace(plan, run=run), {"vllm-worker-cls": "e\u3164.W", "rm-url": "http://e"})
    shown = list_what_runs(plan, plan.profile)
    assert shown["nodes"] == "512 nodes × 8 GPUs of h200 (cuda)"
    hours = plan.all_limits_min / 60
    assert hours >= len(plan.trials)
    assert shown["cost"].startswith(f"at most {format_number(hours * 512 * 8)} GPU-hours")
    assert "the author estimates" in shown["trials"] or "not estimated" in shown["trials"]
    foreign = ["FOREIGN 1 of 2", "FOREIGN 2 of 2"]
    assert list(shown)[-2:] == foreign
    assert {shown[name] for name in foreign} == {
        "--rm-url http://e (needs --trust)",
        "--vllm-worker-cls e\\u3164.W (needs --trust)",
    }


@pytest.mark.parametrize("options", [["--dry-run"], ["--analyze-only"]])
def test_dry_run_and_analyze_only_ask_nothing(call, bundle: Path, options: list[str]) -> None:
    assert call("replay", str(bundle), *options)[0] == 0
    assert submitted() == []


def answer(bundle: Path, word: str) -> subprocess.CompletedProcess[str]:
    """Replay on a terminal, with a typed answer."""
    terminal, inner = os.openpty()
    os.write(terminal, f"{word}\n".encode())
    try:
        argv = [sys.executable, "-m", "rlk_repro", "replay", str(bundle)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
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
    assert len(submitted()) == 1, done.stderr
    assert done.stderr.count("Run this") == 1
    assert "replay level: " in done.stdout


@pytest.mark.parametrize("what", ["nodes", "sections"])
def test_missing_manifests_are_blocking(call, tmp_path: Path, what: str) -> None:
    def remove(run_dir: RunDir) -> None:
        if what == "nodes":
            shutil.rmtree(run_dir.nodes)

    bundle = str(pack_stranger(tmp_path / "id", change=remove))
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
    workload = plan.run.workload
    assert isinstance(workload, VimeWorkload)
    placement = workload.placements["h200"].model_copy(update={"env": env})
    changed = workload.model_copy(update={"placements": {**workload.placements, "h200": placement}})
    return dataclasses.replace(plan, run=plan.run.model_copy(update={"workload": changed}))


def with_arguments(plan: Plan, arguments: dict[str, str]) -> Plan:
    workload = plan.run.workload
    assert isinstance(workload, VimeWorkload)
    changed = workload.model_copy(update={"arguments": arguments})
    return dataclasses.replace(plan, run=plan.run.model_copy(update={"workload": changed}))


CODE = ("PYTHONPATH", "PYTHONWARNINGS", "BROWSER", "LD_PRELOAD", "PYTHONSTARTUP", "HF_HUB_OFFLINE", "RAY_ADDRESS",
        "VLLM_PLUGINS", "NCCL_NET_PLUGIN", "TRITON_CACHE_DIR", "CUDA_VISIBLE_DEVICES", "GIT_SSH_COMMAND")  # fmt: skip


@pytest.mark.parametrize("name", CODE)
def test_a_run_sets_no_other_variable_than_those_listed(name: str) -> None:
    with pytest.raises(SpecError, match=rf"placements\.h200\.env\.{name}: a run may not set this variable"):
        render(with_env({name: "1"}), None)


@pytest.mark.parametrize("value", ["/tmp/evil.so", "1;id", "$(id)", "1\n", "", "a b", "%s", "x" * 1000, "../up"])
def test_a_listed_variable_has_a_value_of_its_type(value: str) -> None:
    with pytest.raises(SpecError) as caught:
        render(with_env(dict.fromkeys(RUN_ENV, value)), None)
    refused = {problem.where.rpartition(".")[2] for problem in caught.value.problems if problem.what == "wrong value"}
    assert refused == set(RUN_ENV)


@pytest.mark.parametrize(
    ("name", "value"),
    [("NCCL_NVLS_ENABLE", "0"), ("NCCL_ALGO", "Ring"), ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
     ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"), ("CUDA_DEVICE_MAX_CONNECTIONS", "1")],
)  # fmt: skip
def test_a_listed_variable_is_set(name: str, value: str) -> None:
    plan = render(with_env({name: value}), None).plan
    assert WORKLOADS["vime"].trainer_command(plan, plan.trials[0], RunDir(ROOT)).env[name] == value


def test_the_page_lists_the_variables() -> None:
    page = (ROOT / "docs" / "replay.md").read_text().partition("## Variables that a run may set")[2].partition("## ")[0]
    assert set(re.findall(r"`([A-Z][A-Z0-9_]+)`", page)) == set(RUN_ENV)
