"""The keys of each command's ``--json`` output are those of the table in docs/commands.md."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.cli.commands import EXAMPLES
from tests import ROOT

Call = Callable[..., tuple[int, str, str]]
EVIDENCE = ROOT / "docs" / "evidence"
OPERATORS, MODULE, VIME = (
    str(EVIDENCE / f"{name}-h200.tgz") for name in ("operators", "module-qwen3-4b-pairs", "qwen3-4b-random-live")
)
SMALL = ("--set", "measure.pairs=1", "--set", "workload.grpo.rollout_batch_size=2", "--pairs", "1")
ROWS = re.findall(r"^\| `([a-z ]+)` \| .* \| (.*) \|$", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE)
KEYS = {words: [set(re.findall(r"`(\w+)`", part)) for part in cell.split("; ")] for words, cell in ROWS}
# commands that this machine can run, with options; those about a submission follow below
ALONE = (
    "doctor", "images list", "list", "prepare smoke",
    "images build --stack 2026-07 --platform cuda-amd64 --dry-run", "images pin vime-host",
    "prepare vime-train-only --hardware h200 --dry-run", "profile init --cluster local -o mine.yaml",
    "profile check local", "runs list", "submit qwen3-30b-a3b --cluster slurm --stack example --dry-run",
    f"index {OPERATORS} -o site", f"inspect {MODULE}", f"verify {VIME}", f"diff {VIME} {VIME}",
    f"diff {OPERATORS} {VIME}", f"diff --gate {MODULE} {MODULE}", f"report {MODULE} -o r",
    f"replay {OPERATORS} --analyze-only", f"replay {OPERATORS}", f"replay {VIME} --dry-run",
)  # fmt: skip


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def check(call: Call, line: str) -> Any:
    out = call(*line.split(), "--json")[1]
    words = next(words for words in sorted(KEYS, reverse=True) if f"{line} ".startswith(f"{words} "))
    values = [json.loads(text) for text in (out.splitlines() if words == "logs" else [out])]
    for value in values:
        for answer in value if isinstance(value, list) else [value]:
            assert set(answer) in KEYS[words]
    return values[0]


def test_the_table_has_every_command() -> None:
    assert sorted(KEYS) == sorted(EXAMPLES)


@pytest.mark.parametrize("line", ALONE, ids=lambda line: line.replace(f"{EVIDENCE}/", ""))
def test_an_answer_has_the_keys_of_the_table(call: Call, line: str) -> None:
    assert check(call, line) is not None


def test_the_answers_about_a_submission_have_the_keys_of_the_table(call: Call) -> None:
    done = check(call, f"submit smoke {' '.join(SMALL)} --wait")
    for line in ("status", "logs", "cancel", "collect", "runs list --submitted", f"replay {done['bundle']} --yes"):
        check(call, line)
    sent = check(call, f"submit smoke {' '.join(SMALL)}")
    assert call("status", "--watch", sent["id"])[0] == 0
