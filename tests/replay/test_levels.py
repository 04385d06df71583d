"""Each level of a replay is tested on two bundles made for it: sealed, packed, opened and analysed again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.replay.compare import Match
from rlk_repro.rundir.paths import RunDir
from tests.replay.test_compare import change_loss
from tests.replay.test_identity import change_decisions, change_libraries
from tests.support.make_run import Recipe, finish_run, make_run

QUIET, NOISY = Recipe(speedup=1.1, noise=0.001), Recipe(speedup=1.1, noise=0.02)


def change_version(run_dir: RunDir) -> None:
    change_loss(run_dir)
    change_libraries({})(run_dir)
    change_decisions("version", "2")(run_dir)


def lose_sources(run_dir: RunDir) -> None:
    change_loss(run_dir)
    change_libraries({"rl_engine": {"unknown": "Permission denied"}})(run_dir)


@pytest.mark.parametrize(
    ("first", "second", "change", "level", "words"),
    [
        (QUIET, QUIET, None, Match.BITWISE, "losses and rewards are identical, step by step"),
        (QUIET, QUIET, change_loss, Match.REPRODUCED, "reproduced within 1 % (step time ratio 0.9"),
        (NOISY, NOISY, change_loss, Match.IMPRECISE, "would show whether the difference is within 1 %"),
        (QUIET, Recipe(speedup=1.2, noise=0.001), change_loss, Match.DIFFERENT, "difference -8."),
        (QUIET, QUIET, lose_sources, Match.UNDECIDED, "hashes are missing, so nothing proves that the same code ran"),
        (QUIET, QUIET, change_version, Match.NOT_COMPARABLE, "the two results cannot be compared"),
    ],
    ids=lambda value: value.value if isinstance(value, Match) else None,
)
def test_each_pair_of_bundles_gets_its_level(
    first: Recipe, second: Recipe, change: Any, level: Match, words: str, tmp_path: Path, call: Any
) -> None:
    bundles = [
        str(finish_run(make_run(tmp_path / name / "id", recipe, how)))
        for name, recipe, how in (("a", first, None), ("b", second, change))
    ]
    _, out, _ = call("diff", *bundles, "--json")
    found = json.loads(out)["comparison"]
    assert found["level"] == level.value
    assert words in found["headline"]
    assert found["is_ok"] is (level in {Match.BITWISE, Match.REPRODUCED})
