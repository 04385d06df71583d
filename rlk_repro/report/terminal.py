"""Print sections on a terminal of 80 columns or more: the summary of a report, with the verdict last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table as Grid
from rich.text import Text as Words

from rlk_repro.report.blocks import Bullets, Commands, Facts, Section, Table, TableCell, Text, Tone, summarise
from rlk_repro.report.labels import NBSP, clean, prose
from rlk_repro.report.sections import make_sections, make_verdict
from rlk_repro.report.view import Context, make_view
from rlk_repro.rundir.results import Analysis

GLUE: Final = "\N{OPEN BOX}"
STYLES: Final = {
    Tone.PLAIN: "",
    Tone.GOOD: "green",
    Tone.BAD: "bold red",
    Tone.OPEN: "yellow",
    Tone.FAINT: "dim",
}


@dataclass(frozen=True)
class _Glued:
    """Keeps a number and its unit on one line: rich breaks lines also at no-break spaces, but not at GLUE."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.content, options):
            yield Segment(segment.text.replace(GLUE, " "), segment.style, segment.control)


def print_summary(analysis: Analysis, console: Console, context: Context | None = None) -> None:
    verdict, *rest = summarise(make_sections(make_view(analysis, context)))
    print_sections([*rest, verdict], console)


def print_answer(analysis: Analysis, console: Console, context: Context | None = None) -> None:
    """Print the verdict alone, with the bundle, the report and one next command."""
    print_sections(summarise([make_verdict(make_view(analysis, context))]), console)


def print_sections(sections: Iterable[Section], console: Console) -> None:
    for section in sections:
        title = section.title.upper() if section.subject else section.title
        console.print()
        console.print(_Glued(_text(title, f"bold {STYLES[section.tone]}".strip())))
        if section.subject:
            console.print(_Glued(_text(section.subject, "dim")))
        for block in section.blocks:
            if isinstance(block, Table):
                _print_table(block, console)
            elif isinstance(block, Text):
                console.print(_Glued(_text(block.text, "bold" if block.is_strong else "")))
            elif isinstance(block, Facts):
                _print_facts(block, console)
            elif isinstance(block, Bullets):
                _print_grid([("-", item, Tone.PLAIN) for item in block.items], 1, console)
            elif isinstance(block, Commands):
                for command, purpose in block.lines:
                    console.print(_text(f"# {purpose}", "dim"))
                    console.print(Words(clean(command)), soft_wrap=True)


def _print_facts(block: Facts, console: Console) -> None:
    """Print one fact a line; a command or a path is never broken, so that it can be copied."""
    if block.is_inline:
        line = " · ".join(f"{name} {_join(cell)}" for name, cell in block.items)
        console.print(_Glued(_text(line, "dim")))
        return
    width = max((len(name) for name, _ in block.items), default=0)
    for name, cell in block.items:
        if cell.is_code:
            console.print(Words.assemble((f"{clean(name):<{width}}  ", "dim"), _join(cell)), soft_wrap=True)
        else:
            _print_grid([(name, _join(cell), cell.tone)], width, console)


def _print_grid(rows: Iterable[tuple[str, str, Tone]], width: int, console: Console) -> None:
    grid = Grid.grid(padding=(0, min(width, 2), 0, 0))
    grid.add_column(width=width, style="dim")
    grid.add_column()
    for name, value, tone in rows:
        grid.add_row(_text(name), _text(value, STYLES[tone]))
    console.print(_Glued(grid))


def _join(cell: TableCell) -> str:
    return f"{clean(cell.text)} ({cell.note})" if cell.note else clean(cell.text)


def _print_table(table: Table, console: Console) -> None:
    if table.title:
        console.print(_text(table.title, "bold"))
    shown = Grid(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for column in table.columns:
        shown.add_column(_text(column.name), justify="right" if column.is_number else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*(_text(cell.text, STYLES[cell.tone]) for cell in row))
    console.print(_Glued(shown))
    if table.note:
        console.print(_Glued(_text(table.note, "dim")))


def _text(text: str, style: str = "") -> Words:
    """Return plain text: markup, control characters and escape sequences of the run have no effect."""
    return Words(prose(text).replace(NBSP, GLUE), style=style, overflow="fold")
