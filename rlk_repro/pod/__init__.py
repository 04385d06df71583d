"""Run the first process of every pod of a job: copy the staged files, start the agent, and deliver the bundle.

The node agent (``rlk_repro.job``) runs the trials, as on local and Slurm clusters.
"""
