"""A machine that cannot run a published bundle shows the re-analysis first, then what is missing."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from rlk_repro.workloads.checkouts import FLAGS
from tests import ROOT


def test_json_has_reanalysis_rerun_and_a_command_for_each_missing_thing(
    call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in FLAGS:
        monkeypatch.delenv(source.variable, raising=False)
    bundle = ROOT / "docs" / "evidence" / "qwen3-4b-random-live-h200.tgz"
    code, out, err = call("replay", str(bundle), "--json")
    found = json.loads(out)
    assert (code, json.loads(err)["exit_code"]) == (3, 3)
    assert (found["reanalysis"]["is_ok"], found["reanalysis"]["verdict"]) == (True, "inconclusive")
    assert found["rerun"]["is_done"] is False
    needs = {need["where"]: need["next"] for need in found["rerun"]["needs"]}
    assert (
        "git clone https://github.com/vllm-project/vime && git -C vime checkout 1fc199d9" in needs["python module vime"]
    )
    assert needs["GPU"].endswith(f"rlk-repro replay {bundle} --profile site.yaml")
    assert needs["prepared.model"] == "rlk-repro prepare qwen3-4b-random-live --hardware h200 --stack vime-host"
    shown = json.loads(call("replay", str(bundle), "--dry-run", "--json")[1])
    assert (shown["reanalysis"], shown["rerun"]) == (found["reanalysis"], found["rerun"])
