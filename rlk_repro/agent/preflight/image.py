"""Check that this node's agent runs in the stack's image, and that the image is complete and unchanged."""

from __future__ import annotations

from pathlib import Path

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.findings import Finding
from rlk_repro.images.record import ImageRecord
from rlk_repro.images.running import ROOT, check_running, read_record
from rlk_repro.plan import Plan
from rlk_repro.rundir.manifest import Manifest


def check_image(plan: Plan, manifest: Manifest, root: Path = ROOT) -> list[Finding]:
    """A run without GPUs may use any image or environment."""
    platform = plan.hardware.image_platform
    is_container = manifest.sections.get("container", {}).get("is_container") is True
    is_meant = platform in plan.stack.locks or (is_container and platform in plan.stack.images)
    is_required = is_meant and platform != "cpu"
    return check_running(manifest.sections.get("code", {}), plan.stack, platform, root=root, is_required=is_required)


def find_record(root: Path = ROOT) -> ImageRecord | None:
    """Return the image's record, or None if the record is missing or invalid; ``check_image`` reports why."""
    try:
        record = read_record(root)
    except BundleUnreadable:
        return None
    return record if isinstance(record, ImageRecord) else None
