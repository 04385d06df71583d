"""Define ``replay``: verify, analyse again, show drift and what would run, ask for consent, run it here, compare."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlk_repro.base.console import silence
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, NotReproduced, Problem, RlkReproError
from rlk_repro.base.units import count
from rlk_repro.cli.bundles import BundleName, find_bundle, say_differences
from rlk_repro.cli.commands import complete_profile
from rlk_repro.cli.output import AsJson, note, say, say_json, show
from rlk_repro.cli.submit import require_sources, show_dry_run, use_sources

if TYPE_CHECKING:
    from rlk_repro.replay.compare import Comparison
    from rlk_repro.replay.steps import PreparedReplay, Recorded
    from rlk_repro.submit.finishing import Result


def replay(
    name: BundleName = None,
    is_analyze_only: Annotated[
        bool, typer.Option("--analyze-only", help="Analyse the logs again; run nothing.")
    ] = False,
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Show differences and job; send nothing.")] = False,
    cluster: Annotated[str | None, typer.Option(help="Cluster to run on; default: as recorded.")] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="Your site's profile.",
            show_default="local",
            autocompletion=complete_profile,
        ),
    ] = None,
    is_on_same_nodes: Annotated[bool, typer.Option("--same-nodes", help="Request the recorded nodes by name.")] = False,
    is_accepted: Annotated[bool, typer.Option("--yes", help="Do not ask; run in spite of differences.")] = False,
    is_trusted: Annotated[bool, typer.Option("--trust", help="Allow code from outside the pinned sources.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check a bundle, analyse its logs again, run its experiment here and compare."""
    from rlk_repro.replay import steps
    from rlk_repro.submit.consent import require_trust

    bundle = find_bundle(name)
    recorded = steps.reanalyse(bundle)
    first = recorded.describe()
    if is_analyze_only and as_json:
        say_json(first)
    elif not as_json:
        _say_analysis(bundle, recorded)
    if is_analyze_only:
        if not as_json:
            _say_end(bundle, recorded, "re-analysis, exact", f"rlk-repro replay {shlex.quote(str(bundle))}")
        return
    with _both_halves(first, as_json=as_json):
        site = steps.find_site(recorded, cluster, profile).model
        use_sources(cluster=site.cluster)
        prepared = steps.prepare(recorded, cluster=cluster, profile=profile, is_on_same_nodes=is_on_same_nodes)
        needs = _find_needs(prepared, bundle)
        if not as_json:
            _say_drift(prepared)
            _say_what_runs(prepared)
        if is_dry_run:
            _show_dry_run(prepared, first, needs, as_json=as_json)
            return
        if not (is_trusted or recorded.is_own):
            require_trust(prepared.launch.plan)
        _require_ready(prepared, bundle, needs, is_accepted=is_accepted, as_json=as_json)
        comparison, result = steps.run(prepared, silence if as_json else note, is_quiet=as_json)
    if as_json:
        say_json({**comparison.to_json(), "reanalysis": first, "rerun": {"is_done": True, "needs": []}})
    else:
        _say_comparison(bundle, comparison, result)
    if not comparison.is_ok:
        raise typer.Exit(NotReproduced.exit_code)


def _say_end(bundle: Path, recorded: Recorded, replay: str, next_command: str) -> None:
    from rlk_repro.report.setting import describe_setting
    from rlk_repro.report.terminal import print_answer
    from rlk_repro.report.view import Context

    context = Context(
        bundle=str(bundle),
        bundle_id=recorded.bundle_id,
        setting=describe_setting(recorded.plan),
        replay=replay,
        next_command=next_command,
    )
    show(lambda console: print_answer(recorded.analysis, console, context))


def _say_comparison(bundle: Path, comparison: Comparison, result: Result) -> None:
    from rlk_repro.report.terminal import print_answer

    for line in comparison.lines():
        say(line)
    both = f"{shlex.quote(str(bundle))} {shlex.quote(str(result.bundle))}"
    context = replace(result.context, replay=comparison.headline, next_command=f"rlk-repro diff {both}")
    show(lambda console: print_answer(result.analysis, console, context))


def _say_needs(bundle: Path, recorded: Recorded, needs: Sequence[Problem]) -> None:
    for need in needs:
        for line in f"rlk-repro: {need}".splitlines():
            note(line)
    sys.stderr.flush()
    found = f"re-analysis, exact; no new run, because this machine lacks {count(len(needs), 'item')} (listed above)"
    _say_end(bundle, recorded, found, f"rlk-repro report {shlex.quote(str(bundle))}  # this result with plots")


