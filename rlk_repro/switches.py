"""The variables by which a trainer learns which variant it is and where to write; both sides take their names here."""

from __future__ import annotations

from typing import Final

SWITCH: Final = "VIME_RL_KERNEL"
SWITCH_MODE: Final = "VIME_RL_KERNEL_MODE"
SWITCH_OPS: Final = "VIME_RL_KERNEL_OPS"
SWITCH_SCHEDULE: Final = "VIME_RL_KERNEL_SCHEDULE"
SWITCH_COMMIT: Final = "VIME_RL_KERNEL_COMMIT"
OPS_DIR: Final = "RLK_REPRO_OPS_DIR"
ENGINES_DIR: Final = "RLK_REPRO_ENGINES_DIR"
LIBRARIES_DIR: Final = "RLK_REPRO_LIBRARIES_DIR"
ENTROPY_METRIC: Final = "RLK_REPRO_ENTROPY_METRIC"
GC_FREEZE: Final = "RLK_REPRO_GC_FREEZE_AFTER"
PROFILED_STEPS: Final = "RLK_REPRO_PROFILED_STEPS"
"""Variable with the first rollout that a profiler outside the trainer records and the first one after those: 2:5."""
COMMITS: Final = "RLK_COMMITS"
"""Variable with the folder that has a folder for each RL-Kernel commit; users set it, and no record holds its value."""
