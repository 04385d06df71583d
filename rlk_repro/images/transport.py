"""Export and import images for sites without a network; an export is an OCI layout and a file for ``sha256sum -c``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem, SpecError
from rlk_repro.base.files import sha256_file, write_bytes
from rlk_repro.base.findings import Finding, has_blocking
from rlk_repro.bundle.checksums import diff_checksums, parse_checksums, render_checksums
from rlk_repro.images.archive_check import ArchiveChecked, check_archive
from rlk_repro.images.registry import copy_image
from rlk_repro.spec import Image, Stack

CHECKSUMS: Final = "SHA256SUMS"
_TARGETS: Final = ("docker://", "docker-daemon:", "containers-storage:", "oci:")


def export_image(image: Image, folder: Path, stack: Stack, platform: str) -> ArchiveChecked:
    """Copy a published image into a new folder, check it there, and write the checksums last."""
    if (folder / CHECKSUMS).exists():
        raise SpecError(Problem(str(folder), "holds a finished export already", expected="a new folder"))
    copy_image(f"docker://{image.pinned}", f"oci:{folder}:{platform}")
    checked = check_archive(folder, stack, platform)
    _require(folder, checked.findings)
    if checked.digest != image.digest:
        raise CheckFailed(
            Problem(str(folder), "holds an image other than the stack's", got=checked.digest, expected=image.digest)
        )
    write_checksums(folder)
    return checked


def import_image(folder: Path, target: str, stack: Stack | None = None, platform: str | None = None) -> ArchiveChecked:
    """Check an exported image by its checksums and digests, then copy it to ``target`` (skopeo's notation)."""
    if not target.startswith(_TARGETS):
        expected = "docker://REGISTRY/NAME, docker-daemon:NAME:TAG or containers-storage:NAME"
        raise SpecError(Problem("--to", "is not a place to copy images to", got=target, expected=expected))
    _require(folder, _check_sums(folder))
    checked = check_archive(folder, stack, platform)
    _require(folder, checked.findings)
    copy_image(f"oci:{folder}", target)
    return checked


def write_checksums(folder: Path) -> None:
    write_bytes(folder / CHECKSUMS, render_checksums(_hash_files(folder)))


def _check_sums(folder: Path) -> list[Finding]:
    try:
        listed, findings = parse_checksums((folder / CHECKSUMS).read_bytes())
    except OSError as error:
        hint = "name the folder that `rlk-repro images export` wrote"
        raise EnvironmentMissing(
            Problem(str(folder / CHECKSUMS), f"cannot be read ({error.strerror})", hint=hint)
        ) from None
    return [*findings, *diff_checksums(listed, _hash_files(folder))]


def _hash_files(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in files}


def _require(where: Path, findings: Sequence[Finding]) -> None:
    if has_blocking(findings):
        raise CheckFailed(*(Problem(f"{where}: {item.where}", "differs", got=item.found,
                                    expected=item.expected) for item in findings))  # fmt: skip
