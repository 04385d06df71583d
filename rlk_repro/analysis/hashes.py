"""Compare the hashes of two engines' weights."""

from __future__ import annotations

from rlk_repro.base.units import count
from rlk_repro.logs.engines import Weights


def compare_hashes(names: tuple[str, str], sides: tuple[Weights, Weights]) -> tuple[int, str]:
    """Return the number of unequal tensors and a description; a tensor that one engine lacks counts as unequal."""
    own, known = (dict(side.tensors) for side in sides)
    unequal = [name for name in {**own, **known} if own.get(name) != known.get(name)]
    if not unequal:
        notes = [f"; {name}: {side.note}" for name, side in zip(names, sides, strict=True) if side.note]
        return 0, f"{count(len(own), 'tensor')} equal{''.join(notes)}"
    first = unequal[0]
    lacking = names[0] if first not in own else names[1] if first not in known else ""
    fault = f"is missing in {lacking}" if lacking else "is not equal"
    return len(unequal), f"{first} {fault}, the first of {count(len(unequal), 'such tensor')}"
