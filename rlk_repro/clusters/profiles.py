"""Define the profile that ``profile init`` proposes: its keys, the questions to the user, its file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from rlk_repro.base.resources import hardware_folders, list_names
from rlk_repro.spec import Hardware

Ask: TypeAlias = Callable[[str, Sequence[str], str], str]
"""A function that takes a question, its choices and the likeliest choice, and returns the user's answer."""
_NAME: Final = re.compile(r"[^a-z0-9._-]+")


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

    remarks = [f"# - {remark}" for remark in proposal.remarks]
    head = [f"# Written by rlk-repro profile init from {origin}. Check:", *remarks] if remarks else [
        f"# Written by rlk-repro profile init from {origin}."
    ]  # fmt: skip
    return "\n".join(head) + "\n" + yaml.safe_dump(proposal.values, sort_keys=False, allow_unicode=True, width=110)


def make_name(text: str) -> str:
    return _NAME.sub("-", text.lower()).strip("._-")[:40].strip("._-") or "slurm"


def name_hardware(types: Sequence[str], features: Sequence[str], hardware: Mapping[str, Hardware]) -> str | None:
    """Return the one hardware that a node's own words name: its GPU types or, if these name none, its features.

    ``nvidia_h200`` is an H200; ``gh200`` is not, and neither is ``nvidia_h200_nvl``, a variant that the file refuses.
    """
    for words in (types, features):
        named = {
            (name, word.lower())
            for name, model in hardware.items()
            for word in words
            if model.name_part and re.search(rf"(?<![a-z0-9]){model.name_part.lower()}(?![a-z0-9])", word.lower())
        }
        if named:
            is_refused = any(part.lower() in word for name, word in named for part in hardware[name].refused_name_parts)
            names = {name for name, _ in named}
            return None if is_refused or len(names) > 1 else names.pop()
    return None


def load_all_hardware() -> dict[str, Hardware]:
    from rlk_repro.spec.load import load_hardware

    return {name: load_hardware(name).model for name in list_names(hardware_folders())}
