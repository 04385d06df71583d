"""``report``: rebuild the report of bundles or run directories from their analysis."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlk_repro.cli.output import AsJson, make_console, say, say_json

if TYPE_CHECKING:
    from rlk_repro.results import Analysis
    from rlk_repro.rundir import RunDir


def register(app: typer.Typer) -> None:
    app.command("report")(report)


def report(
    sources: Annotated[list[Path], typer.Argument(metavar="BUNDLE|RUN_DIR...", help="What to report on.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="DIR", help="Where to write.")] = None,
    fail_on: Annotated[str, typer.Option("--fail-on", metavar="WORDS", help="Verdicts that exit with 1.")] = "",
    as_json: AsJson = False,
) -> None:
    """Write the HTML and Markdown report and print its summary."""
    from rlk_repro.bundle import open_bundle
    from rlk_repro.launch import report_context
    from rlk_repro.report import write_report
    from rlk_repro.report.terminal import print_summary

    unwanted = _verdict_words(fail_on)
    results = []
    for number, source in enumerate(sources):
        with open_bundle(source) as run_dir:
            analysis = _load_analysis(run_dir)
            context = report_context(run_dir, source, is_linked=source.is_dir() and output is None)
        files = write_report(analysis, _folder(source, output, number if len(sources) > 1 else None), context)
        results.append((source, analysis, files.html))
        if not as_json:
            print_summary(analysis, make_console(), context)
            say(f"\nreport: {files.html}\n")
    if as_json:
        say_json([{"source": str(source), "verdict": analysis.verdict.word.value, "report": str(html),
                   "headline": analysis.verdict.headline} for source, analysis, html in results])  # fmt: skip
    if any(analysis.verdict.word.value in unwanted for _, analysis, _ in results):
        raise typer.Exit(1)


def _load_analysis(run_dir: RunDir) -> Analysis:
    from rlk_repro.analysis import analyse
    from rlk_repro.files import load_json
    from rlk_repro.results import Analysis

    if run_dir.analysis.is_file():
        return Analysis.from_json(load_json(run_dir.analysis), str(run_dir.analysis))
    return analyse(run_dir)


def _folder(source: Path, output: Path | None, number: int | None) -> Path:
    """Where a report goes; with several sources each gets a numbered folder, whatever their run ids say."""
    if output is not None:
        return output if number is None else output / str(number + 1)
    return source / "report" if source.is_dir() else source.parent / "report"


def _verdict_words(text: str) -> set[str]:
    from rlk_repro.errors import Problem, SpecError
    from rlk_repro.results import VerdictWord

    known = [word.value for word in VerdictWord]
    words = {word.strip().replace("-", " ") for word in text.split(",") if word.strip()}
    unknown = sorted(words - set(known))
    if unknown:
        raise SpecError(Problem("--fail-on", "no such verdict", got=unknown[0], expected=f"any of {', '.join(known)}"))
    return words
