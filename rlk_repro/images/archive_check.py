"""Check an image saved as a file, without a container or a GPU: its digests, labels, record, kernels and stack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlk_repro.base.answer import Answer
from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.findings import Finding, Level, has_blocking
from rlk_repro.images.match import check_kernels, check_sources, match_labels, match_stack, missing_record
from rlk_repro.images.oci import FoundFile, OciImage, OciLayout, check_blobs, find_files, load_image, open_layout
from rlk_repro.images.record import ImageRecord, parse_record
from rlk_repro.probes.container import PROVENANCE
from rlk_repro.spec import Stack

_RECORD = PROVENANCE.lstrip("/")
_VIME_HEAD = "vime/.git/HEAD"


@dataclass(frozen=True, kw_only=True)
class ArchiveChecked(Answer):
    """The result of checking a saved image; ``digest`` is the digest that a stack pins."""

    digest: str
    platform: str
    size_bytes: int
    stack: str | None
    commits: dict[str, Any] | None
    findings: tuple[Finding, ...]
    is_ok: bool


def check_archive(path: Path, stack: Stack | None = None, platform: str | None = None) -> ArchiveChecked:
    """Check an image layout; ``platform`` has the form ``cuda-arm64``."""
    layout = open_layout(path)
    image = load_image(layout, platform.rpartition("-")[2] if platform and "-" in platform else None)
    findings = list(check_blobs(layout, image))
    record = None
    if not findings:
        try:
            files = _find(layout, image)
            record = parse_record(files[_RECORD].data or b"") if _RECORD in files else None
        except BundleUnreadable as error:
            files = {}
            findings += [missing_record(str(problem)) for problem in error.problems]
        else:
            findings += _judge(image, record, files, stack, platform)
    return ArchiveChecked(
        digest=image.index_digest or image.digest,
        platform=image.platform,
        size_bytes=image.size_bytes,
        stack=record.stack if record else None,
        commits=dict(record.commits) if record else None,
        findings=tuple(findings),
        is_ok=not has_blocking(findings),
    )


def judge_record(
    record: ImageRecord, labels: Mapping[str, str], stack: Stack | None, platform: str | None
) -> Iterator[Finding]:
    yield from match_labels(record, labels)
    yield from check_sources(record)
    yield from check_kernels(record)
    if stack is not None:
        yield from match_stack(record, stack, platform)


def _judge(
    image: OciImage,
    record: ImageRecord | None,
    files: Mapping[str, FoundFile],
    stack: Stack | None,
    platform: str | None,
) -> Iterator[Finding]:
    if record is None:
        yield missing_record("no layer of the image has this file")
        return
    yield from judge_record(record, image.labels, stack, platform)
    machine = record.platform.rpartition("-")[2]
    if image.platform != f"linux/{machine}":
        yield Finding(Level.BLOCKING, "image.platform", f"linux/{machine} (from the image's record)", image.platform)
    yield from _match_files(record, files)


def _match_files(record: ImageRecord, files: Mapping[str, FoundFile]) -> Iterator[Finding]:
    kernels = record.code.get("rl_kernel")
    if isinstance(kernels, dict) and kernels.get("is_compiled") is True:
        found = [file.sha256 for path, file in files.items() if _is_extension(path)]
        expected = str(kernels.get("extension_sha256"))
        if found != [expected]:
            yield Finding(Level.BLOCKING, "rl_engine._C", f"sha256 {expected}", ", ".join(found) or "no such file")
    heads = {(file.data or b"").decode(errors="replace").strip() for path, file in files.items() if _is_head(path)}
    commit = record.commits.get("vime", "")
    if heads and heads != {commit}:
        yield Finding(Level.BLOCKING, "vime/.git/HEAD", commit, ", ".join(sorted(heads))[:100])


def _find(layout: OciLayout, image: OciImage) -> dict[str, FoundFile]:
    def is_enough(paths: set[str]) -> bool:
        return _RECORD in paths and any(map(_is_head, paths)) and any(map(_is_extension, paths))

    return find_files(layout, image, lambda path: path == _RECORD or _is_head(path) or _is_extension(path), is_enough)


def _is_extension(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return folder.endswith("/rl_engine") and name.startswith("_C") and name.endswith(".so")


def _is_head(path: str) -> bool:
    return path.endswith(_VIME_HEAD)
