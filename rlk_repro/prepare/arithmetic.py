"""Make a data set of addition tasks, as JSON lines with ``prompt`` and ``label``; equal settings give equal bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.files import write_bytes
from rlk_repro.spec import ArithmeticData

RECIPE: Final = 1
"""Increase this version when the same settings no longer give the same bytes."""
BYTES_PER_PROMPT: Final = 100


def recipe(source: ArithmeticData) -> dict[str, Any]:
    return {"recipe": RECIPE, **source.model_dump()}


def write_prompts(source: ArithmeticData, path: Path) -> None:
    write_bytes(path, "".join(f"{line}\n" for line in _list_lines(source)).encode())


def _list_lines(source: ArithmeticData) -> Iterator[str]:
    for number in range(source.num_prompts):
        first, second = (_draw(source, number, which) for which in range(2))
        prompt = f"What is {first} + {second}? Answer with the number alone."
        yield json.dumps({"prompt": prompt, "label": str(first + second)})


def _draw(source: ArithmeticData, number: int, which: int) -> int:
    # 64 random bits for each number make the modulo's bias negligible.
    digest = hashlib.sha256(f"{source.seed}/{number}/{which}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % (source.max_operand + 1)
