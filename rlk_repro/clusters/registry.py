"""The clusters that a job can be sent to.  Adding one = a module, a line here, a test file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.clusters import local
from rlk_repro.clusters.api import Backend, Status, Submission
from rlk_repro.clusters.k8s import backend as kubernetes
from rlk_repro.clusters.slurm import backend as slurm
from rlk_repro.rundir.paths import RunDir

BACKENDS: dict[str, Backend] = {"local": local, "slurm": slurm, "k8s": kubernetes}

REMOTE: frozenset[str] = frozenset({"k8s"})
"""Clusters that share no file system with this machine: a run is here when it has been collected."""

PollAll: TypeAlias = Callable[[Sequence[tuple[Submission, RunDir]]], list[Status]]

# Clusters that are asked about many submissions at once; the others one by one.
_POLL_ALL: dict[str, PollAll] = {"slurm": slurm.poll_all}


def get_backend(cluster: str) -> Backend:
    """The module of a cluster.

    Raises:
        SpecError: no such cluster.
    """
    if cluster not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise SpecError(Problem("--cluster", "unknown", got=cluster, expected=f"one of {known}"))
    return BACKENDS[cluster]


def poll_all(items: Sequence[tuple[Submission, RunDir]]) -> list[Status]:
    """The state of each, with one question per cluster where the cluster can answer for many."""
    found: dict[int, Status] = {}
    for cluster in {submission.cluster for submission, _ in items}:
        numbers = [number for number, (submission, _) in enumerate(items) if submission.cluster == cluster]
        ask = _POLL_ALL.get(cluster, _poll_each)
        found |= zip(numbers, ask([items[number] for number in numbers]), strict=True)
    return [found[number] for number in range(len(items))]


def _poll_each(items: Sequence[tuple[Submission, RunDir]]) -> list[Status]:
    return [get_backend(submission.cluster).poll(submission, run_dir) for submission, run_dir in items]
