"""Engines of runs that share a machine look for their ports in places of their own."""

from __future__ import annotations

import itertools
import os
import pydoc
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlk_repro.base import proc
from rlk_repro.integration import start_vime
from rlk_repro.integration.ports import END, FIRST, FIRST_OWN, find_engine_port, watch
from tests import ROOT

STORED = "--load-debug-rollout-data"
VIME = "def get_free_port(start_port=10000, consecutive=1):\n    return start_port\n"
# 31 ports in a row of each engine, as vime asks for them, and one of a trainer's
ASK = """
from rlk_repro.integration import ports
ports.watch()
from vime.ray.ray_actor import get_free_port as ask
assert not any(isinstance(finder, ports._Watch) for finder in __import__("sys").meta_path)
print(ask(start_port=15000), ask(start_port=15900, consecutive=31), ask(start_port=20500), ask())
"""


def test_every_port_that_a_run_gives_to_ray_has_engine_ports_of_its_own() -> None:
    assert [find_engine_port(address) for address in ("", "10.0.0.1:6379", "[::1]:6388")] == [FIRST, FIRST, 15_360]
    firsts = sorted(find_engine_port(f"here:{6379 + 9 * number}") for number in range(13))
    assert min(after - before for before, after in itertools.pairwise(firsts)) >= 300
    assert all(FIRST <= find_engine_port(f"here:{port}") <= END - 200 for port in range(1024, 8100))


@pytest.mark.parametrize(("lane", "port", "first"), [([], 6388, "15360"), ([STORED], 6388, None), ([], 6379, None),
                                                     (["--load-forge-rollout-data"], 6388, "15360")])  # fmt: skip
def test_vime_starts_with_the_hook_if_it_starts_engines_on_a_port_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lane: list[str], port: int, first: str | None
) -> None:
    begun: list[Any] = []
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=lambda **given: begun.append(given["runtime_env"])))
    monkeypatch.setenv("RAY_ADDRESS", f"10.0.0.1:{port}")
    monkeypatch.setattr(sys, "argv", ["start", *lane])
    monkeypatch.setattr(start_vime, "find_script", lambda: tmp_path / "train.py")
    monkeypatch.setattr(start_vime, "check_rollouts", lambda _: None)
    (tmp_path / "train.py").touch()
    assert start_vime.main() == 0
    assert [item["env_vars"] for item in begun] == [{FIRST_OWN: first}] * (first is not None)
    assert all(pydoc.locate(item["worker_process_setup_hook"]) is watch for item in begun)


def test_vime_looks_for_the_ports_of_engines_where_the_run_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "vime" / "ray").mkdir(parents=True)
    (tmp_path / "vime" / "ray" / "ray_actor.py").write_text(VIME)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", FIRST_OWN: "15360"}
    done = proc.run([sys.executable, "-c", ASK], timeout_s=60, env=env)
    assert done.returncode == 0, done.stderr
    assert [int(port) for port in done.stdout.split()] == [15_360, 15_900, 20_500, 10_000]
