"""Read a run directory in the cluster with commands in a pod."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from rlk_repro.base import proc
from rlk_repro.base.console import Tell
from rlk_repro.base.disk import open_stream
from rlk_repro.base.errors import BundleUnreadable, CheckFailed, EnvironmentMissing, Problem, SchedulerRefused
from rlk_repro.base.files import dump_json, write_text
from rlk_repro.clusters.k8s import kubectl
from rlk_repro.clusters.k8s.facts import BUNDLE, Facts, make_log_name, unwrap_block
from rlk_repro.clusters.k8s.kubectl import Target, Unreachable
from rlk_repro.clusters.k8s.naming import COLLECTOR, CONTAINER
from rlk_repro.clusters.k8s.pods import kubernetes_settings, make_collector, pod_words
from rlk_repro.clusters.k8s.sent import Sent, find_objects
from rlk_repro.clusters.k8s.states import explain_pod, is_ready, judge, role_of
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir

START_TIMEOUT_S: Final = 600.0
POLL_S: Final = 1.0
LOG_BLOCK_BYTES: Final = 4 << 20


class LeaderEnded(Unreachable):
    """The leading pod ended while it sent the bundle; the volume for results, if there is one, still has the bundle."""


@dataclass(frozen=True, kw_only=True)
class Pod:
    place: Target
    name: str
    plan: Plan
    run_dir: RunDir

    def read_facts(self) -> Facts | None:
        return parse_facts(self.show())

    def show(self) -> proc.Completed:
        return self._run("show")

    def read_block(self, what: str, offset: int, size: int) -> bytes | None:
        """Read a block of the bundle or of a log; None if the block arrived incomplete."""
        done = self._run("block", what, str(offset), str(size), is_binary=True)
        return unwrap_block(done.data) if done.is_ok else None

    def ask_to_stop(self) -> proc.Completed:
        return self._run("stop")

    def _run(self, verb: str, *words: str, is_binary: bool = False) -> proc.Completed:
        command = pod_words(self.plan, verb, self.run_dir, *words)
        return self.place.run("exec", self.name, f"--container={CONTAINER}", "--", *command, is_binary=is_binary)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The pod that has the bundle; ``leads`` is None for a collector pod."""

    pod: Pod
    facts: Facts
    leads: Sent | None = None

    def ask_bundle(self, offset: int, size: int) -> bytes | None:
        data = self.pod.read_block(BUNDLE, offset, size)
        if data is None and self._has_ended():
            raise LeaderEnded(Problem("kubernetes", f"pod {self.pod.name} ended during the transfer of the bundle"))
        return data

    def _has_ended(self) -> bool:
        with suppress(SchedulerRefused, EnvironmentMissing):
            return self.leads is not None and find_leader(self.leads) != self.pod.name
        return False


def parse_facts(done: proc.Completed) -> Facts | None:
    if not done.is_ok:
        return None
    try:
        return Facts.from_json(json.loads(done.stdout))
    except (ValueError, BundleUnreadable):
        return None


def find_leader(sent: Sent) -> str:
    """Return the name of the running leading pod, or an empty string."""
    found = find_objects(sent)
    return "" if found.job is None else judge(found.job, found.pods).leader


@contextmanager
def find_holder(sent: Sent, run_dir: RunDir, tell: Tell) -> Iterator[Holder]:
    """Yield the leading pod if it runs and has a bundle; otherwise start a collector pod for the ``with`` block.

    Raises:
        CheckFailed: the results are lost, or the collector does not start.
    """
    plan = Plan.load(run_dir.plan)
    leader = find_leader(sent)
    if leader:
        pod = Pod(place=sent.place, name=leader, plan=plan, run_dir=run_dir)
        facts = pod.read_facts()
        if facts is not None and facts.bundle_bytes is not None:
            yield Holder(pod=pod, facts=facts, leads=sent)
            return
    claim = kubernetes_settings(plan).results.claim
    if claim is None:
        what = "the results are lost: they were in the leading pod, which no longer exists"
        raise CheckFailed(Problem(run_dir.run_id, what, hint="set kubernetes.results.claim for the next run"))
    collector = Pod(place=sent.place, name=_start_collector(sent, plan, run_dir), plan=plan, run_dir=run_dir)
    tell(f"waiting for pod {collector.name}, which reads claim {claim}")
    try:
        holder = Holder(pod=collector, facts=_wait_for_collector(collector, tell))
    except CheckFailed:
        _remove(collector)
        raise
    yield holder  # after an interruption the pod stays, and the next collection uses it
    _remove(collector)


def mirror_logs(pod: Pod, facts: Facts, live: RunDir) -> None:
    """Copy new lines of the trials' logs; copy nothing if the pod does not answer."""
    planned = {trial.name for trial in pod.plan.trials}
    for trial in facts.trials:
        if trial.name not in planned:
            continue
        _copy_log(pod, trial.name, trial.size_bytes, live)
        folder = live.trial(trial.name)
        if trial.has_ended and not folder.exit.exists():
            write_text(folder.exit, "{}\n")


def _copy_log(pod: Pod, trial: str, size_bytes: int, live: RunDir) -> None:
    path = live.trial(trial).stdout
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_stream(path, "ab") as stream:
        while (offset := stream.tell()) < size_bytes:
            data = pod.read_block(make_log_name(trial), offset, min(LOG_BLOCK_BYTES, size_bytes - offset))
            if not data:
                return
            stream.write(data)
            stream.flush()


def _remove(pod: Pod) -> None:
    with suppress(SchedulerRefused, EnvironmentMissing):
        pod.place.run("delete", "pod", pod.name, "--ignore-not-found", "--wait=false")


def _start_collector(sent: Sent, plan: Plan, run_dir: RunDir) -> str:
    """Start the collector pod and return its name; reuse the running pod of an interrupted collection."""
    pod = make_collector(plan, run_dir)
    name = str(pod["metadata"]["name"])
    earlier = next((item for item in find_objects(sent).pods if role_of(item) == COLLECTOR), None)
    if earlier is not None:
        if is_ready(earlier):
            return name
        sent.place.run("delete", "pod", name, "--ignore-not-found")
    kubectl.require(sent.place.send("create", dump_json(pod)))
    return name


def _wait_for_collector(pod: Pod, tell: Tell) -> Facts:
    run_id, until = pod.run_dir.run_id, time.monotonic() + START_TIMEOUT_S
    reason, told = "", set[str]()
    while time.monotonic() < until:
        items = pod.place.get("pod", pod.name)
        if not items:
            raise CheckFailed(Problem(run_id, f"pod {pod.name} was deleted", hint="collect again"))
        reason = "; ".join(explain_pod(items[0]))
        phase = items[0].get("status", {}).get("phase")
        if phase == "Pending" and reason and reason not in told:
            tell(f"pod {pod.name} waits: {reason}")
            told.add(reason)
        if is_ready(items[0]):
            done = pod.show()
            facts = parse_facts(done)
            if facts is None:
                reason = kubectl.quote_words(done)
            elif facts.failure:
                raise CheckFailed(Problem(run_id, "cannot be packed in the cluster", got=facts.failure,
                                          hint="free space on the volume claim, then collect again"))  # fmt: skip
            elif facts.bundle_bytes is not None:
                return facts
        if phase in {"Failed", "Succeeded"}:
            break
        time.sleep(POLL_S)
    raise CheckFailed(Problem(run_id, f"pod {pod.name} offers no bundle ({reason or 'it gives no reason'})",
                              hint=f"kubectl describe pod {pod.name}, then collect again"))  # fmt: skip
