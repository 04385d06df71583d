"""Define ``claims list`` and ``claims check``, which show published figures and measure them again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlk_repro.cli.output import AsJson, note, say_answer

Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID...]", help="Ids of claims; default: all claims.")]


def list_claims(as_json: AsJson = False) -> None:
    """List published claims about RL-Kernel, their sources and how a check measures them."""
    from rlk_repro.claims.files import load_claims
    from rlk_repro.claims.text import list_lines

    claims = load_claims()
    plain = [claim.model_dump(mode="json", by_alias=True) for claim in claims]
    say_answer(plain, *list_lines(claims), as_json=as_json)


def check(
    ids: Ids = None,
    rl_kernel_src: Annotated[
        Path | None,
        typer.Option("--rl-kernel-src", envvar="RLK_SRC", help="Checkout of RL-Kernel; default: the installed one."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the results to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure published claims on this machine; print the published figure, the measured figure and a result."""
    from rlk_repro.base.console import live_line
    from rlk_repro.base.errors import CheckFailed, EnvironmentMissing
    from rlk_repro.base.files import write_json
    from rlk_repro.claims.check import check_claims
    from rlk_repro.claims.files import load_claims
    from rlk_repro.claims.results import Word
    from rlk_repro.claims.text import check_lines
    from rlk_repro.sources import RL_KERNEL
    from rlk_repro.workloads.checkouts import use_checkouts

    claims = load_claims(ids or ())
    if output is not None:
        _require_place(output)
    use_checkouts({} if rl_kernel_src is None else {RL_KERNEL: rl_kernel_src})
    with live_line(is_quiet=as_json) as line:
        found = check_claims(claims, tell=line.tell)
    if output is not None and found.has_measured:
        write_json(output, found.to_json())
    elif output is not None:
        note(f"{output}: not written, because no claim could be checked by a measurement here")
    say_answer(found, *check_lines(found), as_json=as_json)
    if found.count()[Word.NOT_REPRODUCED]:
        raise typer.Exit(CheckFailed.exit_code)
    if not found.has_measured:
        raise typer.Exit(EnvironmentMissing.exit_code)


def _require_place(output: Path) -> None:
    """Check the output path before the measurement, which takes minutes; this check creates no files."""
    from rlk_repro.base.disk import can_make
    from rlk_repro.base.errors import EnvironmentMissing, Problem

    if output.is_dir() or not can_make(output.absolute().parent):
        raise EnvironmentMissing(Problem(str(output), "cannot be written", expected="a file that you can write"))
