"""The first process of every pod of a job: brings the run directory in, the agents together, and the bundle out.

What happens in between is the node agent's (``rlk_repro.job``), the same as everywhere.
"""
