"""Check that a node has the sources that the plan's stack pins."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.findings import Finding
from rlk_repro.images.match import differs, is_recorded
from rlk_repro.images.record import ImageRecord
from rlk_repro.images.running import ROOT, read_record
from rlk_repro.plan import Plan
from rlk_repro.rundir.manifest import Manifest, Unknown
from rlk_repro.sources import SECTIONS
from rlk_repro.spec import Stack
from rlk_repro.spec.values import PinName


def load_record(root: Path = ROOT) -> ImageRecord | None:
    """Return the record of the image that this process runs in, or None if it is missing or invalid."""
    try:
        record = read_record(root)
    except BundleUnreadable:
        return None
    return record if isinstance(record, ImageRecord) else None


def find_pinned(plan: Plan) -> Stack:
    """Return the plan's stack, without RL-Kernel's pin if another implementation or two commits of it run."""
    is_other = bool(plan.routed) and not plan.needs_rl_kernel
    if plan.run.rl_kernel.commits is None and not is_other:
        return plan.stack
    pins = {name: pin for name, pin in plan.stack.pins.items() if name != "rl_kernel"}
    return plan.stack.model_copy(update={"pins": pins})


def match_pins(
    stack: Stack, manifest: Manifest, image: ImageRecord | None = None, patched: Collection[PinName] = ()
) -> Iterator[Finding]:
    """Check that this node has the stack's pinned sources; those named in ``patched`` must also have upstream's patch.

    Sources without a known commit pass if their files have the hash of the pinned commit's files.  Changed sources pass
    if they equal the stack's patched files, or if the record of the node's image lists the same changes.
    """
    code = manifest.sections.get("code", {})
    for name, pin in stack.pins.items():
        where = f"code.{SECTIONS[name]}"
        facts = code.get(SECTIONS[name])
        source: dict[str, Any] = facts if isinstance(facts, dict) else {}
        commit, tree = (source.get(fact, Unknown("not recorded")) for fact in ("commit", "tree"))
        if name in patched and pin.patched_tree and tree == pin.tree:
            told = f"{pin.patched_tree} (with upstream's patch)"
            yield differs(f"{where}.tree", told, f"{tree} (without this patch)")
            continue
        if isinstance(commit, Unknown) and pin.tree and not isinstance(tree, Unknown):
            is_pinned = pin.holds_tree(tree)
            what, expected, found = "tree", _explain_pin(pin.tree, stack, pin.commit), str(tree)
        else:
            is_pinned = commit == pin.commit
            what, expected, found = "commit", _explain_pin(pin.commit, stack), str(commit)
        if not is_pinned:
            yield differs(f"{where}.{what}", expected, found)
        elif source.get("is_dirty") is True and not (
            tree == pin.patched_tree or is_recorded(image, SECTIONS[name], source)
        ):
            yield differs(f"{where}.is_dirty", f"{pin.commit} unchanged", "changed files")


def _explain_pin(expected: str, stack: Stack, commit: str = "") -> str:
    files = f" (the files of {commit[:12]})" if commit else ""
    return f"{expected}{files}, pinned by stack {stack.stack}; --stack host uses what is installed"
