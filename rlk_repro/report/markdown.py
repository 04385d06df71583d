"""Render sections as Markdown, without plots and without values of single steps.

Each line of the report holds one fact, so that a diff of two reports is readable.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from rlk_repro.report.blocks import (
    Block,
    Bullets,
    Commands,
    Details,
    Facts,
    Figures,
    Section,
    Table,
    TableCell,
    Text,
    summarise,
)
from rlk_repro.report.labels import clean, prose
from rlk_repro.report.sections import make_sections
from rlk_repro.report.view import Context, make_view
from rlk_repro.rundir.results import Analysis

GITHUB: Final = "https://github.com/"
_SPECIAL: Final = re.compile(r"[\\`*\[\]<>|&~]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])")
# GitHub makes links of mentions, numbers of issues and addresses, and formulas of text between dollar signs
_LINKED: Final = re.compile(r"@(?=\w)|#(?=\d)|(?<=\bGH)-(?=\d)|(?<=\bwww)\.|:(?=//)|\$", re.IGNORECASE)
_LEADING: Final = re.compile(r"^([#+-]|\d+[.)])(?=\s|$)")


def render_markdown(analysis: Analysis, context: Context | None = None) -> str:
    return _render(make_sections(make_view(analysis, context)), "#")


def render_summary(analysis: Analysis, context: Context) -> str:
    """Render the sections marked as summary in at most 60 lines, for a comment on a pull request."""
    context = replace(context, bundle=Path(context.bundle).name)
    return _render(summarise(make_sections(make_view(analysis, context))), "###")


def _render(sections: Iterable[Section], mark: str) -> str:
    lines: list[str] = []
    for section in sections:
        title = f"{section.subject}: {section.title}" if section.subject else section.title
        lines += [f"{mark}{'' if section.subject else '#'} {escape_markdown(title)}", ""]
        for block in section.blocks:
            if not isinstance(block, Figures | Details):
                lines += [*_render_block(block), ""]
    return "\n".join(lines).rstrip() + "\n"


def _render_block(block: Block) -> Iterator[str]:
    if isinstance(block, Table):
        yield from _render_table(block)
    elif isinstance(block, Text):
        yield f"**{escape_markdown(block.text)}**" if block.is_strong else escape_markdown(block.text)
    elif isinstance(block, Facts) and block.is_inline:
        yield " · ".join(f"{escape_markdown(name)} {_render_fact(cell)}" for name, cell in block.items)
    elif isinstance(block, Facts):
        yield from (f"- {escape_markdown(name)}: {_render_fact(cell)}" for name, cell in block.items)
    elif isinstance(block, Bullets):
        yield from (f"- {escape_markdown(item)}" for item in block.items)
    elif isinstance(block, Commands):
        yield "```sh"
        for command, purpose in block.lines:
            yield from (f"# {clean(purpose)}", clean(command))
        yield "```"


def _render_fact(cell: TableCell) -> str:
    text = _cell(cell)
    if cell.target.startswith(GITHUB):
        text = f"[{text}]({cell.target})"
    return f"{text} ({escape_markdown(cell.note)})" if cell.note else text


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


def _cell(cell: TableCell) -> str:
    return code_span(cell.text) if cell.is_code and cell.text else escape_markdown(cell.text)


def escape_markdown(text: str) -> str:
    """Return one line that Markdown shows unchanged: markup, HTML, links and table borders in ``text`` are escaped."""
    return _LINKED.sub(r"\g<0><!-- -->", _LEADING.sub(r"\\\1", _SPECIAL.sub(r"\\\g<0>", prose(text))))


def code_span(text: str) -> str:
    """Return a code span that shows ``text`` unchanged, also inside a table."""
    shown = clean(text).replace("|", "\\|")
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {shown} {fence}" if longest else f"{fence}{shown}{fence}"
