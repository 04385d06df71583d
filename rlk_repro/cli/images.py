"""Define ``images list|pull|build|check|pin``: the container images of stacks."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlk_repro.cli.completion import StackName
from rlk_repro.cli.output import AsJson, note, say, say_answer, say_findings, say_json

if TYPE_CHECKING:
    from rlk_repro.base.findings import Finding

Platform = Annotated[str | None, typer.Option(help="cuda-amd64, cuda-arm64 or rocm-amd64; default: this machine's.")]
ExpectedStack = Annotated[str | None, typer.Option("--stack", help="Check the image against this stack.")]
RuntimeName = Annotated[
    str | None, typer.Option("--runtime", help="podman, docker, apptainer or enroot; default: the first installed.")
]


def list_(
    stacks: Annotated[
        list[str] | None, typer.Argument(metavar="[STACK]...", help="Stacks; default: all stacks.")
    ] = None,
    size: Annotated[bool, typer.Option("--size", help="Ask the registries for the images' sizes.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the images of stacks: digest, size, and whether the image is published."""
    from rlk_repro.base.units import format_bytes
    from rlk_repro.images.stacks import list_images

    rows = list_images(stacks or [], asks_registry=size)
    if as_json:
        say_json({"images": rows})
        return
    for row in rows:
        what = f"{row.reference}@{row.digest}  " if row.reference else ""
        known = f"{format_bytes(row.size_bytes)}  " if row.size_bytes is not None else ""
        say(f"{row.stack:<12} {row.platform:<11} {what}{known}{row.status}")


def pull(
    stack: StackName = None,
    platform: Platform = None,
    runtime: RuntimeName = None,
    image_dir: Annotated[
        Path | None, typer.Option(help="Shared folder, as in the profile's container.image_dir.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a stack's image by digest and check it; a repeated call continues a pull that was cut off."""
    from rlk_repro.base.errors import Problem, SpecError
    from rlk_repro.images.importing import is_imported
    from rlk_repro.images.runtimes import check_in_runtime, find_runtime, pull_image
    from rlk_repro.images.stacks import get_image, get_stack

    known = get_stack(stack)
    chosen, image = get_image(known, platform)
    found = find_runtime(runtime)
    if is_imported(found.name) and image_dir is None:
        raise SpecError(Problem("--image-dir", "missing", expected=f"a folder for the images of {found.name}"))
    what = pull_image(image, chosen, found, image_dir)
    _report_running(what, found.name, check_in_runtime(what, found, known, chosen), as_json)


def build(
    stack: StackName = None,
    platform: Platform = None,
    engine: Annotated[
        str | None, typer.Option(help="docker, buildah or podman; default: the first that works.")
    ] = None,
    tag: Annotated[
        str | None, typer.Option(help="Name of the image; default: localhost/rlk-repro:STACK-PLATFORM.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(metavar="NAME@DIGEST", help="Build on this image, not on the stack's base.")
    ] = None,
    is_bake: Annotated[bool, typer.Option("--bake", help="Print the variables for docker-bake.hcl.")] = False,
    is_dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command line; run nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Build a stack's image from this checkout; no GPU is needed."""
    from rlk_repro.images.build import bake_variables, make_build, run_build
    from rlk_repro.images.stacks import get_stack

    if is_bake:
        for name, value in bake_variables(get_stack(stack), base).items():
            say(f"export {name}={shlex.quote(value)}")
        return
    made = make_build(get_stack(stack), platform, engine=engine, tag=tag, base=base)  # type: ignore[arg-type]
    if not is_dry_run:
        run_build(made)
    built = {"argv": made.argv, "tag": made.tag, "is_built": not is_dry_run}
    say_answer(built, str(made) if is_dry_run else f"built {made.tag}", as_json=as_json)


def check(
    image: Annotated[str, typer.Argument(metavar="REF", help="An image in a runtime.")],
    stack: ExpectedStack = None,
    platform: Platform = None,
    runtime: RuntimeName = None,
    as_json: AsJson = False,
) -> None:
    """Check the content of an image in a container runtime; no GPU is needed."""
    from rlk_repro.base.errors import Problem, SpecError
    from rlk_repro.images.runtimes import check_in_runtime, find_runtime
    from rlk_repro.images.stacks import get_stack

    known = None if stack is None else get_stack(stack)
    if runtime is None and Path(image).exists():
        hint = f"skopeo copy oci-archive:{image} containers-storage:localhost/image; then check localhost/image"
        raise SpecError(Problem(image, "is a file, and version 0.3 reads no archives of images", hint=hint))
    found = find_runtime(runtime)
    _report_running(image, found.name, check_in_runtime(image, found, known, platform), as_json)


def pin(
    stack: Annotated[str, typer.Argument(metavar="STACK", help="A stack's name or file.")],
    refs: Annotated[
        list[str] | None, typer.Option("--ref", metavar="PIN=REF", help="Resolve a pin again, such as vime=main.")
    ] = None,
    images: Annotated[
        list[str] | None, typer.Option("--image", metavar="PLATFORM=NAME@DIGEST", help="Record a published image.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the updated stack to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Resolve a stack's tags and refs and print the difference; without -o nothing is written."""
    from rlk_repro.base.files import write_text
    from rlk_repro.base.resources import display_name, find_yaml, stack_folders
    from rlk_repro.images.pin import diff, renew
    from rlk_repro.spec.load import load_stack

    path = find_yaml("stack", stack, stack_folders())
    before = path.read_text()
    known = load_stack(stack).model
    after = renew(before, known, _pairs("--ref", refs), _pairs("--image", images))
    lines = list(diff(before, after, display_name(path)))
    if output is not None:
        write_text(output, after)
    pinned = {"stack": known.stack, "is_changed": bool(lines), "diff": lines}
    say_answer(pinned, *(lines or [f"stack {known.stack}: no pin has changed"]), as_json=as_json)
    if lines and output is None and not as_json:
        note(f"review the difference, then write the updated stack: -o {display_name(path)}")


def _pairs(option: str, given: list[str] | None) -> dict[str, str]:
    from rlk_repro.base.errors import Problem, SpecError

    pairs = {}
    for text in given or []:
        name, is_pair, value = text.partition("=")
        if not is_pair or not name or not value:
            raise SpecError(Problem(option, "is not a pair", got=text, expected="NAME=VALUE"))
        pairs[name] = value
    return pairs


def _report_running(image: str, runtime: str, findings: list[Finding], as_json: bool) -> None:
    from rlk_repro.base.findings import has_blocking

    is_ok = not has_blocking(findings)
    if as_json:
        say_json({"image": image, "runtime": runtime, "is_ok": is_ok, "findings": findings})
    else:
        say_findings(findings)
        say(f"{image}: {'matches its record' if is_ok else 'must not be used'}")
    if not is_ok:
        raise typer.Exit(1)
