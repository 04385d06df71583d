"""The code bases that a run measures, and their names in stacks, Python, manifests and shells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class CodeSource:
    """The names of one code base.

    ``pin`` is the name among a stack's pins, ``section`` the name in a manifest's section ``code``, and ``title`` the
    name in reports.  The environment variable ``variable`` holds the path of a checkout.  An environment
    variable whose name begins with one of ``prefixes`` changes what the code does.
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
"""The code bases that a stack pins."""
SECTIONS: Final[Mapping[str, str]] = {source.pin: source.section for source in PINNED}
"""The manifest's section for each pinned code base, by the name of its pin."""
CITED: Final = (VIME, RL_KERNEL, OURSELVES)
"""The code bases whose commits a report names beside its result."""
