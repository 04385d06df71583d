"""Import an image as a file, for the runtimes that store images as files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rlk_repro.spec import OCI_ARCHITECTURES, Image

_DOCKER_HUB: Final = "registry-1.docker.io"
_HUB_NAMES: Final = frozenset({"docker.io", "index.docker.io", _DOCKER_HUB})


@dataclass(frozen=True, kw_only=True)
class Import:
    """The commands that store an image as a file: ``command FILE uri`` writes it, and ``check FILE`` reads it."""

    file: str
    command: tuple[str, ...]
    check: tuple[str, ...]
    uri: str


def is_imported(runtime: str) -> bool:
    """Whether the user must first import an image to a file, which the runtime then starts."""
    return runtime in _IMPORTS


def plan_import(runtime: str, image: Image, machine: str, folder: str) -> Import | None:
    """Return the commands that import an image to a file named by digest and processor; None if no file is needed."""
    make = _IMPORTS.get(runtime)
    if make is None:
        return None
    stem = f"{folder.rstrip('/')}/{image.digest.removeprefix('sha256:')}"
    if machine == "any":
        return make(image, (), stem)
    return make(image, (machine,), f"{stem}-{machine}")


def _enroot_import(image: Image, machines: Sequence[str], stem: str) -> Import:
    # enroot 3 accepts a digest only in the place of a tag.
    registry, repository = _split_reference(image.reference)
    arch = [f"--arch={machine}" for machine in machines]
    return Import(
        file=f"{stem}.sqsh",
        command=("enroot", "import", *arch, "--output"),
        check=("unsquashfs", "-l"),
        uri=f"docker://{registry}#{repository}:{image.digest}",
    )


def _apptainer_pull(image: Image, machines: Sequence[str], stem: str) -> Import:
    arch = [f"--arch={OCI_ARCHITECTURES[machine]}" for machine in machines]
    return Import(
        file=f"{stem}.sif",
        command=("apptainer", "pull", *arch),
        check=("apptainer", "inspect"),
        uri=f"docker://{image.pinned}",
    )


_IMPORTS: Final[Mapping[str, Callable[[Image, Sequence[str], str], Import]]] = {
    "pyxis": _enroot_import,
    "enroot": _enroot_import,
    "apptainer": _apptainer_pull,
}


def _split_reference(reference: str) -> tuple[str, str]:
    first, _, rest = reference.partition("/")
    if not rest or not ("." in first or ":" in first or first == "localhost"):
        first, rest = _DOCKER_HUB, reference
    if first in _HUB_NAMES:
        first, rest = _DOCKER_HUB, rest if "/" in rest else f"library/{rest}"
    return first, rest
