"""What all commands share: examples in their help, options, and names that TAB completes."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from rlk_repro.base import resources

EXAMPLES: Final[Mapping[str, str]] = {
    "agreement": "rlk-repro agreement bundle.tgz --fail-on outside",
    "cancel": "rlk-repro cancel 20261124T013541Z-9dcecb6a-bb99",
    "collect": "rlk-repro collect 20261124T013541Z-9dcecb6a-bb99",
    "combine": "rlk-repro combine a.tgz b.tgz c.tgz -o forest.html",
    "diff": "rlk-repro diff a.tgz b.tgz",
    "doctor": "rlk-repro doctor",
    "env check": "rlk-repro env check DIR --stack 2026-11",
    "env create": "rlk-repro env create DIR --stack 2026-11",
    "env export": "rlk-repro env export DIR -o FOLDER",
    "images build": "rlk-repro images build --stack 2026-07 --platform cuda-amd64",
    "index": "rlk-repro index *.tgz -o site",
    "inspect": "rlk-repro inspect bundle.tgz",
    "list": "rlk-repro list profiles",
    "logs": "rlk-repro logs 20261124T013541Z-9dcecb6a-bb99",
    "predict": "rlk-repro predict qwen3-4b-random --hardware h200",
    "prepare": "rlk-repro prepare qwen3-4b-random --hardware h200",
    "profile check": "rlk-repro profile check my-site.yaml",
    "profile init": "rlk-repro profile init --cluster slurm -o my-site.yaml",
    "profile show": "rlk-repro profile show generic-h200",
    "replay": "rlk-repro replay bundle.tgz --analyze-only",
    "report": "rlk-repro report bundle.tgz --summary",
    "runs list": "rlk-repro runs list --submitted",
    "runs show": "rlk-repro runs show qwen3-4b",
    "status": "rlk-repro status",
    "submit": "rlk-repro submit qwen3-30b-a3b --cluster slurm --dry-run",
    "verify": "rlk-repro verify bundle.tgz",
}

REMOVED: Final[Mapping[str, str]] = {
    "claims": "use rlk-repro combine, which joins the results of several machines",
    "images check": "run python3 -P -m rlk_repro.image_check in the image",
    "images export": "use skopeo copy",
    "images import": "use skopeo copy",
    "images list": "rlk-repro list stacks names them",
    "images pin": "write the image's name and digest into a copy of the stack",
    "images pull": "pull NAME@DIGEST with your container engine",
}
"""Commands of earlier versions, and what to use instead."""

_TYPED: Final = re.compile(
    rf"(?<![/.-])rlk-repro (?=(?:{'|'.join(sorted({words.split()[0] for words in EXAMPLES}))})\b)"
)


def as_typed(text: str) -> str:
    """Replace ``rlk-repro`` in commands by its path, such as ``.venv/bin/rlk-repro``, if it is not on PATH."""
    program = sys.argv[0]
    is_by_path = Path(program).name == "rlk-repro" and "/" in program and shutil.which("rlk-repro") is None
    return _TYPED.sub(lambda _: f"{shlex.quote(program)} ", text) if is_by_path else text


class CommandGroup(TyperGroup):
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if isinstance(command, TyperCommand):
            words = [*ctx.command_path.split()[1:], cmd_name]
            if example := EXAMPLES.get(" ".join(words)):
                command.epilog = f"Example: {example}"
            _hide_values_of_flags(command.get_params(ctx))
        return command

    def get_params(self, ctx: Any) -> list[Any]:
        options = super().get_params(ctx)
        _hide_values_of_flags(options)
        return options


def _hide_values_of_flags(options: Iterable[Any]) -> None:
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = ""  # by default typer shows a type, although a flag takes no value


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
