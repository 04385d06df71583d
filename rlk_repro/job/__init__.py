"""The node agent: the one process per node that does everything inside a job.  ``python -m rlk_repro.job RUN_DIR``."""
