"""The commands that people come with, as they type them."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def without_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("without_clients")
@pytest.mark.parametrize(("cluster", "client"), [("slurm", "sbatch"), ("k8s", "kubectl")])
def test_a_dry_run_away_from_the_cluster_shows_a_generic_profile_and_says_so(call, cluster: str, client: str) -> None:
    stack = ("--stack", "example")
    code, out, err = call("submit", "--cluster", cluster, "--run", "qwen3-30b-a3b", *stack, "--dry-run")
    assert code == 0, err
    assert f"no {client} on this machine to ask: shown with profile generic-h200, whose paths are not yours" in err
    assert f"where            {cluster} · profile generic-h200 · NVIDIA H200" in out
    code, out, err = call("submit", "qwen3-30b-a3b", "--cluster", cluster, "--hardware", "a100", *stack, "--dry-run")
    assert code == 0, err
    assert "profile generic-a100" in out


@pytest.mark.usefixtures("without_clients")
def test_a_submission_away_from_the_cluster_says_where_to_go(call) -> None:
    code, _, err = call("submit", "--cluster", "slurm", "--run", "qwen3-30b-a3b")
    assert code == 2
    assert "--profile: needed for cluster slurm, expected a file, or one of generic-a100" in err
    assert "no sbatch on this machine to ask: submit where it is, or write a profile there" in err


def test_a_run_is_named_with_or_without_a_flag(call) -> None:
    code, out, _ = call("submit", "smoke", "--dry-run")
    assert code == 0
    assert call("submit", "--run", "smoke", "--dry-run")[1].splitlines()[0] == out.splitlines()[0]
    code, _, err = call("submit", "smoke", "--run", "learn", "--dry-run")
    assert (code, "--run: names another run than the argument, got 'learn', expected smoke" in err) == (2, True)
    code, _, err = call("submit", "--dry-run")
    assert (code, "RUN: missing, expected a file, or one of " in err) == (2, True)
