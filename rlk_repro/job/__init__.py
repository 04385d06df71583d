"""The node agent, one process per node, does everything inside a job: ``python -m rlk_repro.job RUN_DIR``."""
