"""An unreadable path gives an error that names it, in every command that takes a path.

Root may read every file, so these files fail for other reasons: /proc/self/mem opens and gives nothing, a name of 300
letters cannot be looked up, and a file is not a folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_repro.base.errors import BundleUnreadable, SpecError
from rlk_repro.base.files import write_text
from rlk_repro.base.resources import find_yaml
from rlk_repro.rundir.paths import runs_root
from rlk_repro.rundir.store import list_run_dirs
from tests.support.verifying import verify_bundle

Call = Callable[..., tuple[int, str, str]]
LONG = "x" * 300


@pytest.fixture
def unreadable(tmp_path: Path) -> Path:
    path = tmp_path / "unreadable.yaml"
    path.symlink_to("/proc/self/mem")
    return path


def test_an_unreadable_run_is_named(call: Call, unreadable: Path) -> None:
    code, _, err = call("submit", "--run", str(unreadable), "--dry-run")
    assert code == 2
    assert err.endswith("cannot be read (Input/output error)\n")


def test_a_name_that_cannot_be_looked_up_is_a_plain_error() -> None:
    with pytest.raises(SpecError, match=r"--run: x{300}.yaml: cannot be read \(File name too long\)"):
        find_yaml("run", LONG, [Path()])


def test_an_unreadable_runs_root_is_not_an_empty_one(call: Call) -> None:
    assert list_run_dirs() == []
    write_text(runs_root(), "")
    code, _, err = call("status")
    assert (code, err) == (
        2,
        f"rlk-repro: {runs_root()}: cannot be read (Not a directory), expected a folder of run directories\n",
    )
    code, _, err = call("status", LONG)
    assert (code, "cannot be read (File name too long), expected an id or a path" in err) == (2, True)


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_an_unreadable_bundle_is_named(call: Call, unreadable: Path, command: str) -> None:
    for path, reason in ((str(unreadable), "Invalid argument"), (LONG, "File name too long")):
        assert call(command, path) == (5, "", f"rlk-repro: {path}: cannot be read ({reason})\n")
        assert call("diff", path, path) == (5, "", f"rlk-repro: {path}: cannot be read ({reason})\n")


def test_a_run_directory_that_cannot_be_listed_is_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(BundleUnreadable) as caught:
        verify_bundle(tmp_path)
    assert str(caught.value) == f"{tmp_path}: cannot be read (Permission denied)"
