"""Define the parts of a report, which Markdown and HTML render: sections of text, lists, tables and commands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias


class Tone(StrEnum):
    PLAIN = "plain"
    GOOD = "good"
    BAD = "bad"
    OPEN = "open"
    FAINT = "faint"


@dataclass(frozen=True, kw_only=True)
class TableCell:
    """A cell of a table: HTML links ``text`` to ``target``, shows ``note`` in small type and sets the id ``anchor``."""

    text: str
    note: str = ""
    target: str = ""
    anchor: str = ""
    is_code: bool = False
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True, kw_only=True)
class Column:
    name: str
    target: str = ""
    anchor: str = ""
    is_number: bool = False
    is_prose: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table whose first column names the rows; ``title`` is empty where the section's heading is enough.

    HTML shows the rows of a table with ``is_folded`` only after a click.
    """

    title: str = ""
    columns: tuple[Column, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    note: str = ""
    is_folded: bool = False


@dataclass(frozen=True, kw_only=True)
class Text:
    text: str


@dataclass(frozen=True, kw_only=True)
class Bullets:
    items: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Commands:
    """A list of shell commands; each entry is a command and its purpose."""

    lines: tuple[tuple[str, str], ...]


Block: TypeAlias = Table | Text | Bullets | Commands


@dataclass(frozen=True, kw_only=True)
class Section:
    key: str
    title: str
    blocks: tuple[Block, ...]


def make_columns(*names: str, numbers: tuple[str, ...] = (), prose: tuple[str, ...] = ()) -> tuple[Column, ...]:
    return tuple(Column(name=name, is_number=name in numbers, is_prose=name in prose) for name in names)


def drop_empty_columns(table: Table) -> Table:
    kept = [place for place in range(len(table.columns)) if any(row[place].text for row in table.rows)] or [0]
    return replace(
        table,
        columns=tuple(table.columns[place] for place in kept),
        rows=tuple(tuple(row[place] for place in kept) for row in table.rows),
    )


def make_row(*values: str | TableCell) -> tuple[TableCell, ...]:
    return tuple(value if isinstance(value, TableCell) else TableCell(text=value) for value in values)
