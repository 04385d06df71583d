"""The code bases that a run measures, and their names in stacks, Python, manifests and shells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class CodeSource:
    """One code base: its name in pins, in the manifest's section ``code``, and in reports (``title``).

    ``variable`` holds the path of a checkout; variables that begin with one of ``prefixes`` can change how it runs.
    """

    pin: str
    section: str
    title: str
    module: str
    distributions: tuple[str, ...]
    variable: str = ""
    prefixes: tuple[str, ...] = ()


VIME: Final = CodeSource(
    pin="vime",
    section="vime",
    title="vime",
    module="vime",
    distributions=("vime",),
    variable="VIME_SRC",
    prefixes=("VIME_",),
)
MEGATRON: Final = CodeSource(
    pin="megatron_lm",
    section="megatron",
    title="Megatron-LM",
    module="megatron",
    distributions=("megatron-core", "megatron-lm"),
    variable="MEGATRON_SRC",
)
RL_KERNEL: Final = CodeSource(
    pin="rl_kernel",
    section="rl_kernel",
    title="RL-Kernel",
    module="rl_engine",
    distributions=("rl-kernel", "rl-engine"),
    variable="RLK_SRC",
    prefixes=("RL_KERNEL_", "KERNEL_ALIGN_", "FUSED_LOGP_"),
)
OURSELVES: Final = CodeSource(
    pin="rlk_repro", section="rlk_repro", title="rlk-repro", module="rlk_repro", distributions=("rlk-repro",)
)

PINNED: Final = (VIME, MEGATRON, RL_KERNEL)
SECTIONS: Final[Mapping[str, str]] = {source.pin: source.section for source in PINNED}
CITED: Final = (VIME, RL_KERNEL, OURSELVES)
"""The code bases whose commits a report names beside its result."""
