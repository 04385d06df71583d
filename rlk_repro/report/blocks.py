"""Define the parts of a report, which three renderers show: sections of text, facts, lists, tables, plots, commands."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, TypeAlias

MOST_ITEMS: Final = 6
"""How many items of a list a summary shows."""


class Tone(StrEnum):
    PLAIN = "plain"
    GOOD = "good"
    BAD = "bad"
    OPEN = "open"
    FAINT = "faint"


@dataclass(frozen=True, kw_only=True)
class TableCell:
    """A text; the page links ``text`` to ``target``, shows ``note`` in small type and sets the id ``anchor``.

    ``svg`` is a drawing, which the page shows below the text.
    """

    text: str
    note: str = ""
    target: str = ""
    anchor: str = ""
    svg: str = ""
    is_code: bool = False
    tone: Tone = Tone.PLAIN


Row: TypeAlias = Sequence[str | TableCell]


@dataclass(frozen=True, kw_only=True)
class Column:
    name: str
    target: str = ""
    anchor: str = ""
    is_number: bool = False
    is_prose: bool = False

    @property
    def kind(self) -> str:
        return "number" if self.is_number else "prose" if self.is_prose else ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table whose first column names the rows; ``title`` is empty where the section's heading is enough.

    The page shows the rows of a table with ``is_folded`` only after a click; a summary leaves it out.
    """

    title: str = ""
    columns: tuple[Column, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    note: str = ""
    is_folded: bool = False


@dataclass(frozen=True, kw_only=True)
class Text:
    text: str
    target: str = ""
    is_strong: bool = False


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Names with their values; with ``is_inline``, they stand one behind the other."""

    items: tuple[tuple[str, TableCell], ...]
    is_inline: bool = False


@dataclass(frozen=True, kw_only=True)
class Bullets:
    items: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Commands:
    """A list of shell commands; each entry is a command and its purpose."""

    lines: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A plot with its caption; where ``svg`` is empty, nothing was drawn and the caption says why."""

    key: str
    title: str
    svg: str = ""
    caption: str


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Plots, which only the page shows."""

    figures: tuple[Figure, ...]


@dataclass(frozen=True, kw_only=True)
class Details:
    """Blocks that only the page shows, and only after a click."""

    title: str
    anchor: str
    blocks: tuple[Table, ...]


Block: TypeAlias = Table | Text | Facts | Bullets | Commands | Figures | Details


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a report; ``summary`` says whether a pull request and a terminal show it.

    The first section is the verdict: its ``tone`` colours its title, and ``subject`` names the run.
    """

    key: str
    title: str
    blocks: tuple[Block, ...]
    summary: bool = False
    subject: str = ""
    tone: Tone = Tone.PLAIN


def summarise(sections: Iterable[Section]) -> Iterator[Section]:
    """Yield the sections marked as summary, without plots, folded tables and the rest of long lists."""
    for section in sections:
        if section.summary:
            shown = (_shorten(block) for block in section.blocks)
            yield replace(section, blocks=tuple(block for block in shown if block is not None))


def _shorten(block: Block) -> Block | None:
    if isinstance(block, Figures | Details) or (isinstance(block, Table) and block.is_folded):
        return None
    if isinstance(block, Bullets) and len(block.items) > MOST_ITEMS:
        rest = f"and {len(block.items) - MOST_ITEMS} more, in the report"
        return Bullets(items=(*block.items[:MOST_ITEMS], rest))
    return block


def make_table(
    *names: str, rows: Iterable[Row], numbers: Collection[str] = (), prose: Collection[str] = (), **others: Any
) -> Table:
    """Make a table without the columns that are empty in all rows; a plain text becomes a cell."""
    cells = [tuple(map(_make_cell, row)) for row in rows]
    kept = [place for place in range(len(names)) if any(row[place].text for row in cells)] or [0]
    shown = [names[place] for place in kept]
    return Table(
        columns=tuple(Column(name=name, is_number=name in numbers, is_prose=name in prose) for name in shown),
        rows=tuple(tuple(row[place] for place in kept) for row in cells),
        **others,
    )


def _make_cell(value: str | TableCell) -> TableCell:
    return value if isinstance(value, TableCell) else TableCell(text=value)


def make_facts(*facts: tuple[str, str | TableCell], is_inline: bool = False) -> Facts:
    """Return the facts that have a value."""
    cells = ((name, _make_cell(value)) for name, value in facts)
    return Facts(items=tuple((name, cell) for name, cell in cells if cell.text), is_inline=is_inline)
