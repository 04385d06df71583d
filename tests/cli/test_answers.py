"""Each command's ``--json`` output fits the shipped schema, for every command that this machine can run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rlk_repro.base.resources import data_dir
from rlk_repro.cli.commands import EXAMPLES
from tests import ROOT
from tests.support.images.container_image import make_image
from tools.schemas import ANSWERS

Call = Callable[..., tuple[int, str, str]]
EVIDENCE = ROOT / "docs" / "evidence"
OPERATORS, MODULE, VIME = (
    str(EVIDENCE / f"{name}-h200.tgz") for name in ("operators", "module-qwen3-4b-pairs", "qwen3-4b-random-live")
)
SMALL = ("--set", "measure.pairs=1", "--set", "workload.grpo.rollout_batch_size=2", "--pairs", "1")
ALONE = (
    "claims list", "claims check ratio-kl-forward",
    "images check image.tar", "doctor", "images list", "list", "prepare smoke",
    "images build --stack 2026-07 --platform cuda-amd64 --dry-run", "images pin vime-host",
    "prepare vime-train-only --hardware h200 --dry-run", "profile init --cluster local -o mine.yaml",
    "profile check local", "profile show generic-h200", "runs list", "runs show qwen3-4b", "submit qwen3-30b-a3b "
    "--cluster slurm --stack example --dry-run", f"index {OPERATORS} -o site", f"inspect {MODULE}", f"verify {VIME}",
    f"diff {VIME} {VIME}", f"diff {OPERATORS} {VIME}", f"diff --gate {MODULE} {MODULE}", f"report {MODULE} -o r",
    f"replay {OPERATORS} --analyze-only", f"replay {OPERATORS}", f"replay {VIME} --dry-run",
)  # fmt: skip


def load_schema() -> Any:
    return json.loads((data_dir("manifests") / "schema" / "answers.schema.json").read_text())


@pytest.fixture(scope="module")
def schema() -> Any:
    return load_schema()


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "image.tar").write_bytes(make_image().archive())


def check(call: Call, schema: Any, line: str) -> Any:
    out = call(*line.split(), "--json")[1]
    words = next(words for words in sorted(ANSWERS, reverse=True) if f"{line} ".startswith(f"{words} "))
    for text in out.splitlines() if words == "logs" else [out]:
        jsonschema.Draft202012Validator(schema).validate({words: json.loads(text)})
    return json.loads(out) if words != "logs" else None


def test_every_command_has_an_answer() -> None:
    assert sorted(ANSWERS) == sorted(EXAMPLES)


@pytest.mark.parametrize("line", ALONE, ids=lambda line: line.replace(f"{EVIDENCE}/", ""))
def test_an_answer_is_as_its_schema_says(call: Call, schema: Any, line: str) -> None:
    assert check(call, schema, line) is not None


def test_the_answers_about_a_submission_are_as_their_schemas_say(call: Call, schema: Any) -> None:
    done = check(call, schema, f"submit smoke {' '.join(SMALL)} --wait")
    for line in ("status", "logs", "cancel", "collect", "runs list --submitted", f"replay {done['bundle']} --yes"):
        check(call, schema, line)
    sent = check(call, schema, f"submit smoke {' '.join(SMALL)}")
    assert call("status", "--watch", sent["id"])[0] == 0


def test_an_answer_with_another_key_is_refused(schema: Any) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    answer = {"id": "x", "is_submitted": True, "is_stopping": False}
    assert validator.is_valid({"cancel": answer})
    assert not validator.is_valid({"cancel": {**answer, "more": 1}})
    assert not validator.is_valid({"no command": answer})
