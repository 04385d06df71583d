"""Bring a run's bundle from its claim: a small pod packs the run there, and ``kubectl exec … tail`` copies it."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from rlk_repro.base.console import Tell
from rlk_repro.base.disk import open_stream, writing
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem, SchedulerRefused
from rlk_repro.base.files import dump_json, sha256_file
from rlk_repro.base.units import format_bytes
from rlk_repro.clusters.k8s.kubectl import Target, Unreachable, quote_last_lines, require
from rlk_repro.clusters.k8s.naming import IN_AGENT
from rlk_repro.clusters.k8s.pods import kubernetes_settings, make_collector, pod_run_dir
from rlk_repro.clusters.k8s.sent import Sent, find_objects
from rlk_repro.clusters.k8s.states import explain_pod, is_running, list_containers, read_messages
from rlk_repro.clusters.k8s.tree import as_map
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir

START_TIMEOUT_S: Final = 600.0
POLL_S: Final = 1.0
CHUNK_BYTES: Final = 1 << 20
MAX_FAILURES: Final = 6
PAUSE_S: Final = 2.0


def bring_bundle(sent: Sent, run_dir: RunDir, tell: Tell) -> None:
    """Pack the run on its claim, copy the bundle, and put its files in place of the staged ones.

    Raises:
        CheckFailed: the pod does not start, cannot pack the run, or the bundle arrived damaged.
        Unreachable: the connection was lost; the pod stays, and the next call copies the missing part.
    """
    plan = Plan.load(run_dir.plan)
    pod = make_collector(plan, run_dir)
    name = str(pod["metadata"]["name"])
    earlier = find_objects(sent).collector
    if not is_running(earlier):  # otherwise it is the pod of an interrupted collection
        if earlier is not None:
            sent.place.run("delete", "pod", name, "--ignore-not-found")
        require(sent.place.send("create", dump_json(pod)))
    tell(f"waiting for pod {name}, which packs the run on claim {kubernetes_settings(plan).results.claim}")
    try:
        size_bytes, digest = _wait_until_packed(sent.place, name, run_dir.run_id, tell)
        source = ("exec", name, IN_AGENT, "--", "tail", f"{pod_run_dir(plan, run_dir)}/{run_dir.bundle.name}", "-c")
        copy_bundle(sent.place, source, run_dir, size_bytes, digest, tell)
    except CheckFailed:
        _remove(sent.place, name)
        raise
    _put_in_place(run_dir)
    _remove(sent.place, name)


def _wait_until_packed(place: Target, name: str, run_id: str, tell: Tell) -> tuple[int, str]:
    """Return size and checksum of the bundle; the pod's start has a time limit, the packing has none."""
    until, told = time.monotonic() + START_TIMEOUT_S, ""
    while True:
        items = place.get("pod", name)
        if not items:
            raise CheckFailed(Problem(run_id, f"pod {name} was deleted", hint="collect again"))
        if is_running(items[0]):
            value = json.loads(read_messages(items[0])[0])
            return int(value["bytes"]), str(value["sha256"])
        reason = "; ".join(explain_pod(items[0]))
        if as_map(items[0].get("status")).get("phase") in {"Failed", "Succeeded"}:
            words = quote_last_lines(place.run("logs", name, "--all-containers", "--tail=2").stdout)
            raise CheckFailed(Problem(run_id, f"pod {name} did not pack the run", got=words or reason))
        is_packing = any("running" in as_map(item.get("state")) for item in list_containers(items[0]))
        if not is_packing and time.monotonic() >= until:
            what, hint = f"pod {name} did not start within {START_TIMEOUT_S:g} s", f"kubectl describe pod {name}"
            raise CheckFailed(Problem(run_id, what, got=reason or "no reason", hint=hint))
        if reason not in {"", told}:
            told = reason
            tell(f"pod {name} waits: {reason}")
        time.sleep(POLL_S)


def copy_bundle(
    place: Target, source: tuple[str, ...], run_dir: RunDir, size_bytes: int, digest: str, tell: Tell
) -> None:
    """Copy the bundle by the command ``source``, which wants the number of the first byte; go on where a call broke."""
    part = run_dir.partial_bundle(digest)
    part.parent.mkdir(exist_ok=True)
    for other in part.parent.glob(run_dir.partial_bundle("*").name):
        if other != part:
            other.unlink()
    num_failures = 0
    while (before := part.stat().st_size if part.is_file() else 0) < size_bytes:
        tell(f"copying {format_bytes(size_bytes - before)}")
        reason = "nothing came"
        try:
            with writing(part), open_stream(part, "ab") as target, place.stream(*source, f"+{before + 1}") as stream:
                shutil.copyfileobj(stream, target, CHUNK_BYTES)
        except SchedulerRefused as error:
            reason = str(error)
        num_failures = 0 if part.stat().st_size > before else num_failures + 1
        if num_failures == MAX_FAILURES:
            what = f"the connection was lost after {before} of {size_bytes} bytes ({reason})"
            raise Unreachable(Problem("kubernetes", what, hint="collect again to copy the missing bytes"))
        time.sleep(PAUSE_S * num_failures)
    found = sha256_file(part)
    if found != digest:
        part.unlink()
        what = "the bundle was damaged on the way"
        raise CheckFailed(Problem(run_dir.run_id, what, got=found, expected=digest, hint="collect again"))
    part.replace(run_dir.bundle)


def _put_in_place(run_dir: RunDir) -> None:
    from rlk_repro.bundle.seal import unpack

    with tempfile.TemporaryDirectory(dir=run_dir.root, prefix=".partial-") as folder:
        whole = unpack(run_dir.bundle, Path(folder) / "bundle")
        # the checksums come last: a folder that has them counts as complete
        for path in sorted(whole.root.iterdir(), key=lambda path: path.name == run_dir.checksums.name):
            target = run_dir.root / path.name
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            path.replace(target)


def _remove(place: Target, name: str) -> None:
    with suppress(SchedulerRefused, EnvironmentMissing):
        place.run("delete", "pod", name, "--ignore-not-found", "--wait=false")
