"""The report as Markdown: everything but the plots and the single steps, one fact per line so that reports diff."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from rlk_repro.report.answer import describe_answer, suggest_next
from rlk_repro.report.basis import describe_headline, make_basis
from rlk_repro.report.blocks import Block, Bullets, Cell, Commands, Section, Table, Text
from rlk_repro.report.evidence import make_evidence
from rlk_repro.report.labels import clean
from rlk_repro.report.surroundings import make_cautions, make_sections
from rlk_repro.report.view import Context, View, make_view
from rlk_repro.rundir.results import Analysis

_SPECIAL: Final = re.compile(r"[\\`*\[\]<>|&~]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])")
_LEADING: Final = re.compile(r"^([#+-]|\d+[.)])(?=\s|$)")


def render_markdown(analysis: Analysis, context: Context | None = None) -> str:
    """The whole report; the same bytes for the same analysis."""
    view = make_view(analysis, context)
    return "\n".join(_render_lines(view)).rstrip() + "\n"


def _render_lines(view: View) -> Iterator[str]:
    verdict = view.analysis.verdict
    yield from (f"# {escape_markdown(view.analysis.run)}: {verdict.word}", "")
    yield from (
        f"**{escape_markdown(describe_answer(view))}**",
        "",
        escape_markdown(describe_headline(view.analysis)),
        "",
    )
    yield from (f"{escape_markdown(caution)}\n" for caution in make_cautions(view))
    yield from (f"- {name}: {escape_markdown(value)}" for name, value in make_basis(view))
    yield from (f"- what now: {escape_markdown(suggest_next(view, view.context.bundle))}", "")
    if verdict.reasons:
        yield from ("Why:", "", *(f"- {escape_markdown(reason)}" for reason in verdict.reasons), "")
    for section in make_sections(view):
        yield from _render_section(section)
    yield from ("## Evidence", "")
    for item in make_evidence(view):
        yield from (f"### {escape_markdown(item.title)}", "", *_render_table(item.trials), "")
        yield from (*_render_table(item.pairs), "")


def _render_section(section: Section) -> Iterator[str]:
    yield from (f"## {escape_markdown(section.title)}", "")
    for block in section.blocks:
        yield from (*_render_block(block), "")


def _render_block(block: Block) -> Iterator[str]:
    if isinstance(block, Table):
        yield from _render_table(block)
    elif isinstance(block, Text):
        yield escape_markdown(block.text)
    elif isinstance(block, Bullets):
        yield from (f"- {escape_markdown(item)}" for item in block.items)
    else:
        yield from _render_commands(block)


def _render_commands(block: Commands) -> Iterator[str]:
    yield "```sh"
    for command, purpose in block.lines:
        yield from (f"# {clean(purpose)}", clean(command))
    yield "```"


def _render_table(table: Table) -> Iterator[str]:
    if table.title:
        yield from (f"**{escape_markdown(table.title)}**", "")
    yield _row(escape_markdown(column.name) for column in table.columns)
    yield _row("---:" if column.is_number else "---" for column in table.columns)
    yield from (_row(_cell(cell) for cell in row) for row in table.rows)
    if table.note:
        yield from ("", escape_markdown(table.note))


def _row(cells: Iterator[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def _cell(cell: Cell) -> str:
    return code_span(cell.text) if cell.is_code and cell.text else escape_markdown(cell.text)


def escape_markdown(text: str) -> str:
    """``text`` on one line so that it reads as itself: no markup, no HTML, no table border."""
    return _LEADING.sub(r"\\\1", _SPECIAL.sub(r"\\\g<0>", clean(text)))


def code_span(text: str) -> str:
    """A code span that holds any text, inside a table as well."""
    shown = clean(text).replace("|", "\\|")
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {shown} {fence}" if longest else f"{fence}{shown}{fence}"
