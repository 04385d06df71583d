"""The job that Slurm gets: one script, rendered from a plan and the run directory.  Pure; asks and writes nothing.

Sending it and asking about it is ``rlk_repro.backends.slurm``'s; what runs inside is the node agent's.
"""

from rlk_repro.sbatch.options import time_limit_min
from rlk_repro.sbatch.script import SCRIPT, render_sbatch, sbatch_command

__all__ = ["SCRIPT", "render_sbatch", "sbatch_command", "time_limit_min"]
