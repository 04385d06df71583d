"""Render the report as one HTML page without scripts, external files or unescaped text.

The page's content security policy also forbids scripts and network access, in case escaping fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources
from typing import Final

from rlk_repro.base.findings import Level
from rlk_repro.base.units import count
from rlk_repro.report.answer import (
    describe_answer,
    describe_publishing,
    describe_subject,
    describe_word,
    describe_words,
    list_suspects,
    suggest_next,
)
from rlk_repro.report.basis import describe_headline, make_basis, make_identity, make_origin
from rlk_repro.report.blocks import Block, Bullets, Column, Commands, Section, Table, TableCell, Text, Tone
from rlk_repro.report.evidence import MetricEvidence, make_evidence, make_step_table
from rlk_repro.report.figure import Figure
from rlk_repro.report.labels import clean
from rlk_repro.report.plots import make_figures
from rlk_repro.report.sections import choose_tone
from rlk_repro.report.surroundings import make_cautions, make_sections
from rlk_repro.report.view import Context, View, make_view
from rlk_repro.rundir.results import Analysis

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
PLOTS_BEFORE: Final = ("pairs", "cells", "trials")
"""The page shows the plots before the first section that has one of these keys."""
MAX_REASONS: Final = 4


def render_html(analysis: Analysis, context: Context | None = None) -> str:
    view = make_view(analysis, context)
    return "\n".join(_render_lines(view)) + "\n"


def render_page(title: str, about: str, sections: Sequence[Section]) -> str:
    lines = [*_open_page(title), f"<body><header><h1>{_escape(title)}</h1><p>{_escape(about)}</p></header><main>"]
    for section in sections:
        lines += _render_section(section)
    return "\n".join([*lines, "</main></body></html>"]) + "\n"


def _open_page(title: str) -> Iterator[str]:
    yield "<!DOCTYPE html>"
    yield '<html lang="en">'
    yield f'<head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_escape(POLICY)}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f'<meta name="color-scheme" content="light dark"><title>{_escape(title)} – rlk-repro</title>'
    yield f"<style>\n{load_style()}</style></head>"


def _render_lines(view: View) -> Iterator[str]:
    analysis = view.analysis
    sections = make_sections(view)
    yield from _open_page(f"{analysis.run}: {describe_word(analysis)}")
    yield '<body><a class="skip" href="#verdict">Skip to the verdict</a>'
    yield from _render_head(view)
    yield "<main>"
    figures = make_figures(view)
    first, rest = figures[:1], figures[1:]
    yield from _render_verdict(view, first)
    place = next(number for number, section in enumerate(sections) if section.key in PLOTS_BEFORE)
    yield from _render_contents(sections, place)
    yield from _render_basis(view)
    for number, section in enumerate(sections):
        if number == place:
            yield from _render_plots(rest)
        yield from _render_section(section)
    yield from _render_evidence(view)
    yield "</main></body></html>"


def load_style() -> str:
    return resources.files("rlk_repro.report").joinpath("report.css").read_text(encoding="utf-8")


def _render_head(view: View) -> Iterator[str]:
    yield f"<header><h1>{_escape(view.analysis.run)}</h1><p>{_escape(describe_subject(view))}</p>"
    yield '<dl class="identity">'
    for name, value in make_identity(view.analysis):
        yield f"<div><dt>{name}</dt><dd>{_escape(value)}</dd></div>"
    yield "</dl></header>"


def _render_verdict(view: View, figures: Sequence[Figure]) -> Iterator[str]:
    tone = choose_tone(view.analysis)
    yield f'<section id="verdict" class="verdict {tone}" aria-labelledby="verdict-word"><div class="first"><div>'
    yield f'<h2 id="verdict-word">{_escape(describe_words(view.analysis))}</h2>'
    yield f'<p class="answer">{_escape(describe_answer(view))}</p>'
    yield '<dl class="identity">'
    for name, value in make_origin(view.analysis):
        yield f"<div><dt>{_escape(name)}</dt><dd>{_escape(value)}</dd></div>"
    yield f'</dl><p><a href="#findings">{_escape(_count_findings(view))}</a></p>'
    what_now = _escape(suggest_next(view, view.context.bundle))
    suspects = _escape(list_suspects(view))
    more = f"<dt>suspects</dt><dd>{suspects}</dd>" if suspects else ""
    yield f'<dl class="next"><dt>what now</dt><dd><code>{what_now}</code></dd>{more}</dl></div>'
    yield from map(_render_figure, figures)
    yield "</div>"
    if publishing := describe_publishing(view):
        yield f"<p>{_escape(publishing)}</p>"
    yield from (f'<p class="caution">{_escape(caution)}</p>' for caution in make_cautions(view))
    yield "</section>"


def _count_findings(view: View) -> str:
    found = Counter(item.level for item in (*view.analysis.findings, *view.context.findings))
    parts = [f"{found[level]} {level.value}" for level in Level if found[level]]
    return f"Findings: {', '.join(parts)}" if parts else "No findings"


def _render_basis(view: View) -> Iterator[str]:
    yield '<section id="basis" aria-labelledby="basis-title"><h2 id="basis-title">What the verdict rests on</h2>'
    yield f"<p>{_escape(describe_headline(view.analysis))}</p>"
    yield from _render_reasons(view.analysis.verdict.reasons)
    yield '<dl class="basis">'
    for name, value in make_basis(view):
        yield f"<div><dt>{_escape(name)}</dt><dd>{_escape(value)}</dd></div>"
    yield "</dl></section>"


def _render_reasons(reasons: Sequence[str]) -> Iterator[str]:
    if reasons:
        yield _render_list(reasons[:MAX_REASONS])
    if rest := reasons[MAX_REASONS:]:
        yield f"<details><summary>{len(rest)} more</summary>{_render_list(rest)}</details>"


def _render_contents(sections: Iterable[Section], place: int) -> Iterator[str]:
    links = [(section.key, section.title) for section in sections]
    links[place:place] = [("plots", "Plots")]
    links = [("basis", "What the verdict rests on"), *links, ("evidence", "Evidence")]
    yield '<nav aria-label="Contents"><ul>'
    yield from (f'<li><a href="#{key}">{_escape(title)}</a></li>' for key, title in links)
    yield "</ul></nav>"


def _render_section(section: Section) -> Iterator[str]:
    yield f'<section id="{section.key}" aria-labelledby="{section.key}-title">'
    yield f'<h2 id="{section.key}-title">{_escape(section.title)}</h2>'
    for block in section.blocks:
        yield from _render_block(block, section.title)
    yield "</section>"


def _render_block(block: Block, heading: str) -> Iterator[str]:
    if isinstance(block, Table) and block.is_folded:
        yield f"<details><summary>{_escape(block.title or heading)}: {count(len(block.rows), 'row')}</summary>"
        yield from _render_table(block, block.title or heading)
        yield "</details>"
    elif isinstance(block, Table):
        if block.title:
            yield f"<h3>{_escape(block.title)}</h3>"
        yield from _render_table(block, block.title or heading)
    elif isinstance(block, Text):
        yield f"<p>{_escape(block.text)}</p>"
    elif isinstance(block, Bullets):
        yield _render_list(block.items)
    else:
        yield from _render_commands(block)


def _render_list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{_escape(item)}</li>' for item in items)}</ul>"


def _render_commands(block: Commands) -> Iterator[str]:
    yield '<dl class="commands">'
    for command, purpose in block.lines:
        yield f"<div><dt><code>{_escape(command)}</code></dt><dd>{_escape(purpose)}</dd></div>"
    yield "</dl>"


def _render_table(table: Table, label: str) -> Iterator[str]:
    """Render a table in a frame that a reader can scroll sideways, also by keyboard."""
    is_all_numbers = all(column.is_number for column in table.columns)
    yield f'<div class="scroll" role="region" tabindex="0" aria-label="{_escape(label)}">'
    yield f"<table{_style('numbers' if is_all_numbers else '')}><thead><tr>"
    yield "".join(_render_column(column) for column in table.columns)
    yield "</tr></thead><tbody>"
    classes = ["" if is_all_numbers else _column_class(column) for column in table.columns]
    for row in table.rows:
        head, *rest = row
        cells = [_render_cell(cell, word) for cell, word in zip(rest, classes[1:], strict=True)]
        yield f"<tr>{_render_row_head(head, classes[0])}{''.join(cells)}</tr>"
    yield "</tbody></table></div>"
    if table.note:
        yield f'<p class="note">{_escape(table.note)}</p>'


def _render_column(column: Column) -> str:
    identity = f' id="{column.anchor}"' if column.anchor else ""
    return f'<th scope="col"{identity}{_style(_column_class(column))}>{_link(_escape(column.name), column.target)}</th>'


def _render_row_head(cell: TableCell, word: str) -> str:
    identity = f' id="{cell.anchor}"' if cell.anchor else ""
    return f'<th scope="row"{identity}{_style(word)}>{_render_inline(cell)}</th>'


def _render_cell(cell: TableCell, word: str) -> str:
    return f"<td{_style(word, '' if cell.tone is Tone.PLAIN else cell.tone.value)}>{_render_inline(cell)}</td>"


def _column_class(column: Column) -> str:
    return "number" if column.is_number else "prose" if column.is_prose else ""


def _style(*words: str) -> str:
    found = " ".join(word for word in words if word)
    return f' class="{found}"' if found else ""


def _render_inline(cell: TableCell) -> str:
    text = f"<code>{_escape(cell.text)}</code>" if cell.is_code and cell.text else _escape(cell.text)
    return _link(text, cell.target) + (f" <small>{_escape(cell.note)}</small>" if cell.note else "")


def _link(markup: str, target: str) -> str:
    return f'<a href="{escape(target)}">{markup}</a>' if target else markup


def _render_plots(figures: Iterable[Figure]) -> Iterator[str]:
    yield '<section id="plots" aria-labelledby="plots-title"><h2 id="plots-title">Plots</h2><div class="figures">'
    yield from map(_render_figure, figures)
    yield "</div></section>"


def _render_figure(figure: Figure) -> str:
    caption = f"<figcaption>{_escape(figure.caption)}</figcaption>"
    return f'<figure id="{figure.key}"><h3>{_escape(figure.title)}</h3>{figure.svg}\n{caption}</figure>'


def _render_evidence(view: View) -> Iterator[str]:
    yield '<section id="evidence" aria-labelledby="evidence-title"><h2 id="evidence-title">Evidence</h2>'
    yield "<p>For each metric: the trials' summaries, the pairs, and every step with its log line.</p>"
    found = list(make_evidence(view))
    yield f"<details><summary>{count(len(found), 'metric')}</summary>"
    for item in found:
        yield from _render_metric(view, item)
    yield "</details></section>"


def _render_metric(view: View, item: MetricEvidence) -> Iterator[str]:
    yield f'<details id="{item.anchor}"><summary>{_escape(item.title)}</summary>'
    for table in (item.trials, item.pairs, make_step_table(view, item.metric)):
        yield from _render_block(table, item.title)
    yield "</details>"


def _escape(text: str) -> str:
    return escape(clean(text)).replace(" %", "\N{NO-BREAK SPACE}%")
