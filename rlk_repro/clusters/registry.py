"""Register the clusters that can run a job."""

from __future__ import annotations

from typing import Final

from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.base.resources import suggest
from rlk_repro.clusters import local
from rlk_repro.clusters.api import Backend
from rlk_repro.clusters.k8s import backend as k8s
from rlk_repro.clusters.slurm import backend as slurm

BACKENDS: Final[dict[str, Backend]] = {"local": local, "slurm": slurm, "k8s": k8s}


def get_backend(cluster: str) -> Backend:
    if cluster not in BACKENDS:
        raise SpecError(Problem("--cluster", "unknown", got=cluster, expected=f"one of {', '.join(BACKENDS)}",
                                hint=suggest(cluster, list(BACKENDS))))  # fmt: skip
    return BACKENDS[cluster]


def list_clients() -> list[str]:
    return [backend.CLIENT for backend in BACKENDS.values() if backend.CLIENT is not None]
