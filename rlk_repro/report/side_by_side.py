"""Make a page with a column for each result: answers, effects, gates, and how the runs differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rlk_repro.base.files import write_text
from rlk_repro.base.units import count, format_percent
from rlk_repro.report.answer import describe_answer, describe_ground, describe_words
from rlk_repro.report.basis import SHOWN_HASH, describe_interval, make_identity, make_origin
from rlk_repro.report.blocks import Column, Section, Table, TableCell
from rlk_repro.report.html import render_page
from rlk_repro.report.index import INDEX_NAME
from rlk_repro.report.sections import GATE_TONES, choose_tone
from rlk_repro.report.view import Context, View, make_view
from rlk_repro.rundir.results import Analysis, Effect


def write_side_by_side(results: Sequence[tuple[Analysis, Context, Path]], folder: Path) -> Path:
    page = folder / INDEX_NAME
    links = [report.relative_to(folder).as_posix() for _, _, report in results]
    views = [make_view(analysis, context) for analysis, context, _ in results]
    write_text(page, render_side_by_side(views, links))
    return page


def render_side_by_side(views: Sequence[View], links: Sequence[str]) -> str:
    names = [f"{number}: {view.analysis.run}" for number, view in enumerate(views, start=1)]

    def section(
        key: str,
        title: str,
        rows: Callable[[View], Iterable[tuple[str, TableCell]]],
        note: str = "",
        *,
        is_prose: bool = False,
    ) -> Section:
        found = _join([dict(rows(view)) for view in views])
        headed = (Column(name=name, target=link, is_prose=is_prose) for name, link in zip(names, links, strict=True))
        columns = (Column(name=""), *headed)
        return Section(key=key, title=title, blocks=(Table(columns=columns, rows=found, note=note),))

    return render_page(
        "Side by side",
        f"{count(len(views), 'result')}, analysed again from the logs.",
        [
            section("answers", "Answers", _list_answers, is_prose=True),
            section(
                "effects",
                "Effects",
                _list_effects,
                "Each change is the ratio enabled / baseline, in percent of the baseline.",
            ),
            section("gates", "Gates", _list_gates),
            section("runs", "What ran", _list_facts, "The mark ≠ shows where the results differ.", is_prose=True),
        ],
    )


def _join(columns: Sequence[dict[str, TableCell]]) -> tuple[tuple[TableCell, ...], ...]:
    names = dict.fromkeys(name for column in columns for name in column)
    rows = ((name, [column.get(name, TableCell(text="–")) for column in columns]) for name in names)
    return tuple(
        (TableCell(text=name, note="" if len({cell.text for cell in cells}) == 1 else "≠"), *cells)
        for name, cells in rows
    )


def _list_answers(view: View) -> Iterable[tuple[str, TableCell]]:
    analysis = view.analysis
    yield "verdict", TableCell(text=describe_words(analysis), tone=choose_tone(analysis))
    yield "answer", TableCell(text=describe_answer(view).removeprefix("Result: "))
    yield "rests on", TableCell(text=describe_ground(view))
    yield "bundle", TableCell(text=view.context.bundle_id[:SHOWN_HASH] or "not sealed", is_code=True)


def _list_effects(view: View) -> Iterable[tuple[str, TableCell]]:
    for effect in sorted(view.effects, key=lambda effect: view.metric_rank(effect.metric)):
        if view.is_comparable(effect.metric):
            yield view.label(effect.metric).label, TableCell(text=_describe_effect(effect))


def _describe_effect(effect: Effect) -> str:
    if effect.ratio is None:
        return "no comparison"
    return f"{format_percent(effect.ratio)} ({describe_interval(effect)}, n={effect.n})"


def _list_gates(view: View) -> Iterable[tuple[str, TableCell]]:
    for gate in view.analysis.gates:
        yield gate.name, TableCell(text=gate.status.value, tone=GATE_TONES[gate.status])


def _list_facts(view: View) -> Iterable[tuple[str, TableCell]]:
    facts = dict((*make_identity(view.analysis), *make_origin(view.analysis), *view.context.setting))
    facts |= dict(sorted(view.analysis.facts.items()))
    return ((name, TableCell(text=value)) for name, value in facts.items())
