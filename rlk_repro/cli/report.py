"""Define ``report``, ``index`` and ``agreement``: what bundles or run directories show, from their analysis."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rlk_repro.cli.bundles import BundleName, find_bundle
from rlk_repro.cli.commands import complete_id
from rlk_repro.cli.output import OTHER_FOLDER, AsJson, Unsealed, note, say, say_answer, say_json, say_text, show

if TYPE_CHECKING:
    from rlk_repro.report.index import Entry

NUM_PROCESSES: Final = 2
OUTSIDE: Final = "outside"
WORDS: Final = {OUTSIDE: "fail", "not-measured": "not measured"}


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
    if is_doubtful or any(result["verdict"] in unwanted for result in results):
        raise typer.Exit(1)


def index(
    bundles: Annotated[list[Path], typer.Argument(metavar="BUNDLE...", help="Sealed bundles.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder for the pages.")],
    as_json: AsJson = False,
) -> None:
    """Write one static page over several bundles, and the report of each."""
    from rlk_repro.base.disk import writing
    from rlk_repro.base.findings import has_blocking
    from rlk_repro.base.units import count
    from rlk_repro.replay.recorded import CONTRADICTS
    from rlk_repro.report.index import write_index

    entries = list(_read_entries(bundles))
    with writing(output, hint=OTHER_FOLDER):
        page = write_index(entries, output)
    made = {"page": page, "bundles": [entry.context.bundle_id for entry in entries]}
    say_answer(made, f"{page}: {count(len(entries), 'bundle')}", as_json=as_json)
    doubtful = [entry.context.bundle for entry in entries if has_blocking(entry.context.findings)]
    for name in doubtful:
        note(f"{name} {CONTRADICTS}")
    if doubtful:
        raise typer.Exit(1)


def _read_entries(bundles: Sequence[Path]) -> Iterator[Entry]:
    """Check and analyse every bundle, two at a time, and say which one is done."""
    from concurrent.futures import ProcessPoolExecutor

    if len(bundles) == 1:
        yield _read_entry(bundles[0])
        return
    ignored = (signal.SIGINT, signal.SIG_IGN)  # this process handles Ctrl-C
    with ProcessPoolExecutor(NUM_PROCESSES, initializer=signal.signal, initargs=ignored) as pool:
        try:
            for number, entry in enumerate(pool.map(_read_entry, bundles), start=1):
                note(f"{number} of {len(bundles)}: {entry.context.bundle}")
                yield entry
        finally:
            pool.shutdown(cancel_futures=True)


def _read_entry(bundle: Path) -> Entry:
    from rlk_repro.base.errors import CheckFailed, Problem
    from rlk_repro.replay.recorded import load_result
    from rlk_repro.report.index import make_entry

    analysis, context = load_result(bundle, is_linked=False)
    if not context.bundle_id:
        raise CheckFailed(
            Problem(str(bundle), "is not sealed", expected="a sealed bundle, because the page shows its id")
        )
    return make_entry(analysis, context)


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


def agreement(
    name: BundleName = None,
    fail_on: Annotated[
        str | None, typer.Option("--fail-on", metavar="WORDS", help="Exit 1 on these results: outside, not-measured.")
    ] = OUTSIDE,
    is_unsealed_fine: Unsealed = False,
    as_json: AsJson = False,
) -> None:
    """Check whether training and rollout compute the same numbers for the same tokens; name the first difference."""
    from rlk_repro.base.findings import has_blocking
    from rlk_repro.replay.recorded import load_result
    from rlk_repro.report.blocks import summarise
    from rlk_repro.report.checks import describe_agreement, make_checks
    from rlk_repro.report.terminal import print_sections
    from rlk_repro.report.view import make_view
    from rlk_repro.rundir.agreement import describe_checks
    from rlk_repro.submit.authored import OTHER_CONTRACT

    unwanted = {WORDS[word] for word in read_fail_on(fail_on, WORDS, "word")}
    bundle = find_bundle(name)
    analysis, context = load_result(bundle, is_linked=False)
    checks, is_other_contract = analysis.checks, OTHER_CONTRACT in context.findings
    summary = describe_checks(checks)
    if as_json:
        say_json({"summary": summary, "checks": checks, "is_other_contract": is_other_contract})
    elif not checks:
        say(f"{bundle}: this run compared no engines; submit one with --set workload.what_for=agreement --pairs 1")
    else:
        view = make_view(analysis, context)
        sections = summarise([make_checks(view)])
        say(describe_agreement(view))
        show(lambda console: print_sections(sections, console))
        if is_other_contract:
            say("the bundle records another contract than this version's, by which the results were judged")
    is_doubtful = has_blocking(context.findings) or not (context.is_sealed or is_unsealed_fine)
    found = {item.word.value for item in checks} or {"not measured"}
    if is_doubtful or found & unwanted or not checks:
        raise typer.Exit(1)
