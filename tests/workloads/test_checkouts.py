"""Checkouts that the flags name are found by the children of the process, and by nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlk_repro.base.errors import EnvironmentMissing, SpecError
from rlk_repro.sources import MEGATRON, RL_KERNEL, VIME, CodeSource
from rlk_repro.workloads.checkouts import FLAGS, require_importable, use_checkouts


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/inherited")
    for source in FLAGS:
        monkeypatch.setenv(source.variable, "")


def test_checkouts_come_first_on_the_path_and_are_named_for_the_manifest(tmp_path: Path) -> None:
    for name in ("a/vime", "b/rl_engine"):
        (tmp_path / name).mkdir(parents=True)
    use_checkouts({VIME: tmp_path / "a", RL_KERNEL: tmp_path / "b"})
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [f"{tmp_path}/a", f"{tmp_path}/b", "/inherited"]
    assert (os.environ["VIME_SRC"], os.environ["RLK_SRC"]) == (f"{tmp_path}/a", f"{tmp_path}/b")
    require_importable(VIME, RL_KERNEL)


def test_no_checkouts_change_nothing() -> None:
    before = dict(os.environ)
    use_checkouts({})
    assert dict(os.environ) == before


def test_a_folder_without_the_package_is_refused_and_nothing_is_changed() -> None:
    before = dict(os.environ)
    with pytest.raises(SpecError) as caught:
        use_checkouts({MEGATRON: Path("/nowhere")})
    assert str(caught.value) == (
        "--megatron-src or MEGATRON_SRC: holds no package megatron, got '/nowhere', expected a folder with megatron/"
    )
    assert dict(os.environ) == before


def test_all_missing_packages_are_named_with_their_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = CodeSource(pin="x", section="x", title="x", module="no_such_module", distributions=(), variable="NO_SRC")
    monkeypatch.setattr("rlk_repro.workloads.checkouts.FLAGS", {absent: "--no-src"})
    with pytest.raises(EnvironmentMissing) as caught:
        require_importable(absent)
    assert str(caught.value) == (
        "python module no_such_module: missing, expected an installed package or a checkout\n"
        "  hint: give --no-src, or set NO_SRC"
    )
