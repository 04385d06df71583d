"""Define the task, random additions as text, and the rule that rewards an answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

SYMBOLS: Final = "0123456789+="
PAD_ID: Final = 0
END_ID: Final = 1
PLACEHOLDER: Final = "{rollout_id}"
END: Final = "$"
UNKNOWN: Final = "?"

_ID_OF: Final = {symbol: number for number, symbol in enumerate(SYMBOLS, start=2)}
_TEXT_OF: Final = {END_ID: END} | {number: symbol for symbol, number in _ID_OF.items()}


def encode(text: str) -> list[int]:
    return [_ID_OF[symbol] for symbol in text]


def decode(ids: Sequence[int]) -> str:
    """Decode tokens: ``$`` for the end token, ``?`` for padding and for ids without a symbol."""
    return "".join(_TEXT_OF.get(number, UNKNOWN) for number in ids)


def make_questions(
    seed: int,
    rollout_id: int,
    count: int,
    max_operand: int,
) -> list[tuple[str, str]]:
    """Draw ``count`` additions as pairs of prompt and answer; only this answer is correct.

    They depend on seed and rollout only, not on earlier draws.
    """
    generator = random.Random(f"{seed}:{rollout_id}")  # noqa: S311 (a task, not a secret)
    pairs = [(generator.randint(0, max_operand), generator.randint(0, max_operand)) for _ in range(count)]
    return [(f"{a}+{b}=", str(a + b)) for a, b in pairs]


def score(response: str, answer: str) -> float:
    """Count the positions at which ``response`` equals ``answer + END``; divide by the length of the longer text."""
    expected = answer + END
    hits = sum(got == want for got, want in zip(response, expected, strict=False))
    return hits / max(len(response), len(expected))
