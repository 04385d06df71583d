"""Define the profile that ``profile init`` proposes: its keys, the questions to the user, its file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from rlk_repro.base.resources import hardware_folders, list_names
from rlk_repro.spec import Hardware

Ask: TypeAlias = Callable[[str, Sequence[str], str], str]
"""A function that takes a question, its choices and the likeliest choice, and returns the user's answer."""
NONE: Final = "none of these"
_NAME: Final = re.compile(r"[^a-z0-9._-]+")
# MIG profiles as tools spell them (1g.10gb, 3g_20gb, 2g35), and the words for slices and shares
_SLICE: Final = re.compile(
    r"(?<![a-z0-9])[1-7]g[._-]?\d{1,3}(?:gb?)?(?![a-z0-9])|(?<![a-z])(?:mig|shards?|shared|vgpu|hami)(?![a-z])"
)
_MEMORY: Final = re.compile(r"(?<=[a-z0-9][ :_.-])(\d{2,3}(?=gi?b?(?![a-z0-9]))|(?:40|64|80|94|96|141)(?![a-z0-9]))")
_MODEL: Final = re.compile(
    r"(?<![a-z0-9])(?:a(?:10g?|16|30|40|100|800|[2-6][05]00)|b(?:100|200|300)|h(?:20|100|200|800)|g[bh](?:200|300)"
    r"|l(?:4|40s?)|t4|v100s?|p(?:4|40|100)|k(?:40|80)|mi\d{2,3}[ax]?|[gr]tx[a-z0-9]*|[1-5]0[5-9]0(?:ti)?)(?![a-z0-9])"
)
"""Models of GPUs as sites write them in GRES types, features and labels."""


@dataclass(kw_only=True)
class Proposal:
    """A proposed profile: its keys in the order of the file, and remarks for the reader of the file."""

    values: dict[str, Any]
    remarks: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.values["profile"])


def take_likeliest(question: str, choices: Sequence[str], likeliest: str) -> str:  # noqa: ARG001  (the signature of Ask)
    return likeliest


def render_profile(proposal: Proposal, origin: str) -> str:
    import yaml

    check = " Check:" if proposal.remarks else ""
    head = [f"# Written by rlk-repro profile init from {origin}.{check}", *(f"# - {item}" for item in proposal.remarks)]
    return "\n".join(head) + "\n" + yaml.safe_dump(proposal.values, sort_keys=False, allow_unicode=True, width=110)


def make_name(text: str) -> str:
    return _NAME.sub("-", text.lower()).strip("._-")[:40].strip("._-") or "slurm"


def name_hardware(types: Sequence[str], features: Sequence[str], hardware: Mapping[str, Hardware]) -> str | None:
    """Return the one hardware that a node's own words name: its GPU types or, if these name no GPU, its features."""
    for words in (types, features):
        named = name_gpus(words, hardware)
        if named:
            return named.pop() if len(named) == 1 else None
    return None


def name_gpus(words: Iterable[str], hardware: Mapping[str, Hardware]) -> set[str | None]:
    """Return the hardware that the words name; None in it stands for a GPU that no hardware file describes.

    Such a GPU is another model (``l40s``), a slice (``h200_3g.71gb``), a variant that the file refuses
    (``nvidia_h200_nvl``), or has another memory (``a100_40gb``).
    """
    named: set[str | None] = set()
    for word in map(str.lower, words):
        own = {name for name, model in hardware.items() if model.name_part and _holds(word, model.name_part)}
        named |= {None if _is_other(word, hardware[name]) else name for name in own}
        if not own and (is_slice(word) or _MODEL.search(word)):
            named.add(None)
    return named


def is_slice(word: str) -> bool:
    """Whether GPUs of this type are slices or shares, such as ``gpu:h200_3g.71gb`` or ``a100-mig``."""
    return _SLICE.search(word.lower()) is not None


def _is_other(word: str, model: Hardware) -> bool:
    sizes = [int(size) for size in _MEMORY.findall(word)]
    has_other_size = any(abs(size - model.gpu_memory_gib) > 0.1 * model.gpu_memory_gib for size in sizes)
    return has_other_size or is_slice(word) or any(_holds(word, part) for part in model.refused_name_parts)


def _holds(word: str, part: str) -> bool:
    """Whether ``part`` is a word of its own: ``gh200`` holds no ``h200``, and ``nvlink`` no ``nvl``."""
    return re.search(rf"(?<![a-z0-9]){re.escape(part.lower())}(?![a-z0-9])", word) is not None


def load_all_hardware() -> dict[str, Hardware]:
    from rlk_repro.spec.load import load_hardware

    return {name: load_hardware(name).model for name in list_names(hardware_folders())}
