"""Names of the environment variables that tell a trainer its variant and its output folders."""

from __future__ import annotations

from typing import Final

SWITCH: Final = "VIME_RL_KERNEL"
SWITCH_MODE: Final = "VIME_RL_KERNEL_MODE"
SWITCH_OPS: Final = "VIME_RL_KERNEL_OPS"
SWITCH_BASELINE_OPS: Final = "VIME_RL_KERNEL_BASELINE_OPS"
"""Operators that serve the baseline of a session; empty for the trainer's own function."""
SWITCH_SCHEDULE: Final = "VIME_RL_KERNEL_SCHEDULE"
SWITCH_COMMIT: Final = "VIME_RL_KERNEL_COMMIT"
VARIANT_SWITCHES: Final = frozenset(
    {SWITCH, SWITCH_MODE, SWITCH_OPS, SWITCH_BASELINE_OPS, SWITCH_SCHEDULE, SWITCH_COMMIT}
)
"""The declared switches: the variables that make a trial an enabled one."""
OPS_DIR: Final = "RLK_REPRO_OPS_DIR"
ENGINES_DIR: Final = "RLK_REPRO_ENGINES_DIR"
ENTROPY_METRIC: Final = "RLK_REPRO_ENTROPY_METRIC"
GC_FREEZE: Final = "RLK_REPRO_GC_FREEZE_AFTER"
AGREEMENT_RECORD: Final = "RLK_REPRO_AGREEMENT_RECORD"
"""Whether the trainer compares log-probs token by token: ``1`` (default), ``0``, or ``scheduled``."""
SCHEDULED: Final = "scheduled"
"""With this value, a session's schedule decides rollout by rollout: tokens are compared in enabled rollouts only, and
only baseline rollouts wait."""
DEMO_WAIT: Final = "RLK_REPRO_DEMO_WAIT"
"""Whether the reference trainer waits as long as each rollout's training took: ``0``, ``1`` or ``scheduled``."""
COMMITS: Final = "RLK_COMMITS"
"""The user sets this variable to a folder with one subfolder per RL-Kernel commit; no record holds its value."""
