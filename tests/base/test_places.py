"""Records name folders of this machine by placeholders."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlk_repro.base import places
from rlk_repro.base.places import hide_places


@pytest.fixture(autouse=True)
def some_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setattr(sys, "prefix", "/home/ada/it's a venv")
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setattr(sys, "executable", "/home/ada/it's a venv/bin/python")
    monkeypatch.setattr(places, "_PACKAGES", Path("/home/ada/src"))
    monkeypatch.setenv("VIME_SRC", "/data/vime")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/ada/it's a venv/bin/python", "{python}"),
        ("/home/ada/it's a venv/bin/python3.11", "{prefix}/bin/python3.11"),
        ('File "/home/ada/src/rlk_repro/x.py", line 3', 'File "{packages}/rlk_repro/x.py", line 3'),
        ("--x=/home/ada/data,/home/ada/more", "--x=~/data,~/more"),
        ("/home/ada", "~"),
        ("/home/adam /home/ada.old /home/ada-2", "/home/adam /home/ada.old /home/ada-2"),
        ("/home/ada/runs/a/trials and /home/ada/runs/a2", "{run_dir}/trials and ~/runs/a2"),
        ("/usr/bin/env /opt/x", "/usr/bin/env /opt/x"),
        ("/data/vime/vime/loss.py /data/vimes", "{vime_src}/vime/loss.py /data/vimes"),
    ],
)
def test_folders_are_replaced_by_names(text: str, expected: str) -> None:
    assert hide_places(text, Path("/home/ada/runs/a")) == expected


def test_a_log_keeps_bytes_that_are_not_text() -> None:
    hide = places.make_hider(Path("/home/ada/runs/a"))
    trace = b'  File "/data/vime/vime/loss.py", line 3\xff\n  File "/home/ada/runs/a/x"\n'
    assert hide(trace) == b'  File "{vime_src}/vime/loss.py", line 3\xff\n  File "{run_dir}/x"\n'


def test_a_folder_behind_a_link_is_hidden_by_both_its_paths(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    found = hide_places(f"{tmp_path}/real/x {tmp_path}/link/x", tmp_path / "link")
    assert found == "{run_dir}/x {run_dir}/x"


def test_a_shared_home_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/")
    assert hide_places("/x /") == "/x /"
