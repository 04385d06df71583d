"""Judge the image that this process runs in: its record, and each difference between record and container."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.findings import Finding, Level
from rlk_repro.images.match import (
    check_kernels,
    check_sources,
    match_operators,
    match_running,
    match_stack,
    missing_record,
)
from rlk_repro.images.record import ImageRecord, parse_record
from rlk_repro.images.resolve import ask_registry
from rlk_repro.plan import Plan
from rlk_repro.probes.container import find_record
from rlk_repro.probes.sources import locate
from rlk_repro.rundir.manifest import Manifest, Section, Unknown
from rlk_repro.spec import Stack

ROOT: Final = Path("/")


def read_record(root: Path = ROOT) -> ImageRecord | Unknown:
    """Read the record of the image in which this process runs; return Unknown outside an image."""
    path = find_record(root)
    try:
        data = locate(root, path).read_bytes()
    except OSError as error:
        return Unknown(f"{path}: {str(error.strerror).lower()}")
    return parse_record(data, path)


def check_running(
    code: Section, stack: Stack | None, platform: str | None, *, root: Path = ROOT, is_required: bool = False
) -> list[Finding]:
    """Find every difference between this container, its record and the stack.

    A container without a record gives a finding only if ``is_required``.  ``code`` is the manifest's section ``code``.
    """
    try:
        record = read_record(root)
    except BundleUnreadable as error:
        return [missing_record(str(problem), find_record(root)) for problem in error.problems]
    if isinstance(record, Unknown):
        return [missing_record(record.reason, find_record(root))] if is_required else []
    findings = [*check_sources(record), *check_kernels(record), *match_running(record, code)]
    if stack is not None and (stack.images or stack.locks):
        findings += match_stack(record, stack, platform)
    answer = ask_registry()
    if isinstance(answer, Unknown):
        return [*findings, Finding(Level.BLOCKING, "rl_engine", "importable", answer.reason)]
    return [*findings, *match_operators(record, answer)]


def match_image(plan: Plan, manifest: Manifest, root: Path = ROOT) -> list[Finding]:
    """Check that this node's agent runs in the stack's image, and that the image is complete and unchanged.

    A run without GPUs may use any image or environment.
    """
    platform = plan.hardware.image_platform
    is_container = manifest.sections.get("container", {}).get("is_container") is True
    is_meant = platform in plan.stack.locks or (is_container and platform in plan.stack.images)
    is_required = is_meant and platform != "cpu"
    return check_running(manifest.sections.get("code", {}), plan.stack, platform, root=root, is_required=is_required)
