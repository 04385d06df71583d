"""Define ``images build`` and ``env create|check|export``: a stack as an image or a virtual environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlk_repro.cli.commands import StackName
from rlk_repro.cli.output import AsJson, say_answer

ImagePlatform = Annotated[
    str | None, typer.Option(help="cuda-amd64, cuda-arm64 or rocm-amd64; default: this machine's.")
]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the environment.")]
Platform = Annotated[str | None, typer.Option(help="cuda-amd64 or cuda-arm64; default: this machine's.")]


def build(
    stack: StackName = None,
    platform: ImagePlatform = None,
    engine: Annotated[
        str | None, typer.Option(help="docker, buildah or podman; default: the first that works.")
    ] = None,
    tag: Annotated[
        str | None, typer.Option(help="Name of the image; default: localhost/rlk-repro:STACK-PLATFORM.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(metavar="NAME@DIGEST", help="Build on this image, not on the stack's base.")
    ] = None,
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command line; run nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Build a stack's image from this checkout; no GPU is needed."""
    from rlk_repro.images.build import make_build, run_build
    from rlk_repro.images.stacks import get_stack

    made = make_build(get_stack(stack), platform, engine=engine, tag=tag, base=base)  # type: ignore[arg-type]
    if not is_dry_run:
        run_build(made)
    built = {"argv": made.argv, "tag": made.tag, "is_built": not is_dry_run}
    say_answer(built, str(made) if is_dry_run else f"built {made.tag}", as_json=as_json)


def create(
    folder: Folder,
    stack: StackName = None,
    platform: Platform = None,
    bundle: Annotated[
        Path | None,
        typer.Option("--from", metavar="FOLDER", help="Unpack the environment that env export wrote."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a stack's environment from lock file and commits; a repeated call resumes the work. No GPU is needed."""
    from rlk_repro.base.errors import Problem, SpecError
    from rlk_repro.images import environment, packed
    from rlk_repro.images.stacks import get_stack

    if bundle is None:
        environment.create(get_stack(stack), platform, folder)
    elif stack or platform:
        raise SpecError(Problem("--stack, --platform", "are not for --from: one environment is packed in the folder"))
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
    target: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="New folder for the archives.")],
    reuse_torch: Annotated[
        bool, typer.Option("--reuse-torch", help="Leave out torch and NVIDIA's libraries: the host has the same.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Pack an environment into a folder, for `env create --from` on a host without a network."""
    from rlk_repro.images import packed

    packed.export(folder.absolute(), target.absolute(), reuse_torch=reuse_torch)
    _answer(target, "check the folder anywhere with sha256sum -c SHA256SUMS", as_json)


def _answer(folder: Path, words: str, as_json: bool, *, is_ok: bool = True) -> None:
    say_answer({"folder": folder, "is_ok": is_ok}, f"{folder}: {words}", as_json=as_json)
