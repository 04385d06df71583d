"""What Kubernetes answers, and what ``status`` makes of it: each row of the asset is one state of a job.

The messages are those of real clusters (docs/evidence/clusters).
"""

from __future__ import annotations

import io
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlk_repro.base.errors import Problem
from rlk_repro.clusters.api import JobState, Submission
from rlk_repro.clusters.asking import find_next_step
from rlk_repro.clusters.k8s import backend
from rlk_repro.clusters.k8s.kubectl import Target, Unreachable, quote_last_lines
from rlk_repro.clusters.k8s.naming import Sent
from rlk_repro.clusters.k8s.states import judge, read_message
from rlk_repro.clusters.triallogs import TRIAL_MARK
from tests import ROOT
from tests.support.job_examples import make_staged

STATES = list(yaml.safe_load_all((ROOT / "tests/assets/k8s/states.yaml").read_text()))


@pytest.mark.parametrize("row", STATES, ids=lambda row: row["name"])
def test_a_state_and_its_reason_are_the_cluster_s_own_words(row: dict[str, Any]) -> None:
    judged = judge(row["job"], row.get("pods", []), row.get("warnings", []))
    assert (judged.state, judged.reason) == (row["state"], row.get("reason", ""))
    assert find_next_step(judged.reason) or judged.state is not JobState.PENDING or not judged.reason
    assert ("now used up" in find_next_step(judged.reason)) is ("exceeded quota" in judged.reason)
    assert "no new claims" not in judged.reason or "results.claim" not in find_next_step(judged.reason)
    if row["name"] == "recorded: done":  # an agent's last report comes from its pod
        assert json.loads(read_message(row["pods"][0]))["message"] == "sealed, 2 of 2 trials ok"
    leader = "" if judged.leader is None else judged.leader["metadata"]["name"]
    assert (leader, list(judged.nodes)) == (row.get("leader", ""), row.get("nodes", []))


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        (
            "00-p1-baseline: step 1\nrlk-repro: one\ngpu.devices: none\n  hint: another node\n",
            "gpu.devices: none; hint: another node",
        ),
        ("00-p1-baseline: step 1\n00-p1-baseline: step 2\n", ""),
        ("x" * 2048 + "\n00-p1-baseline: step 2\n", ""),
    ],
)
def test_the_last_words_of_a_container_are_no_line_of_a_trial(text: str, quoted: str) -> None:
    assert quote_last_lines(text) == quoted


def test_a_pods_log_is_read_in_lines_of_a_limited_size_that_name_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "x" * 3 * backend.MOST_LINE_BYTES
    log = "".join([f"a{TRIAL_MARK}{long}\n", f"b{TRIAL_MARK}theirs\n", "no mark\n", f"a{TRIAL_MARK}last\n"]).encode()
    monkeypatch.setattr(Target, "stream", lambda *_: nullcontext(io.BytesIO(log)))
    sent, seen = Sent(place=Target(namespace="x"), name="job"), dict[str, int]()
    found = list(backend._read_pod(sent, "pod", seen, {"a"}, is_following=False))
    assert ([line.trial for line in found], found[-1].text, seen) == (["a", "a"], "last", {"pod": 4})
    assert max(len(line.text) for line in found) <= backend.MOST_LINE_BYTES


RUNNING: dict[str, Any] = {"kind": "Job", "status": {}}
AWAY = Unreachable(Problem("kubernetes", "did not answer"))


# what each question is answered with, and whether a reader who follows sees the end
@pytest.mark.parametrize(("answers", "is_read"), [([AWAY], False), ([RUNNING, AWAY, AWAY, None], True)])
def test_a_server_that_restarts_ends_no_reader_who_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[Any], is_read: bool
) -> None:
    submission = Submission(cluster="k8s", job_id="x/job/y", submitted_at="", details={})
    run_dir, left = make_staged(tmp_path / "run")[1], list(answers)

    def find_objects(_: Sent) -> tuple[Any, list[Any]]:
        answer = left.pop(0)
        if answer is AWAY:
            raise AWAY
        return answer, []

    monkeypatch.setattr(Sent, "find_objects", find_objects)
    monkeypatch.setattr(backend, "LOG_POLL_S", 0)
    with nullcontext() if is_read else pytest.raises(Unreachable):
        assert list(backend.logs(submission, run_dir, is_following=True)) == []
    assert left == []
