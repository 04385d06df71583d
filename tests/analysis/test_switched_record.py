"""A session that switches the record of tokens counts only steps whose ops files show the planned record."""

from __future__ import annotations

from typing import Any

import pytest

from rlk_repro.analysis.proof import find_unswitched
from rlk_repro.logs.ops import OpsLog, RankOps
from rlk_repro.logs.ops_lines import Step, Tokens

TOKENS, NO_TOKENS = Tokens(tokens=3), Tokens(reason="the batch has no log-probs of the rollout")


def make_rank(rank: int, variant: Any, agreement: Tokens | None, step: int = 0) -> RankOps:
    found = Step(event="step", step=step, timers={}, memory={}, calls={}, variant=variant, agreement=agreement)
    return RankOps(
        rank=rank, source=f"ops/{rank}.jsonl", install=None, decisions=(), steps={step: (2, found)}, shadows=(),
        kernels=None, first_reject="", num_rejects={},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("planned", "ranks", "reason"),
    [
        ("baseline", [("baseline", None), ("baseline", None)], ""),
        # of the ranks that split a vocabulary, only the first has a record
        ("enabled", [("enabled", TOKENS), ("enabled", None)], ""),
        ("enabled", [("baseline", None)], "step 0 is planned as enabled and recorded as baseline"),
        ("baseline", [], "step 0 is planned as baseline and recorded as neither variant"),
        ("baseline", [("baseline", TOKENS)], "step 0, which is baseline, has a record of tokens"),
        ("enabled", [("enabled", None)], "step 0, which is enabled, has no record of tokens"),
        ("enabled", [("enabled", NO_TOKENS)],
         "step 0, which is enabled, has no record of tokens: the batch has no log-probs of the rollout"),
    ],
)  # fmt: skip
def test_a_step_shows_whether_its_record_was_switched(planned: str, ranks: list[Any], reason: str) -> None:
    log = OpsLog(ranks=tuple(make_rank(number, *rank) for number, rank in enumerate(ranks)))
    assert find_unswitched(log, 0, planned) == reason


def test_a_missing_file_or_step_of_a_rank_proves_nothing() -> None:
    rank, other = make_rank(0, "enabled", TOKENS), make_rank(1, "enabled", TOKENS, step=1)
    assert find_unswitched(OpsLog(ranks=(rank,), missing_ranks=(1,)), 0, "enabled") == "no ops file of rank 1"
    assert find_unswitched(OpsLog(ranks=(rank, other)), 0, "enabled") == "ops/1.jsonl: has no record of step 0"
