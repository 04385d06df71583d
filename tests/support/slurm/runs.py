"""Runs of the reference trainer on the real Slurm of the tests."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlk_repro.clusters.api import JobStatus
from rlk_repro.clusters.slurm import backend as slurm
from rlk_repro.rundir.paths import RunDir
from rlk_repro.submit import planning, sending
from tests import ROOT
from tests.support.slurm.cluster import Cluster, find_missing, start_cluster
from tests.support.two_node_agent import write_agent

REQUIRED = "RLK_REPRO_REQUIRE_SLURM"
REPOSITORY = ROOT
SETTINGS = (
    "measure.pairs=1", "measure.warmup_steps=1", "measure.scored_steps=3", "workload.grpo.rollout_batch_size=2",
    "workload.model.hidden_size=32",
)  # fmt: skip
# Twenty seconds a trial: time to break it.
LONG = (*SETTINGS[:2], "measure.scored_steps=400", "workload.grpo.rollout_batch_size=8")
WAIT_S = 240.0
# What Slurm says of a job whose nodes are all drained: the first after it was submitted, the second once the main
# scheduling pass has met it, 0.1 to 3 seconds later. A poll may come too late for the first.
DRAINED = ("ReqNodeNotAvail", "Nodes required for job are DOWN, DRAINED")


def make_profile(folder: Path, *, python: str = "", **settings: Any) -> Path:
    """The profile of the tests' Slurm, by default with a trainer that needs no torch."""
    value: Mapping[str, Any] = {
        "profile": "here",
        "cluster": "slurm",
        "hardware": "cpu",
        "slurm": {"gres": "none", "stop_before_s": 60, **settings},
        "container": {"runtime": "host", "python": python or write_agent(folder), "package_dir": str(REPOSITORY)},
        "preflight": {"min_free_disk_gib": 0.01, "min_free_memory_gib": 0.01},
    }
    path = folder / "profile.yaml"
    path.write_text(yaml.safe_dump(value))
    return path


@dataclass(frozen=True, kw_only=True)
class Site:
    """The cluster, and a folder that its nodes share with this machine."""

    cluster: Cluster
    folder: Path

    def submit(self, settings: tuple[str, ...] = SETTINGS, **options: Any) -> Run:
        profile = make_profile(self.folder, **options)
        request = planning.Request(
            run="smoke", cluster="slurm", profile=str(profile), settings=settings, is_exploratory=True
        )
        return Run(site=self, launched=sending.submit(planning.prepare(request)))


@dataclass(frozen=True, kw_only=True)
class Run:
    site: Site
    launched: sending.Launched

    @property
    def run_dir(self) -> RunDir:
        return self.launched.run_dir

    @property
    def job_id(self) -> str:
        return self.launched.submission.job_id

    def poll(self) -> JobStatus:
        return sending.poll(self.launched)

    def cancel(self) -> bool:
        return slurm.cancel(self.launched.submission, self.run_dir)

    def collect(self) -> Path:
        return slurm.collect(self.launched.submission, self.run_dir)

    def wait_until(self, is_so: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
        until = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < until, f"never: {what}; {self.poll()}\n{self.tail()}"
            time.sleep(0.2)

    def wait_for_drained(self) -> None:
        """Until Slurm names the drained nodes as what the job waits for."""
        self.wait_until(lambda: self.poll().reason.startswith(DRAINED), "drained nodes as the reason for waiting")

    def wait_for_step(self, trial: str = "00-p1-baseline") -> None:
        """Until that trial has finished a step."""

        def has_step() -> bool:
            log = self.run_dir.trial(trial).stdout  # stays, where the state tells of the present trial only
            if log.is_file() and b"'perf/step_time'" in log.read_bytes():
                return True
            assert not self.poll().state.is_final, f"ended before {trial}: {self.poll()}\n{self.tail()}"
            return False

        self.wait_until(has_step, f"a step of {trial}")

    def wait_for_end(self, timeout_s: float = WAIT_S) -> JobStatus:
        self.wait_until(lambda: self.poll().state.is_final, "the end", timeout_s)
        return self.poll()

    def wait_for_script(self) -> None:
        """Until the batch script has ended too: it cleans up after the agents' last word."""

        def has_ended() -> bool:
            return self.site.cluster.job_field(self.job_id, "%T") not in {"PENDING", "RUNNING", "COMPLETING"}

        self.wait_until(has_ended, "the end of the script")

    def tail(self) -> str:
        logs = [*self.run_dir.root.glob(".slurm-*"), self.run_dir.agent_log]
        return "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in logs if log.exists())

    def skip_delay(self) -> None:
        """Slurm lets a requeued job rest for two minutes."""
        self.site.cluster.ask("scontrol", "update", f"jobid={self.job_id}", "starttime=now", check=False)


@contextlib.contextmanager
def on_site(cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Slurm's real clients in front of those that fail loudly; no job and no process is left afterwards."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    monkeypatch.setenv("PATH", f"{cluster.bin}{os.pathsep}{os.environ['PATH']}")
    yield Site(cluster=cluster, folder=folder)
    cluster.clear()
    cluster.wait_until(lambda: cluster.find_leftovers() == [], f"no process is left: {cluster.find_leftovers()}")


def start_or_skip(folder: Path, **options: Any) -> Cluster:
    """Where a Slurm is required, its absence is a failure."""
    missing = find_missing(has_accounting=options.get("has_accounting", False))
    if missing is None:
        return start_cluster(folder, **options)
    assert not os.environ.get(REQUIRED), missing
    pytest.skip(missing)
