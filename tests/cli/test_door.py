"""A newcomer's first commands work as typed."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def without_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("without_clients")
def test_a_submission_away_from_the_cluster_says_where_to_go(call) -> None:
    code, _, err = call("submit", "--cluster", "slurm", "--run", "qwen3-30b-a3b")
    assert code == 2
    assert "--profile: needed for cluster slurm, expected a file, or one of generic-a100" in err
    assert "this machine has no sbatch: submit on the cluster, or make a profile there" in err


def test_a_run_is_named_with_or_without_a_flag(call) -> None:
    code, out, _ = call("submit", "smoke", "--dry-run")
    assert code == 0
    assert call("submit", "--run", "smoke", "--dry-run")[1].splitlines()[0] == out.splitlines()[0]
    code, _, err = call("submit", "smoke", "--run", "learn", "--dry-run")
    assert (code, "--run: names another run than the argument, got 'learn', expected smoke" in err) == (2, True)
    code, _, err = call("submit", "--dry-run")
    assert (code, "RUN: missing, expected a file, or one of " in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("qwen3-30b",), "did you mean 'qwen3-30b-a3b'?"),
        (("qwen3-4",), "did you mean 'qwen3-4b'?"),
        (("vime-train",), "did you mean 'vime-train-only'?"),
        (("smoek",), "did you mean 'smoke'?"),
        (("smoke", "--hardware", "b300"), "to add hardware, copy "),
        (("smoke", "--stack", "2026"), "did you mean '2026-07'?"),
    ],
)
def test_an_unknown_name_is_answered_with_a_similar_one(call, arguments: tuple[str, ...], hint: str) -> None:
    code, _, err = call("submit", *arguments, "--dry-run")
    assert code == 2
    assert hint in err


def test_a_run_that_ended_without_its_agent_shows_the_end_of_its_output(tmp_path: Path) -> None:
    from rlk_repro.submit.finishing import MAX_SHOWN_LINES, _read_end

    log = tmp_path / "slurm.log"
    assert _read_end(log) == ()
    secret = "gh" + "p_" + "a" * 36
    log.write_text("".join(f"line {number}\n\n" for number in range(50)) + f"No module named rlk_repro {secret}\n")
    shown = _read_end(log)
    assert len(shown) == MAX_SHOWN_LINES
    assert shown[-1].startswith("No module named rlk_repro <redacted:")
