"""Runs of the lower tiers start from the command line, and options say where their sources are."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

SOURCES = ("VIME_SRC", "MEGATRON_SRC", "RLK_SRC")


@pytest.fixture(autouse=True)
def no_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SOURCES, "PYTHONPATH"):
        monkeypatch.setenv(name, "")


def test_a_dry_run_needs_no_checkout_and_shows_the_job(call) -> None:
    code, out, err = call("submit", "--run", "module-qwen3-4b", "--hardware", "h200", "--dry-run")
    assert (code, err) == (0, "")
    assert "run              module-qwen3-4b · module · lane train-only" in out
    assert "GPU-hours" in out
    code, out, _ = call("submit", "--run", "operators-smoke", "--dry-run", "--json")
    assert code == 0
    assert json.loads(out)["plan"]["experiment"]["run"]["run"] == "operators-smoke"


def test_pairs_and_settings_reach_the_plan(call) -> None:
    arguments = ["--pairs", "2", "--control-pairs", "3", "--set", "entropy_metric=false", "--dry-run"]
    code, out, _ = call("submit", "--run", "module-smoke", *arguments)
    assert code == 0
    assert "10 trials in 2 pairs and 3 control pairs" in out
    assert "entropy metric   not computed, in both variants" in out


@pytest.mark.skipif(importlib.util.find_spec("vime") is not None, reason="vime is installed")
def test_without_vime_the_flags_are_named_before_anything_is_made(call, tmp_path: Path) -> None:
    code, out, err = call("submit", "--run", "module-smoke", "--wait")
    assert (code, out) == (3, "")
    assert "rlk-repro: python module vime: missing, expected an installed package or a checkout" in err
    assert "  hint: give --vime-src, or set VIME_SRC" in err
    assert not (tmp_path / "runs").exists()


def test_a_folder_without_a_checkout_is_named(call, tmp_path: Path) -> None:
    code, _, err = call("submit", "--run", "module-smoke", "--vime-src", str(tmp_path), "--dry-run")
    assert code == 2
    assert err == (
        f"rlk-repro: --vime-src or VIME_SRC: holds no package vime, got '{tmp_path}', expected a folder with vime/\n"
    )


def test_checkouts_come_from_the_variables_as_well(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rl_engine").mkdir()
    monkeypatch.setenv("RLK_SRC", str(tmp_path))
    assert call("submit", "--run", "operators-smoke", "--dry-run")[0] == 0
    assert os.environ["PYTHONPATH"] == str(tmp_path)


def test_an_exported_switch_is_said_to_have_no_effect(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIME_RL_KERNEL_OPS", "logpp")
    code, _, err = call("submit", "--run", "operators-smoke", "--dry-run")
    assert code == 0
    assert err == ("VIME_RL_KERNEL_OPS=logpp is set in this shell but has no effect; use --set rl_kernel.ops=[…]\n")


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


def test_a_profile_that_hides_the_checkouts_is_refused(call, tmp_path: Path) -> None:
    for name in ("a/vime", "a/megatron"):
        (tmp_path / name).mkdir(parents=True)
    profile = tmp_path / "site.yaml"
    profile.write_text("profile: site\ncluster: local\nhardware: cpu\nenv: {PYTHONPATH: /shared/vime}\n")
    code, _, err = call("submit", "--run", "module-smoke", "--profile", str(profile), "--vime-src", str(tmp_path / "a"))
    assert code == 2
    said = "env.PYTHONPATH: hides --vime-src, expected either env.PYTHONPATH or VIME_SRC, not both"
    assert f"rlk-repro: profile site: {said}" in err
