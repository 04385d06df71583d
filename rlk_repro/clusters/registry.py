"""Register the clusters that a job can be sent to.  A new cluster needs a folder, a line here and a test file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.base.resources import suggest
from rlk_repro.clusters import local
from rlk_repro.clusters.api import Backend, JobStatus, Submission
from rlk_repro.clusters.k8s import backend as k8s
from rlk_repro.clusters.slurm import backend as slurm
from rlk_repro.rundir.paths import RunDir

BACKENDS: Final[dict[str, Backend]] = {"local": local, "slurm": slurm, "k8s": k8s}


def get_backend(cluster: str) -> Backend:
    """Return the module of a cluster.

    Raises:
        SpecError: no such cluster exists.
    """
    if cluster not in BACKENDS:
        raise SpecError(Problem("--cluster", "unknown", got=cluster, expected=f"one of {', '.join(BACKENDS)}",
                                hint=suggest(cluster, list(BACKENDS))))  # fmt: skip
    return BACKENDS[cluster]


def poll_all(items: Sequence[tuple[Submission, RunDir]]) -> list[JobStatus]:
    """Return the state of each submission, with one question per cluster where the cluster can answer for many."""
    found: dict[int, JobStatus] = {}
    for cluster in {submission.cluster for submission, _ in items}:
        numbers = [number for number, (submission, _) in enumerate(items) if submission.cluster == cluster]
        answers = get_backend(cluster).poll_all([items[number] for number in numbers])
        found |= zip(numbers, answers, strict=True)
    return [found[number] for number in range(len(items))]


def list_clients() -> list[str]:
    """List the programs by which this machine would talk to a cluster."""
    return [backend.CLIENT for backend in BACKENDS.values() if backend.CLIENT is not None]
