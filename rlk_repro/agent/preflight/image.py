"""Check that the container of this node's agent is the stack's image, complete and unchanged."""

from __future__ import annotations

from pathlib import Path

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.findings import Finding
from rlk_repro.images.record import ImageRecord
from rlk_repro.images.running import ROOT, check_running, read_record
from rlk_repro.plan import Plan
from rlk_repro.rundir.manifest import Manifest


def check_image(plan: Plan, manifest: Manifest, root: Path = ROOT) -> list[Finding]:
    """Check the image; outside containers only the pins are checked, and without GPUs any image is allowed."""
    platform = plan.hardware.image_platform
    is_container = manifest.sections.get("container", {}).get("is_container") is True
    is_required = is_container and platform != "cpu" and platform in plan.stack.images
    return check_running(manifest.sections.get("code", {}), plan.stack, platform, root=root, is_required=is_required)


def find_record(root: Path = ROOT) -> ImageRecord | None:
    """The image's record; None where it cannot be trusted, and ``check_image`` says why."""
    try:
        record = read_record(root)
    except BundleUnreadable:
        return None
    return record if isinstance(record, ImageRecord) else None
