"""The doctor names what this machine can run; ``profile`` writes, shows and checks what a cluster needs."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.cli import examination
from rlk_repro.cli.examination import Entry, examine
from rlk_repro.probes.gpu_use import GpuUse
from rlk_repro.probes.node import probe_node
from rlk_repro.rundir.manifest import Manifest, Unknown
from rlk_repro.spec.load import load_hardware, load_profile
from tests.agent.preflight.test_checks import devices, situation
from tests.support.probe_examples import tools
from tests.support.run_plans import write_slurm

__all__ = ["tools"]
Call = Callable[..., tuple[int, str, str]]

H200 = load_hardware("h200").model


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "busy_gpus", list)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")


def examined(runs: Path, **changes: Any) -> dict[str, Entry]:
    code = {"python": "3.11.9", "rl_kernel": {"is_compiled": True, "extension_symbols": ["fused_logp"]}}
    facts = situation(**{"code": code, **changes})
    return {entry.name: entry for entry in examine(facts.manifest, H200, runs, ("sbatch", "kubectl"))}


def test_a_good_machine_has_nothing_to_advise(machine: None, tmp_path: Path) -> None:
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
    machine: None, tmp_path: Path, name: str, changes: dict[str, Any], status: str, found: str, advice: str
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


@pytest.fixture
def no_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SOURCES, "PYTHONPATH"):
        monkeypatch.setenv(name, "")


@pytest.mark.skipif(importlib.util.find_spec("vime") is not None, reason="vime is installed")
def test_without_vime_the_flags_are_named_before_anything_is_made(no_sources: None, call: Call, tmp_path: Path) -> None:
    code, out, err = call("submit", "--run", "module-smoke", "--wait")
    assert (code, out) == (3, "")
    assert "rlk-repro: python module vime: missing, expected an installed package or a checkout" in err
    assert "  hint: set VIME_SRC" in err
    assert not (tmp_path / "runs").exists()


def test_checkouts_come_from_variables(
    no_sources: None, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, name in zip(SOURCES, ("a/vime", "b/megatron", "c/rl_engine"), strict=True):
        (tmp_path / name).mkdir(parents=True)
        monkeypatch.setenv(variable, str((tmp_path / name).parent))
    assert call("submit", "--run", "module-smoke", "--dry-run")[0] == 0
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / name) for name in "abc"]


# ``profile``, with clients that give the answers of a test.


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_profile_is_written_to_the_folder_where_its_name_is_looked_up(call: Call, tools: Path, home: Path) -> None:
    write_slurm(tools)
    code, out, err = call("profile", "init", "--cluster", "slurm", "--yes")
    path = home.parent / "config" / "rlk-repro" / "profiles" / "dgx.yaml"
    assert (code, out) == (0, f"wrote {path}\nnext: rlk-repro profile check {path}\n")
    images = home / "rlk-repro-images"
    assert err == (
        f"check: images are imported once into {images}, which must be on a file system that the nodes share\n"
        f"check: without a container the nodes run {sys.executable}, which must exist on the nodes too\n"
    )
    assert load_profile("dgx", [path.parent]).model.hardware == "h200"
    path.unlink()
    told = json.loads(call("profile", "init", "--yes", "--json")[1])
    assert (told["file"], told["profile"]["profile"], len(told["remarks"])) == (str(path), "dgx", 2)


def test_a_profile_is_never_replaced(call: Call, tools: Path, tmp_path: Path) -> None:
    write_slurm(tools)
    path = tmp_path / "mine.yaml"
    path.write_text("precious\n")
    code, _, err = call("profile", "init", "--yes", "-o", str(path))
    assert (code, "already exists" in err, path.read_text()) == (1, True, "precious\n")


def test_questions_are_answered_by_number_or_name(
    call: Call, tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_slurm(tools)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    answers = iter(["7", "2", "host"])
    monkeypatch.setattr("typer.prompt", lambda *_, **__: next(answers))
    path = tmp_path / "asked.yaml"
    assert call("profile", "init", "-o", str(path))[0] == 0
    profile = load_profile(str(path), []).model
    assert profile.slurm is not None
    assert profile.container is not None
    assert (profile.slurm.partition, profile.container.runtime) == ("long", "host")


def test_submit_shows_what_the_cluster_said_in_three_lines_and_offers_to_save_it(
    call: Call, tools: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_slurm(tools)
    words = ("submit", "smoke", "--cluster", "slurm", "--stack", "example", "--dry-run")
    path = home.parent / "config" / "rlk-repro" / "profiles" / "dgx.yaml"
    asked: list[str] = []

    def confirm(question: str, **_: object) -> bool:
        asked.append(question)
        return len(asked) > 1

    monkeypatch.setattr("typer.confirm", confirm)
    code, _, err = call(*words)
    assert (code, asked, len(err.splitlines()), path.exists()) == (0, [], 3, False)
    assert [line.split(": ")[0] for line in err.splitlines()[:2]] == ["no --profile given", "check before a run"]
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert call(*words)[0] == 0
    assert (asked, path.exists()) == ([f"Save this profile as {path}?"], False)
    assert f"wrote {path}; the next time: --profile dgx" in call(*words)[2]
    assert load_profile("dgx", [path.parent]).model.hardware == "h200"
    assert f"you already have a profile of this name: --profile dgx uses {path}" in call(*words)[2]
    assert (len(asked), call(*words, "--profile", "dgx")[2]) == (2, "")


@pytest.mark.parametrize(
    ("is_down", "words", "answer"),
    [
        (False, "--dry-run --hardware cpu", (2, "set the value there; use --profile my-site.yaml")),
        (True, "--hardware h200", (3, "my-site.yaml; --dry-run shows the job without sending it")),
    ],
)
def test_what_the_cluster_does_not_give_names_the_command_that_helps(
    call: Call, tools: Path, home: Path, is_down: bool, words: str, answer: tuple[int, str]
) -> None:
    write_slurm(tools)
    if is_down:
        (tools / "scontrol").unlink()
    words = f"submit smoke --cluster slurm --stack example {words}"
    code, _, err = call(*words.split())
    assert (code, answer[1] in err) == (answer[0], True), err


def test_a_profile_is_shown_with_what_every_check_does(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("profile: x\ncluster: slurm\npreflight: {policy: {shared_memory: fail}}\n")
    shown = json.loads(call("profile", "show", str(path), "--json")[1])
    assert shown["preflight"]["min_free_disk_gib"] == 1.0
    policy = shown["preflight"]["policy"]
    assert (policy["shared_memory"], policy["gpu_links"]) == ("fail", "fail")
    assert "    shared_memory: fail\n" in call("profile", "show", str(path))[1]
    path.write_text("profile: x\ncluster: slurm\npreflight: {policy: {gpu_idel: fail}}\n")
    code, _, err = call("profile", "show", str(path))
    assert (code, f"{path}:3: preflight.policy.gpu_idel: no such check" in err) == (2, True)


def test_a_check_says_what_would_fail_and_why(call: Call, tools: Path, home: Path, tmp_path: Path) -> None:
    write_slurm(tools, refusal="sbatch: error: invalid partition specified: gpus")
    path = tmp_path / "x.yaml"
    path.write_text("profile: x\ncluster: slurm\nhardware: h200\nslurm: {partition: gpus}\n")
    code, out, _ = call("profile", "check", str(path))
    assert (code, out.splitlines()) == (1, [
        "profile x: 1 finding",
        "  blocking: sbatch --test-only: expected accepted, found invalid partition specified: gpus",
    ])  # fmt: skip
    assert json.loads(call("profile", "check", str(path), "--json")[1])["findings"][0]["level"] == "blocking"


def test_a_check_passes_where_slurm_would_take_the_job(call: Call, tools: Path, home: Path, tmp_path: Path) -> None:
    write_slurm(tools)
    path = tmp_path / "x.yaml"
    path.write_text('profile: x\ncluster: slurm\nhardware: h200\nslurm: {partition: batch, gres: "gpu:nvidia_h200"}\n')
    code, out, _ = call("profile", "check", str(path))
    assert (code, "  info: sbatch --test-only: expected accepted, found " in out) == (0, True)
