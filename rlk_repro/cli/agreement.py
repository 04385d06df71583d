"""Define ``agreement``: compare what training and rollout compute for the same tokens."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from rlk_repro.cli.bundles import BundleName, find_bundle
from rlk_repro.cli.output import AsJson, Unsealed, say, say_json, show
from rlk_repro.cli.report import read_fail_on

OUTSIDE: Final = "outside"
WORDS: Final = {OUTSIDE: "fail", "not-measured": "not measured"}


def agreement(
    name: BundleName = None,
    fail_on: Annotated[
        str | None, typer.Option("--fail-on", metavar="WORDS", help="Exit 1 on these results: outside, not-measured.")
    ] = None,
    is_unsealed_fine: Unsealed = False,
    as_json: AsJson = False,
) -> None:
    """Check whether training and rollout compute the same numbers for the same tokens; name the first difference."""
    from rlk_repro.base.findings import has_blocking
    from rlk_repro.replay.recorded import load_result
    from rlk_repro.report.blocks import summarise
    from rlk_repro.report.checks import make_checks
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
        sections = summarise([make_checks(make_view(analysis, context))])
        show(lambda console: print_sections(sections, console))
        if is_other_contract:
            say("the bundle records another contract than this version's, by which the results were judged")
        say(summary)
    is_doubtful = has_blocking(context.findings) or not (context.is_sealed or is_unsealed_fine)
    found = {item.word.value for item in checks} or {"not measured"}
    if is_doubtful or found & unwanted:
        raise typer.Exit(1)
