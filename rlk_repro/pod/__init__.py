"""Run the first process of every pod of a job: bring the run directory in, start the agents, and hand the bundle out.

The node agent (``rlk_repro.job``) does the work in between, as on every other cluster.
"""
