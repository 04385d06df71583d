"""The doctor names what this machine can run, and each problem with one next step."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.cli import examination
from rlk_repro.cli.examination import Entry, examine
from rlk_repro.probes.gpu_use import GpuUse
from rlk_repro.probes.node import probe_node
from rlk_repro.rundir.manifest import Manifest, Unknown
from rlk_repro.spec.load import load_hardware
from tests.agent.preflight.test_checks import devices, situation

H200 = load_hardware("h200").model


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "busy_gpus", list)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")


def examined(runs: Path, **changes: Any) -> dict[str, Entry]:
    code = {"python": "3.11.9", "rl_kernel": {"is_compiled": True, "extension_symbols": ["fused_logp"]}}
    facts = situation(**{"code": code, **changes})
    return {entry.name: entry for entry in examine(facts.manifest, H200, runs, ("sbatch", "kubectl"))}


def test_a_good_machine_has_nothing_to_advise(tmp_path: Path) -> None:
    entries = examined(tmp_path)
    assert [entry for entry in entries.values() if entry.status != "ok" or entry.advice] == []
    assert entries["gpus"].found == "8 × NVIDIA H200, driver 580.159.04; runs for --hardware h200"
    assert entries["scheduler"].found == "sbatch, kubectl"


@pytest.mark.parametrize(
    ("name", "changes", "status", "found", "advice"),
    [
        ("gpus", {"gpu": {"vendor": "none", "count": 0, "devices": []}}, "warn", "none", "--hardware cpu"),
        ("gpus", {"gpu": {"count": Unknown("no driver")}}, "fail", "nvidia: no driver", "install the driver"),
        ("gpu_errors", {"gpu": devices(ecc_uncorrected=3)}, "fail", "GPU 3, expected 0", "reset the GPU"),
        ("shared_memory", {"host": {"dev_shm_gib": 0.06}}, "warn", "0.06, expected at least 1", "--ipc=host"),
        ("rl-kernel", {"code": {"rl_kernel": {"is_compiled": False}}}, "warn", "without its", "GPU is visible"),
        ("rl-kernel", {"code": {"rl_kernel": Unknown("absent")}}, "warn", "absent", "install RL-Kernel for"),
    ],
)
def test_each_fault_is_named_with_one_next_step(
    tmp_path: Path, name: str, changes: dict[str, Any], status: str, found: str, advice: str
) -> None:
    entry = examined(tmp_path, **changes)[name]
    assert (entry.status, found in entry.found, advice in entry.advice) == (status, True, True), entry


def test_facts_outside_the_manifest_are_judged_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr(examination, "busy_gpus", lambda: [GpuUse(index=1, memory_used_mib=9000, pids=(77,))])
    (tmp_path / "file").write_text("")
    entries = examined(tmp_path / "file" / "runs")
    bad = {name for name, entry in entries.items() if entry.status != "ok"}
    assert bad == {"torch", "git", "scheduler", "containers", "gpu_idle", "room"}
    assert all(entries[name].advice for name in bad)
    assert "GPU 1: 9000 MiB in use, processes: 77" in entries["gpu_idle"].found


def test_this_machine_and_an_empty_manifest_can_be_examined(tmp_path: Path) -> None:
    entries = examine(probe_node("here"), H200, tmp_path / "not" / "made yet", ())
    assert dataclasses.asdict(entries[0]) == {"name": "python", "status": "ok", "found": entries[0].found, "advice": ""}
    assert "fail" in {entry.status for entry in examine(Manifest(node="n"), H200, tmp_path, ())}


# Runs of the lower tiers start from the command line, and options say where their sources are.


SOURCES = ("VIME_SRC", "MEGATRON_SRC", "RLK_SRC")


@pytest.fixture(autouse=True)
def no_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SOURCES, "PYTHONPATH"):
        monkeypatch.setenv(name, "")


@pytest.mark.skipif(importlib.util.find_spec("vime") is not None, reason="vime is installed")
def test_without_vime_the_flags_are_named_before_anything_is_made(call, tmp_path: Path) -> None:
    code, out, err = call("submit", "--run", "module-smoke", "--wait")
    assert (code, out) == (3, "")
    assert "rlk-repro: python module vime: missing, expected an installed package or a checkout" in err
    assert "  hint: give --vime-src, or set VIME_SRC" in err
    assert not (tmp_path / "runs").exists()


def test_checkouts_come_from_options(call, tmp_path: Path) -> None:
    for name in ("a/vime", "b/megatron", "c/rl_engine"):
        (tmp_path / name).mkdir(parents=True)
    places = [f"--{name}={tmp_path / folder}" for name, folder in
              (("vime-src", "a"), ("megatron-src", "b"), ("rl-kernel-src", "c"))]  # fmt: skip
    assert call("submit", "--run", "module-smoke", *places, "--dry-run")[0] == 0
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / name) for name in "abc"]


def test_options_for_another_cluster_are_refused(call, tmp_path: Path) -> None:
    (tmp_path / "vime").mkdir()
    profile = tmp_path / "site.yaml"
    profile.write_text("profile: site\ncluster: slurm\nhardware: h200\n")
    arguments = ["--profile", str(profile), "--vime-src", str(tmp_path), "--dry-run"]
    code, _, err = call("submit", "--cluster", "slurm", "--run", "module-smoke", *arguments)
    assert code == 2
    assert err == (
        "rlk-repro: --vime-src: works on the local cluster only, got 'slurm', expected --cluster local\n"
        "  hint: set the paths in the profile: env: {PYTHONPATH: /shared/vime:/shared/Megatron-LM}\n"
    )
