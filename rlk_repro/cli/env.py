"""Define ``env create|check|export``: a stack as a virtual environment, for hosts without containers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlk_repro.cli.completion import StackName
from rlk_repro.cli.output import AsJson, say_answer

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the environment.")]
Platform = Annotated[str | None, typer.Option(help="cuda-amd64 or cuda-arm64; default: this machine's.")]


def create(
    folder: Folder,
    stack: StackName = None,
    platform: Platform = None,
    bundle: Annotated[
        Path | None, typer.Option("--from", metavar="FOLDER", help="Read files from a folder that env export wrote.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a stack's environment from lock file and commits; a repeated call resumes the work. No GPU is needed."""
    from rlk_repro.base.errors import Problem, SpecError
    from rlk_repro.images import environment, packed
    from rlk_repro.images.stacks import get_stack

    if bundle is None or not packed.is_packed(bundle):
        environment.create(get_stack(stack), platform, folder, bundle=bundle)
    elif stack or platform:
        raise SpecError(Problem("--stack, --platform", "are not for this folder: one environment is packed in it"))
    else:
        packed.create(folder.absolute(), bundle.absolute())
    _answer(folder, f"ready; set container.host_python in a profile to {folder.absolute()}/bin/python", as_json)


def check(
    folder: Folder,
    stack: Annotated[str | None, typer.Option("--stack", help="Check the environment against this stack.")] = None,
    platform: Platform = None,
    as_json: AsJson = False,
) -> None:
    """Check the content of an environment against its record and its stack; no GPU is needed."""
    from rlk_repro.images import environment

    code = environment.check(folder, stack, platform)
    if code in {0, 1}:
        _answer(folder, "must not be used" if code else "matches its record", as_json, is_ok=code == 0)
    if code:
        raise typer.Exit(code)


def export(
    folder: Folder,
    target: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="Folder for wheels and sources.")],
    stack: StackName = None,
    reuse_torch: Annotated[
        bool, typer.Option("--reuse-torch", help="Pack the installed files, for a host that has this torch already.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write an environment's wheels and sources to a folder, for `env create --from` on a host without a network."""
    from rlk_repro.images import environment
    from rlk_repro.images.stacks import get_stack

    environment.export(get_stack(stack), folder, target, reuse_torch=reuse_torch)
    _answer(target, "check the folder anywhere with sha256sum -c SHA256SUMS", as_json)


def _answer(folder: Path, words: str, as_json: bool, *, is_ok: bool = True) -> None:
    say_answer({"folder": folder, "is_ok": is_ok}, f"{folder}: {words}", as_json=as_json)
