"""Render sections as one HTML page without scripts, external files or unescaped text.

The page's content security policy also forbids scripts and network access, in case escaping fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from importlib import resources
from typing import Any, Final

from rlk_repro.base.units import count
from rlk_repro.report.blocks import (
    Bullets,
    Column,
    Commands,
    Details,
    Facts,
    Figure,
    Figures,
    Section,
    Table,
    TableCell,
    Text,
    Tone,
)
from rlk_repro.report.labels import clean, prose
from rlk_repro.report.sections import make_sections
from rlk_repro.report.view import Context, make_view
from rlk_repro.rundir.results import Analysis

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def render_html(analysis: Analysis, context: Context | None = None) -> str:
    return render_page(make_sections(make_view(analysis, context)))


def render_page(sections: Sequence[Section]) -> str:
    first, *rest = sections
    title = _escape(f"{first.subject}: {first.title}" if first.subject else first.title)
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        f'<head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta name="color-scheme" content="light dark"><title>{title} – rlk-repro</title>',
        f"<style>\n{load_style()}</style></head>",
        "<body><main>",
        *_render_section(first, "h1", f"first {first.tone}"),
        '<nav aria-label="Contents"><ul>',
        *(f'<li><a href="#{section.key}">{_escape(section.title)}</a></li>' for section in rest),
        "</ul></nav>",
    ]
    for section in rest:
        lines += _render_section(section, "h2")
    return "\n".join([*lines, "</main></body></html>"]) + "\n"


def load_style() -> str:
    return resources.files("rlk_repro.report").joinpath("report.css").read_text(encoding="utf-8")


def _render_section(section: Section, heading: str, class_: str = "") -> Iterator[str]:
    yield f'<section id="{section.key}" aria-labelledby="{section.key}-title"{_style(class_)}>'
    if section.subject:
        yield f'<p class="subject">{_escape(section.subject)}</p>'
    yield f'<{heading} id="{section.key}-title">{_escape(section.title)}</{heading}>'
    for block in section.blocks:
        yield from _RENDER[type(block)](block, section.title)
    yield "</section>"


def _render_text(block: Text, _: str) -> Iterator[str]:
    yield f"<p{_style('strong' if block.is_strong else '')}>{_link(_escape(block.text), block.target)}</p>"


def _render_facts(block: Facts, _: str) -> Iterator[str]:
    yield f'<dl class="{"inline" if block.is_inline else "facts"}">'
    for name, cell in block.items:
        yield f"<div><dt>{_escape(name)}</dt><dd>{_render_inline(cell)}</dd></div>"
    yield "</dl>"


def _render_list(block: Bullets, _: str) -> Iterator[str]:
    yield f"<ul>{''.join(f'<li>{_escape(item)}</li>' for item in block.items)}</ul>"


def _render_commands(block: Commands, _: str) -> Iterator[str]:
    yield '<dl class="commands">'
    for command, purpose in block.lines:
        yield f"<div><dt><code>{_code(command)}</code></dt><dd>{_escape(purpose)}</dd></div>"
    yield "</dl>"


def _render_figures(block: Figures, _: str) -> Iterator[str]:
    yield '<div class="figures">'
    yield from map(_render_figure, block.figures)
    yield "</div>"


def _render_figure(figure: Figure) -> str:
    caption = f"<figcaption>{_escape(figure.caption)}</figcaption>"
    return f'<figure id="{figure.key}"><h3>{_escape(figure.title)}</h3>{figure.svg}\n{caption}</figure>'


def _render_details(block: Details, _: str) -> Iterator[str]:
    yield f'<details id="{block.anchor}"><summary>{_escape(block.title)}</summary>'
    for table in block.blocks:
        yield from _render_table(table, block.title)
    yield "</details>"


def _render_table(table: Table, heading: str) -> Iterator[str]:
    """Render a table in a frame that a reader can scroll sideways, also by keyboard.

    On a phone, each row of an open table becomes a name above its values.
    """
    label = _escape(table.title or heading)
    is_all_numbers = all(column.is_number for column in table.columns)
    if table.is_folded:
        yield f"<details><summary>{label}: {count(len(table.rows), 'row')}</summary>"
    elif table.title:
        yield f"<h3>{label}</h3>"
    yield f'<div class="scroll" role="region" tabindex="0" aria-label="{label}">'
    yield f"<table{_style('numbers' if is_all_numbers else '' if table.is_folded else 'rows')}><thead><tr>"
    yield "".join(_render_column(column) for column in table.columns)
    yield "</tr></thead><tbody>"
    classes = ["" if is_all_numbers else _column_class(column) for column in table.columns]
    for row in table.rows:
        head, *rest = row
        cells = [_render_cell(cell, word) for cell, word in zip(rest, classes[1:], strict=True)]
        yield f'<tr><th scope="row"{_identity(head.anchor)}{_style(classes[0])}>{_render_inline(head)}</th>'
        yield f"{''.join(cells)}</tr>"
    yield "</tbody></table></div>"
    if table.note:
        yield f'<p class="note">{_escape(table.note)}</p>'
    if table.is_folded:
        yield "</details>"


_RENDER: Final[dict[type, Callable[[Any, str], Iterable[str]]]] = {
    Text: _render_text,
    Facts: _render_facts,
    Bullets: _render_list,
    Commands: _render_commands,
    Figures: _render_figures,
    Details: _render_details,
    Table: _render_table,
}


def _render_column(column: Column) -> str:
    class_ = _style(_column_class(column))
    return f'<th scope="col"{_identity(column.anchor)}{class_}>{_link(_escape(column.name), column.target)}</th>'


def _render_cell(cell: TableCell, word: str) -> str:
    return f"<td{_style(word, '' if cell.tone is Tone.PLAIN else cell.tone.value)}>{_render_inline(cell)}</td>"


def _column_class(column: Column) -> str:
    return "number" if column.is_number else "prose" if column.is_prose else ""


def _identity(anchor: str) -> str:
    return f' id="{anchor}"' if anchor else ""


def _style(*words: str) -> str:
    found = " ".join(word for word in words if word)
    return f' class="{found}"' if found else ""


def _render_inline(cell: TableCell) -> str:
    text = f"<code>{_code(cell.text)}</code>" if cell.is_code and cell.text else _escape(cell.text)
    return _link(text, cell.target) + (f" <small>{_escape(cell.note)}</small>" if cell.note else "")


def _link(markup: str, target: str) -> str:
    return f'<a href="{escape(target)}">{markup}</a>' if target else markup


def _escape(text: str) -> str:
    return escape(prose(text))


def _code(text: str) -> str:
    return escape(clean(text))
