"""The commands that take a bundle print text and JSON and set their exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_repro.bundle.seal import pack, seal
from rlk_repro.rundir.paths import FIND_BUNDLE, RunDir
from tests.support.bundle_examples import make_run_dir

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return make_run_dir(tmp_path)


def test_verify_prints_the_id(call: Call, run_dir: RunDir) -> None:
    bundle_id = seal(run_dir)
    bundle = str(pack(run_dir))
    assert call("verify", bundle) == (0, f"id {bundle_id}\n{bundle}: every file matches the seal\n", "")
    out = call("verify", bundle, "--json")[1]
    assert json.loads(out) == {"is_ok": True, "bundle_id": bundle_id, "claimed_id": None, "findings": []}


def test_an_unsealed_run_has_no_id_to_print(call: Call, run_dir: RunDir) -> None:
    code, out, _ = call("verify", str(run_dir.root))
    assert (code, "id " in out) == (1, False)
    assert json.loads(call("verify", str(run_dir.root), "--json")[1])["bundle_id"] is None


def test_another_id_does_not_verify(call: Call, run_dir: RunDir) -> None:
    bundle_id = seal(run_dir)
    root = str(run_dir.root)
    assert call("verify", root, "--id", bundle_id)[0] == 0
    told = f"id {bundle_id}\n  but --id expects {'0' * 64}\n"
    finding = f"  blocking: id: expected {'0' * 64}, found {bundle_id}\n"
    assert call("verify", root, "--id", "0" * 64) == (1, f"{told}{finding}{root}: verification failed\n", "")
    assert call("verify", root, "--id", "short")[0] == 2


@pytest.mark.parametrize("command", ["verify", "inspect", "diff", "report", "replay"])
def test_a_missing_path_is_a_wrong_argument(call: Call, tmp_path: Path, command: str) -> None:
    path = str(tmp_path / "no.tgz")
    message = f"rlk-repro: {path}: no such file, expected a bundle or a run directory\n  hint: {FIND_BUNDLE}\n"
    assert call(command, *[path] * (1 + (command == "diff"))) == (2, "", message)
