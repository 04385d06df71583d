"""Escape untrusted text for a terminal, so that the text cannot move the cursor, hide words or begin a line."""

from __future__ import annotations

import json
import re
from typing import Final

COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


def printable(text: str) -> str:
    """Return the text as one line; each line break becomes ``\\n``."""
    return text if text.isprintable() else "".join(map(_show, text))


def printable_lines(text: str) -> str:
    """Return several lines that are safe to print; the lines keep their tabs and lose their colours."""
    plain = COLOUR.sub("", text)
    return "".join(piece if piece in {"\n", "\t"} else printable(piece) for piece in re.split(r"([\n\t])", plain))


def escape_json(text: str) -> str:
    """Return JSON with equal values, in which every unprintable character is written as ``\\uXXXX``."""
    return "\n".join(line if line.isprintable() else "".join(map(_show_json, line)) for line in text.split("\n"))


def _show(char: str) -> str:
    return char if char.isprintable() else ascii(char)[1:-1]


def _show_json(char: str) -> str:
    return char if char.isprintable() else json.dumps(char)[1:-1]
