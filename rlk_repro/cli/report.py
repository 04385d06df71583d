"""Define ``report`` and ``index``: rebuild the reports of bundles or run directories from their analysis."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rlk_repro.cli.bundles import find_bundle
from rlk_repro.cli.completion import complete_id
from rlk_repro.cli.output import OTHER_FOLDER, AsJson, Unsealed, note, say_answer, say_json, say_text, show


def report(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[BUNDLE|RUN_DIR|ID]...",
            help="Bundles, run directories or runs' ids; default: the newest run.",
            show_default=False,
            autocompletion=complete_id,
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="DIR", help="Folder for reports.")] = None,
    fail_on: Annotated[
        str | None, typer.Option("--fail-on", metavar="WORDS", help="Exit 1 on these verdicts, such as slower.")
    ] = None,
    is_unsealed_fine: Unsealed = False,
    is_csv: Annotated[
        bool, typer.Option("--csv", help="Write also steps.csv and effects.csv, for other tools.")
    ] = False,
    is_summary: Annotated[
        bool, typer.Option("--summary", help="Print Markdown for a pull request; write no file.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the HTML and Markdown report and print its summary."""
    from rlk_repro.base.disk import writing
    from rlk_repro.base.findings import has_blocking
    from rlk_repro.bundle.seal import is_folder
    from rlk_repro.replay.recorded import load_result
    from rlk_repro.report import write_report
    from rlk_repro.report.csv_tables import write_tables
    from rlk_repro.report.markdown import render_summary
    from rlk_repro.report.record import make_record
    from rlk_repro.report.terminal import print_summary
    from rlk_repro.rundir.results import VerdictWord

    unwanted = read_fail_on(fail_on and fail_on.replace("-", " "), [word.value for word in VerdictWord], "verdict")
    sources = [find_bundle(name) for name in names] if names else [find_bundle(None)]
    results, is_doubtful = [], False
    for number, source in enumerate(sources, start=1):
        analysis, context = load_result(source, is_linked=is_folder(source) and output is None)
        is_doubtful = is_doubtful or has_blocking(context.findings) or not (context.is_sealed or is_unsealed_fine)
        if is_summary:
            results.append(make_record(analysis, context, source=str(source)))
            if not as_json:
                say_text(render_summary(analysis, context))
            continue
        folder = _folder(source, output, number if len(sources) > 1 else None)
        with writing(folder, hint=OTHER_FOLDER):
            page = write_report(analysis, folder, context)
            if is_csv:
                write_tables(analysis, folder)
        results.append(make_record(analysis, context, source=str(source), report=str(page)))
        if not as_json:
            show(partial(print_summary, analysis, context=replace(context, report=str(page))))
    if as_json:
        say_json(results)
    if is_doubtful or any(result.verdict in unwanted for result in results):
        raise typer.Exit(1)


def index(
    bundles: Annotated[list[Path], typer.Argument(metavar="BUNDLE...", help="Sealed bundles.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder for the pages.")],
    as_json: AsJson = False,
) -> None:
    """Write one static page over several bundles, and the report of each."""
    from rlk_repro.base.disk import writing
    from rlk_repro.base.errors import CheckFailed, Problem
    from rlk_repro.base.findings import has_blocking
    from rlk_repro.base.units import count
    from rlk_repro.replay.recorded import CONTRADICTS, load_result
    from rlk_repro.report.index import write_index

    entries = []
    for bundle in bundles:
        analysis, context = load_result(bundle, is_linked=False)
        if not context.bundle_id:
            raise CheckFailed(
                Problem(str(bundle), "is not sealed", expected="a sealed bundle, because the page shows its id")
            )
        entries.append((analysis, context))
    with writing(output, hint=OTHER_FOLDER):
        page = write_index(entries, output)
    made = {"page": page, "bundles": [context.bundle_id for _, context in entries]}
    say_answer(made, f"{page}: {count(len(entries), 'bundle')}", as_json=as_json)
    doubtful = [context.bundle for _, context in entries if has_blocking(context.findings)]
    for name in doubtful:
        note(f"{name} {CONTRADICTS}")
    if doubtful:
        raise typer.Exit(1)


def _folder(source: Path, output: Path | None, number: int | None) -> Path:
    from rlk_repro.base.errors import BundleUnreadable, Problem
    from rlk_repro.bundle.seal import is_folder
    from rlk_repro.rundir.paths import RunDir

    if output is not None:
        return output if number is None else output / str(number)
    packed = RunDir(source if is_folder(source) else source.parent)
    if is_folder(source) or source.name == packed.bundle.name:
        folder = packed.report
    else:
        folder = source.parent / f"{source.name.removesuffix('.tgz')}-report"
    if folder.is_symlink():
        what = "is a symbolic link; a report is written through a link only if -o names the link"
        raise BundleUnreadable(Problem(str(folder), what, expected="a folder", hint="name the target with -o"))
    return folder


def read_fail_on(text: str | None, known: Collection[str], what: str) -> set[str]:
    """Read the comma-separated words of ``--fail-on``; raise SpecError unless there are words and all are ``known``."""
    from rlk_repro.base.errors import Problem, SpecError

    if text is None:
        return set()
    words = {word.strip() for word in text.split(",") if word.strip()} or {text}
    unknown = sorted(words - set(known))
    if unknown:
        raise SpecError(Problem("--fail-on", f"no such {what}", got=unknown[0], expected=f"any of {', '.join(known)}"))
    return words
