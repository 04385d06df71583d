"""``profile init``, ``show`` and ``check`` work as typed, with clients that give the answers of a test."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_repro.spec.load import load_profile
from tests.support.probe_examples import tools
from tests.support.run_plans import write_slurm

__all__ = ["tools"]
Call = Callable[..., tuple[int, str, str]]


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
    assert (code, err) == (
        1, f"rlk-repro: {path}: already exists\n  hint: name another file with -o, or remove it\n"
    )  # fmt: skip
    assert path.read_text() == "precious\n"


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


def test_a_value_that_the_cluster_does_not_give_names_the_command_that_sets_it(
    call: Call, tools: Path, home: Path
) -> None:
    write_slurm(tools)
    code, _, err = call("submit", "smoke", "--cluster", "slurm", "--stack", "example", "--dry-run", "--hardware", "cpu")
    assert (code, "set the value there; use --profile my-site.yaml" in err) == (2, True), err


def test_a_profile_is_shown_with_what_every_check_does(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("profile: x\ncluster: slurm\npreflight: {policy: {governor: fail}}\n")
    shown = json.loads(call("profile", "show", str(path), "--json")[1])
    assert shown["preflight"]["min_free_disk_gib"] == 1.0
    assert shown["ray"] == {"first_port": 6379, "interface": None}
    assert shown["preflight"]["policy"]["governor"] == "fail"
    assert shown["preflight"]["policy"]["gpu_links"] == "fail"
    assert "load" not in shown["preflight"]["policy"]
    assert "    governor: fail\n" in call("profile", "show", str(path))[1]


def test_a_policy_for_an_unknown_check_is_refused(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("profile: x\ncluster: slurm\npreflight: {policy: {governer: fail}}\n")
    code, _, err = call("profile", "show", str(path))
    assert code == 2
    assert f"{path}:3: preflight.policy.governer" in err


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
    assert (code, out.splitlines()[0]) == (0, "profile x: 1 finding")
    assert out.splitlines()[1].startswith("  info: sbatch --test-only: expected accepted, found ")