def _require_ready(
    prepared: PreparedReplay, bundle: Path, needs: Sequence[Problem], *, is_accepted: bool, as_json: bool
) -> None:
    from rlk_repro.replay import steps

    if needs and as_json:
        raise EnvironmentMissing(*needs)
    if needs:
        _say_needs(bundle, prepared.recorded, needs)
        raise typer.Exit(EnvironmentMissing.exit_code)
    if not is_accepted and not as_json and sys.stdin.isatty():
        is_accepted = _ask(prepared)
    steps.check_drift(prepared.known_drift, is_accepted=is_accepted)
    steps.require_consent(is_accepted=is_accepted)


@contextmanager
def _both_halves(first: dict[str, Any], *, as_json: bool) -> Iterator[None]:
    """With ``--json``, print the successful re-analysis also where an error stops the new run.

    NotReproduced replaces CheckFailed, whose exit code would say that the re-analysis failed.
    """
    try:
        yield
    except RlkReproError as error:
        if as_json:
            say_json({"reanalysis": first, "rerun": _describe_stop(error.problems)})
        if isinstance(error, CheckFailed):
            raise NotReproduced(*error.problems) from error
        raise


def _describe_stop(problems: Sequence[Problem]) -> dict[str, Any]:
    needs = [{"where": item.where, "problem": str(item).splitlines()[0], "next": item.hint or ""} for item in problems]
    return {"is_done": False, "needs": needs}


def _find_needs(prepared: PreparedReplay, bundle: Path) -> list[Problem]:
    from rlk_repro.replay.needs import find_needs

    needs: tuple[Problem, ...] = ()
    try:
        require_sources(prepared.launch.plan, prepared.recorded.identity.sources)
    except EnvironmentMissing as error:
        needs = error.problems
    return [*needs, *find_needs(prepared, bundle)]


def _say_analysis(bundle: Path, recorded: Recorded) -> None:
    from rlk_repro.replay.recorded import describe_own_patch

    how = "in every value" if recorded.is_reworded else "byte for byte"
    more = "; only sentences differ, because another version of rlk-repro sealed it" if recorded.is_reworded else ""
    say(f"{bundle}: the analysis is reproduced {how} from its logs (level: re-analysis, exact){more}")
    for line in describe_own_patch(bundle, recorded.manifests):
        say(line)
    say(recorded.analysis.verdict.headline)


def _say_drift(prepared: PreparedReplay) -> None:
    if prepared.drift is None:
        say("the new run will compare its nodes with the recorded nodes")
    if prepared.known_drift:
        say("this machine differs from the recorded machine:")
        say_differences(prepared.known_drift, "--dry-run --json lists them")


def _say_what_runs(prepared: PreparedReplay) -> None:
    from rlk_repro.submit.consent import list_what_runs

    say("what would run here:")
    recorded = prepared.recorded
    for topic, text in list_what_runs(prepared.launch.plan, recorded.plan.profile, is_own=recorded.is_own).items():
        say(f"  {topic:<12} {text}")


def _ask(prepared: PreparedReplay) -> bool:
    number = prepared.num_blocking
    question = f"Run this, in spite of {number} blocking difference(s)?" if number else "Run this?"
    if not typer.confirm(question, err=True):
        raise CheckFailed(Problem("replay", "you did not agree to run the experiment", expected="the answer yes"))
    return True


def _show_dry_run(prepared: PreparedReplay, first: dict[str, Any], needs: Sequence[Problem], *, as_json: bool) -> None:
    from rlk_repro.submit.consent import list_what_runs
    from rlk_repro.submit.show import describe_dry_run

    plan, job = prepared.launch.plan, prepared.launch.job
    recorded = prepared.recorded
    if as_json:
        say_json(
            {
                **describe_dry_run(plan, job),
                "drift": prepared.drift,
                "parts": prepared.parts,
                "missing": prepared.missing,
                "what_runs": list_what_runs(plan, recorded.plan.profile, is_own=recorded.is_own),
                "replay_of": recorded.bundle_id,
                "reanalysis": first,
                "rerun": _describe_stop(needs),
            }
        )
        return
    for need in needs:
        say(f"missing on this machine: {need.where} ({need.hint})")
    show_dry_run(plan, job, is_job_shown=False, as_json=False)
