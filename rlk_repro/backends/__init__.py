"""The clusters that a job can be sent to.  Adding one = a module, a line here, a test file."""

from __future__ import annotations

from rlk_repro.backends import local, slurm
from rlk_repro.backends.api import Backend
from rlk_repro.errors import Problem, SpecError

BACKENDS: dict[str, Backend] = {"local": local, "slurm": slurm}


def get_backend(cluster: str) -> Backend:
    """The module of a cluster.

    Raises:
        SpecError: no such cluster in this version.
    """
    if cluster not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise SpecError(Problem("--cluster", "not in this version", got=cluster, expected=f"one of {known}"))
    return BACKENDS[cluster]
