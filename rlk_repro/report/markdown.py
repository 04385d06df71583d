"""Render the report as Markdown, without plots and without values of single steps.

Each line of the report holds one fact, so that a diff of two reports is readable.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from rlk_repro.report.answer import (
    describe_answer,
    describe_ground,
    describe_subject,
    describe_word,
    describe_words,
    list_suspects,
    suggest_next,
)
from rlk_repro.report.basis import SHOWN_HASH, describe_headline, make_basis
from rlk_repro.report.blocks import Block, Bullets, Commands, Section, Table, TableCell, Text
from rlk_repro.report.checks import make_checks
from rlk_repro.report.evidence import make_evidence
from rlk_repro.report.labels import clean
from rlk_repro.report.sections import make_effects
from rlk_repro.report.surroundings import make_cautions, make_sections
from rlk_repro.report.view import Context, View, make_view
from rlk_repro.rundir.results import Analysis, GateStatus, count_gates

MOST_CAUTIONS: Final = 6
MOST_EFFECTS: Final = 12
MOST_LIMITS: Final = 6
_SPECIAL: Final = re.compile(r"[\\`*\[\]<>|&~]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])")
# GitHub makes links of mentions, numbers of issues and addresses, and formulas of text between dollar signs
_LINKED: Final = re.compile(r"@(?=\w)|#(?=\d)|(?<=\bGH)-(?=\d)|(?<=\bwww)\.|:(?=//)|\$", re.IGNORECASE)
_LEADING: Final = re.compile(r"^([#+-]|\d+[.)])(?=\s|$)")


def render_markdown(analysis: Analysis, context: Context | None = None) -> str:
    view = make_view(analysis, context)
    return "\n".join(_render_lines(view)).rstrip() + "\n"


def render_summary(analysis: Analysis, context: Context) -> str:
    """Render the answer and its reasons in at most 60 lines, for a comment on a pull request."""
    return "\n".join(_render_summary(make_view(analysis, context))).rstrip() + "\n"


def render_checks(analysis: Analysis, context: Context) -> str:
    return "\n".join(_render_section(make_checks(make_view(analysis, context), is_brief=True))).rstrip() + "\n"


def _render_summary(view: View) -> Iterator[str]:
    analysis, context = view.analysis, view.context
    yield from (f"### {escape_markdown(analysis.run)}: {describe_words(analysis)}", "")
    yield from (f"**{escape_markdown(describe_answer(view))}**", "")
    yield escape_markdown(f"{describe_subject(view)}: {describe_ground(view)}.")
    yield from ("", *(escape_markdown(caution) for caution in make_cautions(view)[:MOST_CAUTIONS]), "")
    if view.is_comparison:
        yield from (*_cut(make_effects(view), MOST_EFFECTS), "")
        open_gates = [gate for gate in analysis.gates if gate.status in {GateStatus.FAILED, GateStatus.UNDECIDED}]
        yield from (f"- {escape_markdown(f'{gate.name}: {gate.status}: {gate.detail}')}" for gate in open_gates)
        yield from (f"- {escape_markdown(count_gates(analysis.gates))}", "")
    if context.may_not_claim:
        yield "What this result does not show:"
        yield from (f"- {escape_markdown(text)}" for text in context.may_not_claim[:MOST_LIMITS])
        yield ""
    if suspects := list_suspects(view):
        yield from (f"Suspects: {escape_markdown(suspects)}", "")
    command = code_span(f"rlk-repro replay {shlex.quote(Path(context.bundle).name)} --analyze-only")
    yield f"bundle `{context.bundle_id[:SHOWN_HASH]}`; check it with {command}" if context.bundle_id else "not sealed"


def _cut(section: Section, number: int) -> Iterator[str]:
    for block in section.blocks:
        if isinstance(block, Table):
            yield from _render_table(replace(block, rows=tuple(block.rows[:number]), note=""))
            if len(block.rows) > number:
                yield from ("", f"{len(block.rows) - number} more effects are in the report.")


def _render_lines(view: View) -> Iterator[str]:
    yield from (f"# {escape_markdown(view.analysis.run)}: {describe_word(view.analysis)}", "")
    yield from (
        f"**{escape_markdown(describe_answer(view))}**",
        "",
        escape_markdown(describe_headline(view.analysis)),
        "",
    )
    yield from (f"{escape_markdown(caution)}\n" for caution in make_cautions(view))
    yield from (f"- {name}: {escape_markdown(value)}" for name, value in make_basis(view))
    if suspects := list_suspects(view):
        yield f"- suspects: {escape_markdown(suspects)}"
    yield from (f"- what now: {escape_markdown(suggest_next(view, view.context.bundle))}", "")
    if reasons := view.analysis.verdict.reasons:
        yield from ("Why:", "", *(f"- {escape_markdown(reason)}" for reason in reasons), "")
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


def _cell(cell: TableCell) -> str:
    return code_span(cell.text) if cell.is_code and cell.text else escape_markdown(cell.text)


def escape_markdown(text: str) -> str:
    """Return one line that Markdown shows unchanged: markup, HTML, links and table borders in ``text`` are escaped."""
    return _LINKED.sub(r"\g<0><!-- -->", _LEADING.sub(r"\\\1", _SPECIAL.sub(r"\\\g<0>", clean(text))))


def code_span(text: str) -> str:
    """Return a code span that shows ``text`` unchanged, also inside a table."""
    shown = clean(text).replace("|", "\\|")
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {shown} {fence}" if longest else f"{fence}{shown}{fence}"
