"""Judge what this node runs: the image, its record and every difference, and the sources that a stack pins."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.findings import Finding, Level
from rlk_repro.images.match import (
    check_kernels,
    check_sources,
    differs,
    is_recorded,
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
from rlk_repro.sources import PINNED, SECTIONS
from rlk_repro.spec import Stack
from rlk_repro.spec.values import PinName

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
    return [*findings, *match_operators(record.gpu_platform, record.commits.get("rl_kernel", ""), answer)]


def match_image(plan: Plan, manifest: Manifest, root: Path = ROOT) -> list[Finding]:
    """Check that this node's agent runs in the stack's image, and that the image is complete and unchanged.

    A run without GPUs may use any image or environment.
    """
    platform = plan.hardware.image_platform
    is_container = manifest.sections.get("container", {}).get("is_container") is True
    is_meant = platform in plan.stack.locks or (is_container and platform in plan.stack.images)
    is_required = is_meant and platform != "cpu"
    return check_running(manifest.sections.get("code", {}), plan.stack, platform, root=root, is_required=is_required)


def load_record(root: Path = ROOT) -> ImageRecord | None:
    """Return the record of the image that this process runs in, or None if it is missing or invalid."""
    try:
        record = read_record(root)
    except BundleUnreadable:
        return None
    return record if isinstance(record, ImageRecord) else None


def find_pinned(plan: Plan) -> Stack:
    """Return the plan's stack without the pins of code that the run replaces by other commits or by checkouts."""
    is_other = bool(plan.routed) and not plan.needs_rl_kernel
    replaced = {source.pin for source in PINNED if source.variable in plan.switches}
    if plan.run.rl_kernel.commits is not None or is_other:
        replaced.add("rl_kernel")
    if not replaced:
        return plan.stack
    pins = {name: pin for name, pin in plan.stack.pins.items() if name not in replaced}
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
