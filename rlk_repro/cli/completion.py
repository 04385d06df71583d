"""Complete names after TAB (runs, hardware, stacks, profiles, ids), and define the options that take such names."""

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


def complete_run(incomplete: str) -> list[str]:
    return _complete("runs", incomplete)


def complete_hardware(incomplete: str) -> list[str]:
    return _complete("hardware", incomplete)


def complete_stack(incomplete: str) -> list[str]:
    return _complete("stacks", incomplete)


def complete_profile(incomplete: str) -> list[str]:
    return _complete("profiles", incomplete)


def complete_id(incomplete: str) -> list[str]:
    """List matching run ids, newest first."""
    from rlk_repro.rundir.store import list_run_dirs

    return [item.run_id for item in reversed(list_run_dirs()) if item.run_id.startswith(incomplete)]


def _complete(kind: str, incomplete: str) -> list[str]:
    return [name for name in resources.list_names(FOLDERS[kind]()) if name.startswith(incomplete)]


RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="A name from `runs list`, or a file.", autocompletion=complete_run)
]
HardwareName = Annotated[
    str | None, typer.Option(help="Hardware; default from the profile.", autocompletion=complete_hardware)
]
PinsName = Annotated[str | None, typer.Option(help="Set of pins; default from the run.", autocompletion=complete_stack)]
