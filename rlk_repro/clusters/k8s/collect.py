"""Bring a run's bundle from its claim: a small pod packs the run there, and ``kubectl exec … tail`` copies it."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.console import Tell
from rlk_repro.base.disk import open_stream, writing
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem, SchedulerRefused
from rlk_repro.base.files import dump_json, sha256_file
from rlk_repro.base.units import format_bytes
from rlk_repro.clusters.k8s import kubectl
from rlk_repro.clusters.k8s.kubectl import Target, Unreachable
from rlk_repro.clusters.k8s.naming import CONTAINER
from rlk_repro.clusters.k8s.pods import kubernetes_settings, make_collector, pod_run_dir
from rlk_repro.clusters.k8s.sent import Sent, find_objects
from rlk_repro.clusters.k8s.states import explain_pod, is_running, list_containers
from rlk_repro.clusters.k8s.tree import as_map
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir

START_TIMEOUT_S: Final = 600.0
POLL_S: Final = 1.0
CHUNK_BYTES: Final = 1 << 20
TELL_S: Final = 5.0
MAX_FAILURES: Final = 6
PAUSE_S: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class Packed:
    size_bytes: int
    sha256: str


def bring_bundle(sent: Sent, run_dir: RunDir, tell: Tell) -> None:
    """Pack the run on its claim, copy the bundle, and put its files in place of the staged ones.

    Raises:
        CheckFailed: the pod does not start, cannot pack the run, or the bundle arrived damaged.
        Unreachable: the connection was lost; the pod stays, and the next call copies the missing part.
    """
    plan = Plan.load(run_dir.plan)
    name = _start_pod(sent, plan, run_dir)
    tell(f"waiting for pod {name}, which packs the run on claim {kubernetes_settings(plan).results.claim}")
    try:
        packed = _wait_until_packed(sent.place, name, run_dir.run_id, tell)
        tell(f"copying {format_bytes(packed.size_bytes)} from pod {name}")
        source = f"{pod_run_dir(plan, run_dir)}/{run_dir.bundle.name}"
        copy_bundle(sent.place, name, source, run_dir, packed, tell)
    except CheckFailed:
        _remove(sent.place, name)
        raise
    _put_in_place(run_dir)
    _remove(sent.place, name)


def _start_pod(sent: Sent, plan: Plan, run_dir: RunDir) -> str:
    """Start the pod and return its name; the running pod of an interrupted collection is used again."""
    pod = make_collector(plan, run_dir)
    name = str(pod["metadata"]["name"])
    earlier = find_objects(sent).collector
    if is_running(earlier):
        return name
    if earlier is not None:
        sent.place.run("delete", "pod", name, "--ignore-not-found")
    kubectl.require(sent.place.send("create", dump_json(pod)))
    return name


def _wait_until_packed(place: Target, name: str, run_id: str, tell: Tell) -> Packed:
    """Wait until the pod has packed the run: its start has a time limit, the packing has none."""
    until, told = time.monotonic() + START_TIMEOUT_S, ""
    while True:
        items = place.get("pod", name)
        if not items:
            raise CheckFailed(Problem(run_id, f"pod {name} was deleted", hint="collect again"))
        if is_running(items[0]):
            return _read_packed(items[0], run_id)
        reason = "; ".join(explain_pod(items[0]))
        if as_map(items[0].get("status")).get("phase") in {"Failed", "Succeeded"}:
            words = kubectl.join_lines(place.run("logs", name, "--all-containers", "--tail=2").stdout)
            raise CheckFailed(Problem(run_id, f"pod {name} did not pack the run", got=words or reason))
        is_packing = any("running" in as_map(item.get("state")) for item in list_containers(items[0]))
        if not is_packing and time.monotonic() >= until:
            hint = f"kubectl describe pod {name}, then collect again"
            what = f"pod {name} did not start within {START_TIMEOUT_S:g} s"
            raise CheckFailed(Problem(run_id, what, got=reason or "no reason", hint=hint))
        if reason not in {"", told}:
            told = reason
            tell(f"pod {name} waits: {reason}")
        time.sleep(POLL_S)


def _read_packed(pod: Mapping[str, Any], run_id: str) -> Packed:
    ended = as_map(as_map(list_containers(pod)[0].get("state")).get("terminated"))
    try:
        value = json.loads(str(ended.get("message")))
        return Packed(size_bytes=int(value["bytes"]), sha256=str(value["sha256"]))
    except (ValueError, KeyError, TypeError):
        raise CheckFailed(Problem(run_id, "the pod does not say what it packed", got=ended.get("message"))) from None


def copy_bundle(place: Target, pod: str, source: str, run_dir: RunDir, packed: Packed, tell: Tell) -> None:
    part = run_dir.partial_bundle(packed.sha256)
    part.parent.mkdir(exist_ok=True)
    for other in part.parent.glob(run_dir.partial_bundle("*").name):
        if other != part:
            other.unlink()
    num_failures = 0
    while (before := part.stat().st_size if part.is_file() else 0) < packed.size_bytes:
        command = ("exec", pod, f"--container={CONTAINER}", "--", "tail", "-c", f"+{before + 1}", source)
        _append(place, command, part, packed.size_bytes, tell)
        num_failures = 0 if part.stat().st_size > before else num_failures + 1
        if num_failures == MAX_FAILURES:
            what = f"the connection was lost after {before} of {packed.size_bytes} bytes"
            raise Unreachable(Problem("kubernetes", what, hint="collect again to copy the missing bytes"))
        time.sleep(PAUSE_S * num_failures)
    found = sha256_file(part)
    if found != packed.sha256:
        part.unlink()
        what = "the bundle was damaged on the way"
        raise CheckFailed(Problem(run_dir.run_id, what, got=found, expected=packed.sha256, hint="collect again"))
    part.replace(run_dir.bundle)


def _append(place: Target, command: tuple[str, ...], part: Path, size_bytes: int, tell: Tell) -> None:
    told = time.monotonic()
    with writing(part), open_stream(part, "ab") as target, place.stream(*command) as source:
        while block := source.read(CHUNK_BYTES):
            target.write(block)
            if time.monotonic() - told >= TELL_S:
                told = time.monotonic()
                tell(f"{format_bytes(target.tell())} of {format_bytes(size_bytes)}")


def _put_in_place(run_dir: RunDir) -> None:
    from rlk_repro.bundle.seal import unpack

    with tempfile.TemporaryDirectory(dir=run_dir.root, prefix=".partial-") as folder:
        whole = unpack(run_dir.bundle, Path(folder) / "bundle")
        checksums = run_dir.checksums.name
        # the checksums come last: a folder that has them counts as complete
        for name in sorted((path.name for path in whole.root.iterdir()), key=lambda name: name == checksums):
            target = run_dir.root / name
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            (whole.root / name).replace(target)


def _remove(place: Target, name: str) -> None:
    with suppress(SchedulerRefused, EnvironmentMissing):
        place.run("delete", "pod", name, "--ignore-not-found", "--wait=false")
