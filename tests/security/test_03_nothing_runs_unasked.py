"""A replay shows what would run and runs it after a yes; a run may only set typed variables from a list."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
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
from tests.security.hostile import CPU, Change, pack_stranger
from tests.support.make_run import finish_run, make_run
from tests.support.slurm.examples import plan_for
from tests.support.vime_examples import with_workload

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
    shown = "what would run here:\n  run          smoke: reference, lane live, stack host\n  trials       2, 2 steps"
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


def test_dry_run_and_analyze_only_ask_nothing(call, bundle: Path) -> None:
    for option in ("--dry-run", "--analyze-only"):
        assert (call("replay", str(bundle), option)[0], submitted()) == (0, [])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("word", ["n", pytest.param("y", marks=pytest.mark.real)])
def test_a_typed_no_runs_nothing_and_one_yes_is_enough(
    call, bundle: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(f"{word}\n"))
    code, out, err = call("replay", str(bundle))
    assert err.count("Run this, in spite of ") == 1
    if word == "n":
        assert (code, submitted()) == (6, [])
        assert "replay: you did not agree to run the experiment" in err
    else:
        assert (len(submitted()), "replay level: " in out) == (1, True), err


MISSING: dict[str, Change] = {"nodes": lambda run_dir: shutil.rmtree(run_dir.nodes), "nodes.node0.code": lambda _: None}


@pytest.mark.parametrize("where", MISSING)
def test_missing_manifests_are_blocking(call, tmp_path: Path, where: str) -> None:
    bundle = str(pack_stranger(tmp_path / "id", change=MISSING[where]))
    found = json.loads(call("replay", bundle, "--dry-run", "--json")[1])["missing"]
    assert ("blocking", where) in {(item["level"], item["where"]) for item in found}
    code, _, err = call("replay", bundle)
    assert (code, submitted(), "differs from the recorded machine" in err) == (6, [], True)
    assert "--yes runs the replay anyway" in err


def with_env(env: dict[str, str]) -> Plan:
    """Return a plan of vime whose run sets variables, as a bundle or a file may hold it."""
    plan = plan_for("vime-smoke", "h200")
    placements = plan.run.workload.placements  # type: ignore[union-attr]
    placement = placements["h200"].model_copy(update={"env": env})
    return with_workload(plan, placements={**placements, "h200": placement})


def find_refused(env: dict[str, str], what: str) -> set[str]:
    with pytest.raises(SpecError) as caught:
        render(with_env(env), None)
    return {item.where.rpartition(".")[2] for item in caught.value.problems if item.what == what}


def test_a_run_sets_no_other_variable_than_those_listed_with_a_value_of_its_type() -> None:
    assert find_refused(dict.fromkeys(CODE, "1"), "a run may not set this variable") == set(CODE)
    for value in ("/tmp/evil.so", "1;id", "$(id)", "1\n", "", "a b", "%s", "x" * 1000, "../up"):
        assert find_refused(dict.fromkeys(RUN_ENV, value), "wrong value") == set(RUN_ENV), value


def test_listed_variables_are_set_and_documented() -> None:
    plan = render(with_env(VALUES), None).plan
    env = WORKLOADS["vime"].trainer_command(plan, plan.trials[0], RunDir(ROOT)).env
    assert {name: env[name] for name in VALUES} == VALUES
    page = (ROOT / "docs" / "replay.md").read_text().partition("## Variables that a run may set")[2].partition("## ")[0]
    assert set(re.findall(r"`([A-Z][A-Z0-9_]+)`", page)) == set(RUN_ENV)


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONPATH", "VIME_SRC"])
def test_a_strangers_switch_sets_no_other_variable(call, tmp_path: Path, name: str) -> None:
    switch = f"switch={{title: t, baseline: {{{name}: /a}}, enabled: {{{name}: /theirs}}}}"
    recipe = dataclasses.replace(CPU, settings=(*CPU.settings, switch))
    bundle = finish_run(make_run(tmp_path / "id", recipe))
    code, _, err = call("replay", str(bundle), "--yes", "--trust")
    assert (code, submitted(), f"switch.baseline.{name}: a run may not set this variable" in err) == (2, [], True)
