"""Preflight checks by policy: one tuple per kind of fact, one line per check (docs/preflight.md)."""

from typing import Final

from rlk_repro.job.checks import gpu, host, network
from rlk_repro.job.checks.base import Check, Situation, judge_node, level_of
from rlk_repro.job.checks.network import compare_nodes

CHECKS: Final[tuple[Check, ...]] = (*gpu.CHECKS, *host.CHECKS, *network.CHECKS)

__all__ = ["CHECKS", "Check", "Situation", "compare_nodes", "judge_node", "level_of"]
