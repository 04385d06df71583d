"""Define ``verify``, ``inspect`` and ``diff``: check, describe and compare bundles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rlk_repro.base.errors import shorten
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.units import count, group, name_some
from rlk_repro.cli.commands import complete_id
from rlk_repro.cli.output import AsJson, Unsealed, say, say_answer, say_findings, say_json

if TYPE_CHECKING:
    from rlk_repro.bundle.verify import Verification

BundleName = Annotated[
    str | None,
    typer.Argument(
        metavar="[BUNDLE]",
        help="A bundle.tgz, a run directory or a run's id; default: the newest run.",
        show_default=False,
        autocompletion=complete_id,
    ),
]


def find_bundle(name: str | None) -> Path:
    """Return the path that a user means: an existing path, or the bundle of a run of theirs."""
    from rlk_repro.rundir.store import find_run_dir, list_run_dirs

    if name is not None:
        path = Path(name)
        try:
            is_there = path.exists()
        except OSError:  # the name is too long, for example; the command that opens it says so
            return path
        if is_there or not any(item.run_id.startswith(name) for item in list_run_dirs()):
            return path
    run_dir = find_run_dir(name)
    return run_dir.bundle if run_dir.bundle.is_file() else run_dir.root


MOST_IN_FULL: Final = 2
"""If a part of a plan or manifest has more differences than this, one line counts them and names up to three."""
MOST_SHOWN: Final = 240


def verify(
    name: BundleName = None,
    expected_id: Annotated[
        str | None, typer.Option("--id", metavar="SHA256", help="The bundle's expected id, 64 hex digits.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check every file of a bundle against its checksums, and print all findings."""
    from rlk_repro.bundle import verify as checks

    bundle = find_bundle(name)
    found = checks.verify(bundle, expected_id=expected_id)
    if as_json:
        say_json(found)
    else:
        for line in _id_lines(found, expected_id):
            say(line)
        say_findings(found.findings)
        say(f"{bundle}: {'every file matches the seal' if found.is_ok else 'verification failed'}")
    if not found.is_ok:
        raise typer.Exit(1)


def _id_lines(found: Verification, expected_id: str | None) -> Iterator[str]:
    if found.bundle_id is None:
        return
    yield f"id {found.bundle_id}"
    if found.claimed_id is not None:
        yield f"  this id is computed from these files; the bundle's SHA256SUMS gives another id, {found.claimed_id}"
    if expected_id is not None and not found.bundle_id.startswith(expected_id):
        yield f"  but --id expects {expected_id}"


def inspect(name: BundleName = None, as_json: AsJson = False) -> None:
    """Print what a bundle contains."""
    from rlk_repro.bundle.inspect import inspect_bundle

    info = inspect_bundle(find_bundle(name))
    say_answer(info, *info.lines(), as_json=as_json)


def diff(
    first: Annotated[str, typer.Argument(metavar="BUNDLE", help="A bundle.tgz, a run directory or a run's id.")],
    second: Annotated[str, typer.Argument(metavar="BUNDLE", help="The bundle to compare with the first.")],
    is_unsealed_fine: Unsealed = False,
    is_all_shown: Annotated[bool, typer.Option("--all", help="Print every difference in full.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare results, plans and manifests of two bundles; exit 1 when a difference is blocking."""
    from rlk_repro.base.findings import has_blocking
    from rlk_repro.replay.compare import diff_bundles

    found = diff_bundles(find_bundle(first), find_bundle(second))
    if as_json:
        say_json(found)
    else:
        for source in found.unsealed:
            say(f"{source}: not sealed: its files may have changed since the run")
        for line in [] if found.comparison is None else found.comparison.lines():
            say(line)
        if not found.findings:
            say("identical: plan, manifests and recorded code")
        elif is_all_shown:
            say_findings(found.findings)
        else:
            say_differences(found.findings, "--all prints them")
    if has_blocking(found.findings) or (found.unsealed and not is_unsealed_fine):
        raise typer.Exit(1)


def say_differences(findings: Sequence[Finding], how: str) -> None:
    """Print differences level by level, and of those that explain nothing only their number; ``how`` shows these."""
    for level in (Level.BLOCKING, Level.WARNING):
        found = [item for item in findings if item.level is level]
        if found:
            say(f"{count(len(found), 'difference')} of level {level.value}:")
        for part, alike in group((".".join(item.where.split(".")[:-1][:2]), item) for item in found).items():
            if len(alike) > MOST_IN_FULL:
                names = name_some(item.where.removeprefix(f"{part}.") for item in alike)
                say(f"  {level.value}: {part}: {len(alike)} values differ or are missing here: {names}")
            else:
                for item in alike:
                    say(f"  {shorten(str(item), MOST_SHOWN)}")
    if number := sum(item.level is Level.INFO for item in findings):
        say(f"{count(number, 'difference')} of level info ({how})")
