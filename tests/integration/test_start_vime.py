"""The process that runs vime's train.py: which one it finds, what that one is told, and what stops it before."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk_repro.base import proc
from rlk_repro.integration.reward import share_of_even_ids
from tests import ROOT

REPOSITORY = ROOT
SCRIPT = """\
import json, os, sys
import helper
if __name__ == "__main__":
    print(json.dumps({"argv": sys.argv, "first": sys.path[0], "helper": helper.VALUE}))
    sys.exit(int(sys.argv[sys.argv.index("--code") + 1]) if "--code" in sys.argv else 0)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What vime's checkout looks like from outside."""
    folder = tmp_path / "a vime"
    (folder / "vime").mkdir(parents=True)
    (folder / "vime" / "__init__.py").touch()
    (folder / "helper.py").write_text("VALUE = 7\n")
    (folder / "train.py").write_text(SCRIPT)
    return folder


def start(folder: Path, *argv: str) -> proc.Completed:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)])}
    return proc.run([sys.executable, "-m", "rlk_repro.integration.start_vime", *argv], env=env, cwd=folder.parent)


def test_train_py_runs_as_a_script_of_its_own_folder(checkout: Path) -> None:
    done = start(checkout, "--num-rollout", "3")
    assert done.is_ok, done.stderr
    said = json.loads(done.stdout)
    assert said == {"argv": [str(checkout / "train.py"), "--num-rollout", "3"], "first": str(checkout), "helper": 7}
    assert start(checkout, "--code", "9").returncode == 9


def test_a_missing_rollout_stops_it(checkout: Path) -> None:
    template = checkout / "{rollout_id}.pt"
    (checkout / "0.pt").write_bytes(b"x")
    done = start(checkout, "--num-rollout", "2", "--load-forge-rollout-data", str(template))
    assert (done.returncode, done.stdout) == (1, "")
    assert "--load-forge-rollout-data: 1 of 2 stored rollouts are missing or empty" in done.stderr


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        ([[[3, 1]], [[0, 2]]], ""),
        ([[[3, 1]], [[0, 0]]], "0.pt: samples.1.rollout_routed_experts: names an expert twice for one token"),
        (None, "0.pt: samples.1.rollout_routed_experts: missing"),
    ],
)
def test_experts_that_no_router_chose_are_not_replayed(checkout: Path, routes: Any, said: str) -> None:
    stored = (torch.tensor([[[1, 0]]]), None if routes is None else torch.tensor(routes, dtype=torch.int32))
    samples = [{"rollout_routed_experts": value} for value in stored]
    torch.save({"rollout_id": 0, "samples": samples}, checkout / "0.pt")
    load = ["--num-rollout", "1", "--load-debug-rollout-data", str(checkout / "{rollout_id}.pt")]
    assert start(checkout, *load).is_ok
    done = start(checkout, *load, "--use-rollout-routing-replay")
    assert (done.returncode == 0) is not bool(said)
    assert said in done.stderr


@pytest.mark.parametrize(("tokens", "length", "reward"), [([1, 2, 4, 5, 6], 4, 0.75), ([1, 2], 0, 0.0), ([2], 1, 1.0)])
def test_the_reward_of_random_weights(tokens: list[int], length: int, reward: float) -> None:
    class Sample:
        def __init__(self) -> None:
            self.tokens, self.response_length = tokens, length

    assert asyncio.run(share_of_even_ids(None, Sample())) == reward
