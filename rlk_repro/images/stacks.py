"""Stacks by name for the commands about images: which of their images there are, and how to come by the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.base.resources import list_names, stack_folders
from rlk_repro.images.registry import ask_size
from rlk_repro.rundir.manifest import Unknown
from rlk_repro.spec import Image, ImagePlatform, Stack
from rlk_repro.spec.load import load_stack


@dataclass(frozen=True, kw_only=True)
class StackRow:
    """One image of one stack.  ``size_bytes`` is None where no registry was asked."""

    stack: str
    platform: str
    reference: str | None
    digest: str | None
    size_bytes: int | None
    status: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def get_stack(name: str) -> Stack:
    return load_stack(name, stack_folders()).model


def list_images(names: list[str], *, asks_registry: bool) -> list[StackRow]:
    """Of the named stacks, or of all of them."""
    stacks = [get_stack(name) for name in names or list_names(stack_folders())]
    return [row for stack in stacks for row in _rows(stack, asks_registry=asks_registry)]


def _rows(stack: Stack, *, asks_registry: bool) -> Iterator[StackRow]:
    for platform, image in stack.images.items():
        size = ask_size(f"{image.reference}@{image.digest}") if asks_registry else None
        status = f"not to be had: {size.reason}" if isinstance(size, Unknown) else "published"
        yield StackRow(stack=stack.stack, platform=platform, reference=image.reference, digest=image.digest,
                  size_bytes=size if isinstance(size, int) else None, status=status)  # fmt: skip
    for platform, missing in stack.unpublished.items():
        yield StackRow(stack=stack.stack, platform=platform, reference=None, digest=None, size_bytes=None,
                  status=f"not published ({missing.reason}); {missing.build}")  # fmt: skip


def get_image(stack: Stack, platform: str | None) -> tuple[ImagePlatform, Image]:
    """The published image of a platform; of several platforms, the one must be named.

    Raises:
        SpecError: not published, with the command that builds it; or none of this name.
    """
    names = list(dict.fromkeys([*stack.images, *stack.unpublished]))
    chosen = names[0] if platform is None and len(names) == 1 else platform
    where = f"stack {stack.stack}"
    if chosen is None or chosen not in names:
        raise SpecError(
            Problem(where, "which image?", got=chosen, expected=f"--platform {' or '.join(names) or '(none)'}")
        )
    for name, image in stack.images.items():
        if name == chosen:
            return name, image
    missing = next(item for name, item in stack.unpublished.items() if name == chosen)
    raise SpecError(Problem(f"{where}: {chosen}", f"its image is not published ({missing.reason})", hint=missing.build))
