"""A newcomer's first commands work as typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlk_repro.rundir.results import VerdictWord


@pytest.fixture
def without_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("without_clients")
@pytest.mark.parametrize(("cluster", "client"), [("slurm", "sbatch"), ("k8s", "kubectl")])
def test_a_dry_run_away_from_the_cluster_shows_a_generic_profile_and_says_so(call, cluster: str, client: str) -> None:
    stack = ("--stack", "example")
    code, out, err = call("submit", "--cluster", cluster, "--run", "qwen3-30b-a3b", *stack, "--dry-run")
    assert code == 0, err
    assert (
        f"this machine has no {client}: the job uses the shipped profile generic-h200, whose paths are examples" in err
    )
    assert f"where            {cluster} · profile generic-h200 · NVIDIA H200" in out
    code, out, err = call("submit", "qwen3-30b-a3b", "--cluster", cluster, "--hardware", "a100", *stack, "--dry-run")
    assert code == 0, err
    assert "profile generic-a100" in out


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


def test_what_was_submitted_is_listed_under_a_header_with_run_and_verdict(call, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RLK_REPRO_RUNS", str(tmp_path / "runs"))
    small = ("workload.grpo.rollout_batch_size=2", "workload.grpo.n_samples_per_prompt=2", "measure.pairs=1")
    settings = [word for item in small for word in ("--set", item)]
    assert call("submit", "smoke", *settings, "--wait")[0] == 0
    header, row = call("runs", "list", "--submitted")[1].splitlines()
    assert header.split()[:5] == ["id", "run", "cluster", "job", "state"]
    assert row.split()[1:3] == ["smoke", "local"]
    assert any(word.value in row for word in VerdictWord)


def test_a_run_that_ended_without_its_agent_shows_the_end_of_its_output(tmp_path: Path) -> None:
    from rlk_repro.submit.finishing import MAX_SHOWN_LINES, _read_end

    log = tmp_path / "slurm.log"
    assert _read_end(log) == ()
    secret = "gh" + "p_" + "a" * 36
    log.write_text("".join(f"line {number}\n\n" for number in range(50)) + f"No module named rlk_repro {secret}\n")
    shown = _read_end(log)
    assert len(shown) == MAX_SHOWN_LINES
    assert shown[-1].startswith("No module named rlk_repro <redacted:")
