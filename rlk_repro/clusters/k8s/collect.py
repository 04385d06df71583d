"""Bring a run's bundle from its claim: in a small pod, ``kubectl exec`` packs the run and then prints the bundle."""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from rlk_repro.base.console import Tell
from rlk_repro.base.disk import open_stream
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem, SchedulerRefused
from rlk_repro.base.files import dump_json, sha256_file
from rlk_repro.clusters.k8s.kubectl import Target, Unreachable, quote_last_lines, require
from rlk_repro.clusters.k8s.naming import IN_AGENT, Sent, kubernetes_settings
from rlk_repro.clusters.k8s.pods import make_collector, pod_run_dir
from rlk_repro.clusters.k8s.states import explain_pod, has_begun, is_running
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir

START_TIMEOUT_S: Final = 600.0
PACK_TIMEOUT_S: Final = 7200.0
MAX_TRIES: Final = 6
PAUSE_S: Final = 1.5


def bring_bundle(sent: Sent, run_dir: RunDir, tell: Tell) -> None:
    """Pack the run on its claim, copy the bundle, and put its files in place of the staged ones."""
    plan, place = Plan.load(run_dir.plan), sent.place
    pod, settings = make_collector(plan, run_dir), kubernetes_settings(plan)
    name, folder = str(pod["metadata"]["name"]), pod_run_dir(plan, run_dir)
    in_pod = ("exec", name, IN_AGENT, "--")
    try:
        require(place.send("apply", dump_json(pod)))
        tell(f"waiting for pod {name}, which mounts claim {settings.results.claim}")
        _wait_for_pod(place, name, run_dir.run_id, tell)
        tell("packing the run on its claim")
        pack = (settings.python, "-P", "-m", "rlk_repro.job.pack", folder)
        done = place.run(*in_pod, *pack, timeout_s=PACK_TIMEOUT_S)
        if not done.is_ok and not done.is_outage:
            words = quote_last_lines(done.stderr)
            raise CheckFailed(Problem(run_dir.run_id, f"pod {name} did not pack the run", got=words))
        digest = require(done).stdout.split()[0]
        tell("copying the bundle")
        copy_bundle(place, (*in_pod, "cat", f"{folder}/{run_dir.bundle.name}"), run_dir, digest)
    finally:
        with suppress(SchedulerRefused, EnvironmentMissing):
            place.run("delete", "pod", name, "--ignore-not-found")
    _put_in_place(run_dir)


def _wait_for_pod(place: Target, name: str, run_id: str, tell: Tell) -> None:
    until, told = time.monotonic() + START_TIMEOUT_S, ""
    while True:
        items = place.get("pod", name)
        if items and is_running(items[0]):
            return
        reason = "; ".join(explain_pod(items[0])) if items else "it was deleted"
        if not items or has_begun(items[0]) or time.monotonic() >= until:
            what, hint = f"pod {name} does not run", f"collect again, or: kubectl describe pod {name}"
            raise CheckFailed(Problem(run_id, what, got=reason or "no reason", hint=hint))
        if reason not in {"", told}:
            told = reason
            tell(f"pod {name} waits: {reason}")
        time.sleep(PAUSE_S)


def copy_bundle(place: Target, source: tuple[str, ...], run_dir: RunDir, digest: str) -> None:
    """Copy what the command ``source`` prints; where a connection broke, begin again."""
    part, reason = run_dir.work / "bundle.part", ""
    part.parent.mkdir(exist_ok=True)
    for number in range(MAX_TRIES):
        time.sleep(PAUSE_S * number)
        reason = "it was damaged on the way"
        try:
            with open_stream(part, "wb") as file, place.stream(*source) as bundle:
                shutil.copyfileobj(bundle, file)
        except SchedulerRefused as error:
            reason = str(error)
        if sha256_file(part) == digest:
            part.replace(run_dir.bundle)
            return
    part.unlink(missing_ok=True)
    what = f"the bundle was not copied in {MAX_TRIES} tries: {reason}"
    raise Unreachable(Problem(run_dir.run_id, what, hint="collect again"))


def _put_in_place(run_dir: RunDir) -> None:
    from rlk_repro.bundle.verify import unpack

    with tempfile.TemporaryDirectory(dir=run_dir.root, prefix=".partial-") as folder:
        whole = unpack(run_dir.bundle, Path(folder) / "bundle")
        # the checksums come last: a folder that has them counts as complete
        for path in sorted(whole.root.iterdir(), key=lambda path: path.name == run_dir.checksums.name):
            target = run_dir.root / path.name
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            path.replace(target)
