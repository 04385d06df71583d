"""List the images of stacks: which images exist, and how to build the missing images."""

from __future__ import annotations

import platform as machine
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.base.resources import list_names, stack_folders
from rlk_repro.images.registry import ask_size
from rlk_repro.probes import gpu_amd
from rlk_repro.rundir.manifest import Unknown
from rlk_repro.spec import Image, ImagePlatform, Stack
from rlk_repro.spec.load import load_stack
from rlk_repro.spec.stack import Unpublished

AMD_DRIVER: Final = Path(gpu_amd.KFD)
NOWHERE: Final = ".example"
"""Ending of host names that never exist (RFC 2606)."""
BUILD_COST: Final = "13 min of compiling on 2 cores, and a base image of tens of GB"
"""The time to compile was measured (docs/images.md); the size of the base image was not."""
LOCKED_BUILD_COST: Final = "5 GB of packages, and an hour of compiling on 2 cores"


@dataclass(frozen=True, kw_only=True)
class StackRow:
    """One image of one stack; ``size_bytes`` is None if no registry was asked."""

    stack: str
    platform: str
    reference: str | None
    digest: str | None
    size_bytes: int | None
    status: str


def get_stack(name: str | None) -> Stack:
    """Return a stack by name or file; for None, the newest that has, or will have, an image for this machine."""
    if name is not None:
        return load_stack(name).model
    # a stack with a suffix, such as another commit of RL-Kernel, comes after the stack of the same month
    names = sorted(list_names(stack_folders()), key=lambda found: (found[:7], -len(found)), reverse=True)
    stacks = (get_stack(found) for found in names)
    return next(
        stack
        for stack in stacks
        if find_platform() in list_platforms(stack) and not any(map(_is_example, stack.images.values()))
    )


def find_platform() -> ImagePlatform:
    """Return this machine's platform; it depends on the processor and on whether AMD's GPU driver is loaded."""
    if machine.machine() == "aarch64":
        return "cuda-arm64"
    return "rocm-amd64" if AMD_DRIVER.exists() else "cuda-amd64"


def choose_platform(stack: Stack, names: Sequence[ImagePlatform], platform: str | None, what: str) -> ImagePlatform:
    """Return the named platform, or else the only platform, or else this machine's platform."""
    chosen = names[0] if platform is None and len(names) == 1 else platform or find_platform()
    for name in names:
        if name == chosen:
            return name
    expected = " or ".join(f"--platform {name}" for name in names) or f"a stack with {what}s"
    raise SpecError(Problem(f"stack {stack.stack}", f"has no {what} for this platform", got=chosen, expected=expected))


def list_platforms(stack: Stack) -> list[ImagePlatform]:
    """List the platforms for which the stack has an image, or plans one."""
    return list(dict.fromkeys([*stack.images, *stack.unpublished, *stack.locks]))


def _is_example(image: Image) -> bool:
    return image.reference.partition("/")[0].endswith(NOWHERE)


def list_images(names: list[str], *, asks_registry: bool) -> list[StackRow]:
    stacks = [get_stack(name) for name in names or list_names(stack_folders())]
    return [row for stack in stacks for row in _rows(stack, asks_registry=asks_registry)]


def _rows(stack: Stack, *, asks_registry: bool) -> Iterator[StackRow]:
    for platform, image in stack.images.items():
        is_example = _is_example(image)
        size = ask_size(image.pinned) if asks_registry and not is_example else None
        status = "an example; its registry does not exist" if is_example else "published"
        status = f"not available: {size.reason}" if isinstance(size, Unknown) else status
        yield StackRow(stack=stack.stack, platform=platform, reference=image.reference, digest=image.digest,
                  size_bytes=size if isinstance(size, int) else None, status=status)  # fmt: skip
    for platform, missing in find_unpublished(stack).items():
        yield StackRow(stack=stack.stack, platform=platform, reference=None, digest=None, size_bytes=None,
                  status=f"not published ({missing.reason}); {missing.build}")  # fmt: skip


def get_image(stack: Stack, platform: str | None) -> tuple[ImagePlatform, Image]:
    """Return the published image for the named platform, or else for this machine."""
    chosen = choose_platform(stack, list_platforms(stack), platform, "image")
    if chosen in stack.images:
        return chosen, stack.images[chosen]
    missing = find_unpublished(stack)[chosen]
    where = f"stack {stack.stack}: {chosen}"
    cost = LOCKED_BUILD_COST if chosen in stack.locks else BUILD_COST
    hint = f"{missing.build}  # {cost}; the git tag images-{stack.stack} starts the workflow that publishes the image"
    raise SpecError(Problem(where, f"its image is not published ({missing.reason})", hint=hint))


def find_unpublished(stack: Stack) -> dict[ImagePlatform, Unpublished]:
    """Return the images that the stack only plans.  An image of a locked stack can be built on any machine."""
    build = f"rlk-repro images build --stack {stack.stack} --platform"
    reason = f"no registry serves the image; without a container: rlk-repro env create DIR --stack {stack.stack}"
    locked: dict[ImagePlatform, Unpublished] = {
        platform: Unpublished(build=f"{build} {platform}", reason=reason)
        for platform in stack.locks
        if platform not in stack.images
    }
    return locked | stack.unpublished
