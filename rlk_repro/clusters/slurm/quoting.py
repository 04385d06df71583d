"""Quote every value of a template."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

_PLAIN: Final = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


@dataclass(frozen=True)
class Directive:
    """One option of an ``#SBATCH`` line, which has sbatch's own syntax, not the shell's."""

    text: str


@dataclass(frozen=True)
class ShellLine:
    text: str


def quote(value: Any) -> str:
    """Return ``value`` in a script's syntax: strings become shell words; raise TypeError for an unsupported type."""
    match value:
        case Directive(text):
            return quote_directive(text)
        case ShellLine(text):
            return text
        case str():
            return _quote_word(value)
        case int() if not isinstance(value, bool):
            return str(value)
        case Sequence():
            return " ".join(_quote_word(item) for item in value)
        case _:
            raise TypeError(f"no rule to quote {value!r}")


def quote_directive(text: str) -> str:
    """Quote ``--name=value`` for sbatch: in double quotes, sbatch takes the character after a backslash unchanged."""
    if "\n" in text or "\0" in text:
        raise ValueError(f"not one line: {text!r}")
    name, equals, value = text.partition("=")
    return _quote_part(name) + equals + _quote_part(value) if equals else _quote_part(text)


def _quote_part(text: str) -> str:
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _quote_word(value: Any) -> str:
    """Quote as shlex does; also quote words with commas, which shellcheck takes for mistakes in an array."""
    if not isinstance(value, str):
        raise TypeError(f"not a text: {value!r}")
    return f"'{value}'" if "," in value and "'" not in value else shlex.quote(value)
