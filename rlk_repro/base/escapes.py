"""Escape untrusted text for a terminal, so that the text cannot move the cursor, hide words or begin a line."""

from __future__ import annotations

import json
import re
from typing import Final

COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


_BLANK: Final = re.compile("[\u115f\u1160\u2800\u3164\uffa0]")
"""Letters that look like spaces, by which a text could push its end out of sight."""


def printable(text: str) -> str:
    """Return the text as one line; each line break becomes ``\\n``."""
    return text if _is_plain(text) else "".join(map(_show, text))


def printable_lines(text: str) -> str:
    """Return several lines that are safe to print; the lines keep their tabs and lose their colours."""
    plain = COLOUR.sub("", text)
    return "".join(piece if piece in {"\n", "\t"} else printable(piece) for piece in re.split(r"([\n\t])", plain))


def escape_json(text: str) -> str:
    """Return JSON with equal values, in which every unprintable character is written as ``\\uXXXX``."""
    return "\n".join(line if _is_plain(line) else "".join(map(_show_json, line)) for line in text.split("\n"))


def _is_plain(text: str) -> bool:
    return text.isprintable() and (text.isascii() or _BLANK.search(text) is None)


def _show(char: str) -> str:
    return char if _is_plain(char) else ascii(char)[1:-1]


def _show_json(char: str) -> str:
    return char if _is_plain(char) else json.dumps(char)[1:-1]
