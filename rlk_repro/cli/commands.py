"""Complete the help of every command: hide the type of flags without a value, and add one example."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from typer.core import TyperCommand, TyperGroup

EXAMPLES: Final[Mapping[str, str]] = {
    "agreement": "rlk-repro agreement bundle.tgz --fail-on outside",
    "cancel": "rlk-repro cancel 20261124T013541Z-9dcecb6a-bb99",
    "collect": "rlk-repro collect 20261124T013541Z-9dcecb6a-bb99",
    "combine": "rlk-repro combine docs/evidence/qwen3-30b-a3b-random-4l*.tgz",
    "diff": "rlk-repro diff --gate reference.tgz bundle.tgz",
    "doctor": "rlk-repro doctor",
    "env check": "rlk-repro env check DIR --stack 2026-11",
    "env create": "rlk-repro env create DIR --stack 2026-11",
    "env export": "rlk-repro env export DIR -o FOLDER",
    "images build": "rlk-repro images build --stack 2026-07 --platform cuda-amd64",
    "images check": "rlk-repro images check localhost/rlk-repro:2026-11-cuda-amd64 --stack 2026-11",
    "images list": "rlk-repro images list",
    "images pin": "rlk-repro images pin 2026-07",
    "images pull": "rlk-repro images pull --stack 2026-07 --platform cuda-amd64",
    "index": "rlk-repro index docs/evidence/*.tgz -o site",
    "inspect": "rlk-repro inspect bundle.tgz",
    "list": "rlk-repro list profiles",
    "logs": "rlk-repro logs 20261124T013541Z-9dcecb6a-bb99",
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
    "claims": "docs/evidence/README.md has a table of what it measured",
    "images export": "use skopeo copy (docs/images.md)",
    "images import": "use skopeo copy (docs/images.md)",
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
