"""kill -9 of agents and trainers at seeded random moments: what stays is whole, and resuming completes it."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from rlk_repro.agent.resume import find_whole_pairs
from rlk_repro.base import proc
from rlk_repro.base.files import load_json
from rlk_repro.bundle.inspect import inspect_bundle
from rlk_repro.bundle.seal import pack
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from tests import ROOT
from tests.support.job_examples import find_alive, find_descendants, make_staged
from tests.support.make_run import verify_bundle
from tests.support.waiting import wait_until

REPOSITORY = ROOT
NUM_STEPS = 5


class Victim:
    """One run directory whose agents get killed until a run survives to its end."""

    def __init__(self, folder: Path, source: random.Random) -> None:
        self.folder = folder
        self.source = source
        self.plan, self.run_dir = make_staged(folder / "run", ["measure.pairs=2"])
        self.num_kills = 0
        self.code: int | None = None

    def run_once(self, *, is_killing: bool) -> None:
        """One agent; it, or a trainer of its, is killed at some moment while it works."""
        actions = ["begin", f"child:{self.folder}/pids", f"steps:{NUM_STEPS}:0.01", "end"]
        argv = [sys.executable, "-m", "tests.support.job_examples", str(self.run_dir.root), *actions]
        num_events = self.count_events()
        with (self.folder / "output").open("ab") as output:
            agent = proc.start(argv, output_fd=output.fileno(), cwd=REPOSITORY)
        while is_killing and agent.poll() is None and self.count_events() == num_events:
            time.sleep(0.005)
        if is_killing:
            time.sleep(self.source.uniform(0.0, 0.5))
            self.kill(agent.pid if self.source.random() < 0.6 else self.find_trainer())
        self.code = agent.wait(timeout=60)

    def kill(self, pid: int | None) -> None:
        if pid is not None and find_alive([pid]):
            os.kill(pid, signal.SIGKILL)
            self.num_kills += 1

    def count_events(self) -> int:
        return self.run_dir.agent_log.read_text().count("\n") if self.run_dir.agent_log.exists() else 0

    def find_trainer(self) -> int | None:
        begun = [find_pids(folder.stdout, "begin") for folder in self.run_dir.trial_dirs() if folder.stdout.exists()]
        return begun[-1][-1] if begun and begun[-1] else None

    def wait_for_orphans(self) -> None:
        wait_until(lambda: find_descendants(self.run_dir) == [])


def find_pids(log: Path, word: str) -> list[int]:
    lines = [line.split() for line in log.read_text().splitlines()]
    return [int(words[2]) for words in lines if len(words) == 3 and words[1] == word]


def evidence(plan: Plan, run_dir: RunDir) -> dict[str, bytes]:
    """Exit record and log of every trial that counts."""
    whole = find_whole_pairs(plan, run_dir)
    folders = [run_dir.trial(trial.name) for trial in plan.trials if trial.pair in whole]
    return {folder.name: folder.exit.read_bytes() + folder.stdout.read_bytes() for folder in folders}


def check_counted(plan: Plan, run_dir: RunDir) -> None:
    """Whole trials, whole pairs: one process per log, all of its steps or a reason, one allocation."""
    whole = find_whole_pairs(plan, run_dir)
    for name, trials in plan.pairs().items():
        if name not in whole:
            continue
        records = [load_json(run_dir.trial(trial.name).exit) for trial in trials]
        assert records[0]["allocation"] == records[1]["allocation"]
        for trial, record in zip(trials, records, strict=True):
            log = run_dir.trial(trial.name).stdout
            assert len(find_pids(log, "begin")) <= 1
            if record["status"] == "ok":
                assert find_pids(log, "begin") == find_pids(log, "end")
                assert log.read_text().count("'perf/step_time'") == NUM_STEPS
            else:
                assert (record["status"], record["signal"]) == ("failed", "SIGKILL")


def torture(folder: Path, num_kills: int, seed: int) -> None:
    source = random.Random(seed)
    done = 0
    for number in itertools.count():
        if done == num_kills:
            return
        victim = Victim(folder / str(number), source)
        while victim.code not in (0, 1):
            kept = evidence(victim.plan, victim.run_dir)
            victim.run_once(is_killing=done + victim.num_kills < num_kills)
            victim.wait_for_orphans()
            pack(victim.run_dir)
            assert inspect_bundle(victim.run_dir.bundle).is_sealed == victim.run_dir.is_sealed
            check_counted(victim.plan, victim.run_dir)
            assert kept.items() <= evidence(victim.plan, victim.run_dir).items()
        done += victim.num_kills
        assert len(evidence(victim.plan, victim.run_dir)) == len(victim.plan.trials)
        assert verify_bundle(victim.run_dir.bundle) == []


@pytest.mark.real
def test_six_kills_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    torture(tmp_path, num_kills=6, seed=1)


@pytest.mark.long
@pytest.mark.real
def test_fifty_kills_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    torture(tmp_path, num_kills=50, seed=2)
