"""Renders the job that Slurm gets: one script, from a plan and the run directory.  Pure; asks and writes nothing.

Sending it and asking about it is ``rlk_repro.backends.slurm``'s; what runs inside is the node agent's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rlk_repro.plan import Plan
from rlk_repro.rundir import RunDir

SCRIPT: Final = "job.sbatch"
"""Its name in the run directory's ``job/``."""


def render_sbatch(plan: Plan, run_dir: RunDir, *, nodes: Sequence[str] = ()) -> str:
    """The whole script; the same inputs give the same text.

    It contains every option of sbatch but ``--chdir`` (``sbatch_command`` says it), since a path may hold a line feed.
    ``nodes`` asks for exactly these (``replay --same-nodes``).  SIGTERM to the batch shell alone
    (``scancel --batch --signal=TERM``) lets the agents record and pack; Slurm's and srun's own words go to
    ``.slurm-<job id>.log`` in the run directory.  The script's exit code is the leading agent's.

    Raises:
        SpecError: values that sbatch or the container runtime cannot be told, or a stack without an image for this
            hardware where the runtime needs one.
    """
    raise NotImplementedError


def sbatch_command(run_dir: RunDir) -> tuple[str, ...]:
    """``sbatch --parsable --chdir=<run directory> <run directory>/job/job.sbatch``."""
    root = run_dir.root.absolute()
    return ("sbatch", "--parsable", f"--chdir={root}", str(run_dir.job.absolute() / SCRIPT))


def time_limit_min(plan: Plan) -> int:
    """The job's ``--time``: every trial's limit and what surrounds them, at most the partition's."""
    raise NotImplementedError
