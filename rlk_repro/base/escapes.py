"""Texts of strangers made fit for a terminal: nothing in them moves the cursor, hides words or begins a line.

What is not printable (control characters, escape sequences, direction marks, zero-width characters, lone surrogates)
is shown by its escape, such as ``\\x1b`` or ``\\u202e``.
"""

from __future__ import annotations

import json
import re
from typing import Final

_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


def printable(text: str) -> str:
    """One line of text; a line break in it becomes ``\\n``."""
    return text if text.isprintable() else "".join(map(_show, text))


def printable_lines(text: str) -> str:
    """Several lines of text with their tabs; colours are left out."""
    plain = _COLOUR.sub("", text)
    return "".join(piece if piece in {"\n", "\t"} else printable(piece) for piece in re.split(r"([\n\t])", plain))


def escape_json(text: str) -> str:
    """JSON of the same values in which everything that is not printable stands as ``\\uXXXX``."""
    return "\n".join(line if line.isprintable() else "".join(map(_show_json, line)) for line in text.split("\n"))


def _show(char: str) -> str:
    return char if char.isprintable() else ascii(char)[1:-1]


def _show_json(char: str) -> str:
    return char if char.isprintable() else json.dumps(char)[1:-1]
