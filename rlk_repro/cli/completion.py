"""Complete names after TAB (runs, hardware, stacks, profiles, ids), and define options that several commands have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Final

import typer

from rlk_repro.base import resources

FOLDERS: Final[Mapping[str, Callable[[], list[Path]]]] = {
    "runs": resources.run_folders,
    "hardware": resources.hardware_folders,
    "stacks": resources.stack_folders,
    "profiles": resources.all_profile_folders,
}


def _complete_from(kind: str) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [name for name in resources.list_names(FOLDERS[kind]()) if name.startswith(incomplete)]

    return complete


complete_run = _complete_from("runs")
complete_hardware = _complete_from("hardware")
complete_stack = _complete_from("stacks")
complete_profile = _complete_from("profiles")


def complete_id(incomplete: str) -> list[str]:
    from rlk_repro.rundir.store import list_run_dirs

    return [item.run_id for item in reversed(list_run_dirs()) if item.run_id.startswith(incomplete)]


RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="A name from `runs list`, or a run's file.", autocompletion=complete_run)
]
HardwareName = Annotated[
    str | None, typer.Option(help="Such as h200; default: the profile's.", autocompletion=complete_hardware)
]
PinsName = Annotated[
    str | None, typer.Option(help="Pinned versions; default: the run's.", autocompletion=complete_stack)
]
StackName = Annotated[
    str | None,
    typer.Option("--stack", help="Stack (name or file); default: the newest.", autocompletion=complete_stack),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Change one value; can be repeated.")
]
