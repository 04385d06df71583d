"""Runs of the lower tiers start from the command line, and options say where their sources are."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

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
