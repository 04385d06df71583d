"""What Kubernetes answers, and what ``status`` makes of it: each row of the asset is one state of a job.

The messages are those of real clusters (docs/evidence/clusters).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from rlk_repro.clusters.k8s.kubectl import quote_last_lines
from rlk_repro.clusters.k8s.states import judge, read_messages
from tests import ROOT

STATES = list(yaml.safe_load_all((ROOT / "tests/assets/k8s/states.yaml").read_text()))


@pytest.mark.parametrize("row", STATES, ids=lambda row: row["name"])
def test_a_state_and_its_reason_are_the_cluster_s_own_words(row: dict[str, Any]) -> None:
    judged = judge(row["job"], row.get("pods", []), row.get("warnings", []))
    assert (judged.state, judged.reason) == (row["state"], row.get("reason", ""))
    leader = "" if judged.leader is None else judged.leader["metadata"]["name"]
    assert (leader, list(judged.nodes)) == (row.get("leader", ""), row.get("nodes", []))


def test_an_agent_s_last_report_comes_from_its_pod() -> None:
    (row,) = (row for row in STATES if row["name"] == "recorded: done")
    (message,) = read_messages(row["pods"][0])
    assert json.loads(message)["message"] == "sealed, 2 of 2 trials ok"


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
