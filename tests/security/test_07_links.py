"""A link in a stranger's run directory does not redirect any write."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_repro.base.disk import Unwritable, open_stream
from rlk_repro.base.files import write_json
from rlk_repro.rundir.paths import RunDir
from tests.support.make_run import finish_run, make_run

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Make a folder of the victim's, with a file of that name."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "report.html").write_text("mine")
    return folder


def read_all(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = make_run(tmp_path / "stranger")
    finish_run(made)
    return made


def test_a_linked_report_folder_is_not_written_through(call: Call, run_dir: RunDir, mine: Path) -> None:
    run_dir.report.symlink_to(mine)
    for source in (run_dir.root, run_dir.bundle):
        code, _, err = call("report", str(source))
        assert (code, err) == (
            5,
            f"rlk-repro: {run_dir.report}: is a symbolic link; a report is written "
            "through a link only if -o names the link, "
            "expected a folder\n  hint: name the target with -o\n",
        )
    assert read_all(mine) == {"report.html": "mine"}


def test_a_linked_folder_beside_a_bundle_is_not_written_through(
    call: Call, run_dir: RunDir, mine: Path, tmp_path: Path
) -> None:
    bundle = tmp_path / "b.tgz"
    run_dir.bundle.rename(bundle)
    (tmp_path / "b-report").symlink_to(mine)
    assert call("report", str(bundle))[0] == 5
    assert read_all(mine) == {"report.html": "mine"}


def test_a_linked_file_in_a_report_folder_is_replaced(call: Call, run_dir: RunDir, mine: Path) -> None:
    run_dir.report.mkdir()
    (run_dir.report / "report.html").symlink_to(mine / "report.html")
    assert call("report", str(run_dir.root))[0] == 0
    assert read_all(mine) == {"report.html": "mine"}
    assert not (run_dir.report / "report.html").is_symlink()


def test_a_folder_that_the_user_names_may_be_a_link(call: Call, run_dir: RunDir, mine: Path, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(mine)
    assert call("report", str(run_dir.root), "-o", str(tmp_path / "out"))[0] == 0
    assert read_all(mine)["report.html"].startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("command", ["status", "logs", "cancel", "collect", "resume"])
@pytest.mark.parametrize("place", [".work", "job", "scheduler", ".agent.log", "nodes/n/telemetry.jsonl", ".cancelled"])
def test_no_command_writes_into_a_run_directory_with_links(
    call: Call, tmp_path: Path, mine: Path, command: str, place: str
) -> None:
    run_dir = make_run(tmp_path / "stranger")
    details = {"cluster": "local", "job_id": "1:1", "submitted_at": "2026-11-20T13:30:00Z", "details": {}}
    write_json(run_dir.submission, {"schema": 1, **details})
    link = run_dir.root / place
    link.parent.mkdir(parents=True, exist_ok=True)
    is_file = "." in link.name[1:]
    link.symlink_to(mine / "report.html" if is_file else mine)
    before = sorted(os.walk(run_dir.root))
    words = ("submit", "--resume", str(run_dir.root)) if command == "resume" else (command, str(run_dir.root))
    code, _, err = call(*words)
    assert (code, err.startswith(f"rlk-repro: {link}: is a link that may lead to your own files")) == (5, True)
    assert read_all(mine) == {"report.html": "mine"}
    assert sorted(os.walk(run_dir.root)) == before


def test_nothing_is_appended_through_a_link(tmp_path: Path, mine: Path) -> None:
    (tmp_path / "log").symlink_to(mine / "report.html")
    with pytest.raises(Unwritable, match="cannot be written"):
        open_stream(tmp_path / "log", "ab")
    assert read_all(mine) == {"report.html": "mine"}
