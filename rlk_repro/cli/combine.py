"""Define ``combine``: one result from bundles of one experiment that several machines made."""

from __future__ import annotations

from typing import Annotated

import typer

from rlk_repro.cli.bundles import find_bundle
from rlk_repro.cli.output import AsJson, say_answer


def combine(
    names: Annotated[list[str], typer.Argument(metavar="BUNDLE...", help="Sealed bundles of one experiment.")],
    as_json: AsJson = False,
) -> None:
    """Combine bundles of one experiment: one effect per machine, their mean, and what to expect of the next machine."""
    from rlk_repro.replay import combine as steps

    found = steps.combine([find_bundle(name) for name in names])
    say_answer(found, *steps.describe(found), as_json=as_json)
