"""Define ``list``: the names that other commands take, and the file behind each name."""

from __future__ import annotations

from typing import Annotated

import typer

from rlk_repro.cli.completion import FOLDERS
from rlk_repro.cli.output import AsJson, say, say_json


def list_kinds(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="[KIND]",
            help=f"{', '.join(FOLDERS)}; default: all kinds.",
            show_default=False,
            autocompletion=lambda: list(FOLDERS),
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List the names of runs, hardware, stacks and profiles, and the file behind each name."""
    from rlk_repro.base.errors import Problem, SpecError
    from rlk_repro.base.resources import display_name, find_yaml, list_names, suggest

    if kind and kind not in FOLDERS:
        raise SpecError(
            Problem("KIND", "unknown", got=kind, expected=f"one of {', '.join(FOLDERS)}",
                    hint=suggest(kind, list(FOLDERS)) or "rlk-repro list")
        )  # fmt: skip
    kinds = [kind] if kind else list(FOLDERS)
    found = {
        name: {item: display_name(find_yaml(name, item, FOLDERS[name]())) for item in list_names(FOLDERS[name]())}
        for name in kinds
    }
    if as_json:
        say_json(found)
        return
    width = max((len(item) for files in found.values() for item in files), default=0)
    for name, files in found.items():
        say(f"{name}:")
        for item, file in files.items():
            say(f"  {item:<{width}}  {file}")
