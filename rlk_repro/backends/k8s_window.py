"""Looks into a run directory that lies in the cluster: through its leading pod, or through a small pod of ours."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from rlk_repro.backends import kubectl
from rlk_repro.backends.api import Submission
from rlk_repro.backends.k8s_objects import Sent, find_objects, read_sent
from rlk_repro.backends.k8s_states import explain_pod, is_ready, judge, role_of
from rlk_repro.backends.kubectl import Place, Unreachable
from rlk_repro.console import Tell
from rlk_repro.errors import BundleUnreadable, CheckFailed, EnvironmentMissing, Problem, SchedulerRefused
from rlk_repro.files import dump_json, write_text
from rlk_repro.k8s.naming import COLLECTOR
from rlk_repro.k8s.pods import kubernetes_settings
from rlk_repro.k8s.window import BUNDLE, FACTS, PORT, STOP, Facts, make_block_path, make_log_name, unwrap_block
from rlk_repro.plan import Plan
from rlk_repro.rundir import RunDir

START_TIMEOUT_S: Final = 600.0
POLL_S: Final = 1.0
LOG_BLOCK_BYTES: Final = 4 << 20


class LeaderEnded(Unreachable):
    """The leading pod went while it was asked; its bundle lies on the claim."""


@dataclass(frozen=True, kw_only=True)
class OpenWindow:
    """A pod that shows the bundle; ``leads`` is the job whose leading pod it is, if it is one."""

    place: Place
    pod: str
    facts: Facts
    leads: Sent | None = None

    def ask_bundle(self, offset: int, size: int) -> bytes | None:
        """Raises LeaderEnded where it makes no sense to ask again."""
        data = read_block(self.place, self.pod, make_block_path(BUNDLE, offset, size))
        if data is None and self._has_ended():
            raise LeaderEnded(Problem("kubernetes", f"pod {self.pod} ended while its bundle was fetched"))
        return data

    def _has_ended(self) -> bool:
        with suppress(SchedulerRefused, EnvironmentMissing):
            return self.leads is not None and find_leader(self.leads) != self.pod
        return False


def read_facts(place: Place, pod: str) -> Facts | None:
    """None where the pod does not answer, or not yet."""
    done = place.get_raw(place.proxy_path(pod, PORT, FACTS))
    if not done.is_ok:
        return None
    try:
        return Facts.from_json(json.loads(done.stdout))
    except (ValueError, BundleUnreadable):
        return None


def read_block(place: Place, pod: str, path: str) -> bytes | None:
    done = place.get_raw(place.proxy_path(pod, PORT, path), is_binary=True)
    return unwrap_block(done.data) if done.is_ok else None


def find_leader(sent: Sent) -> str:
    """The name of the leading pod, empty where none runs.

    Raises:
        Unreachable, SchedulerRefused: with kubectl's own words.
    """
    found = find_objects(sent)
    return "" if found.job is None else judge(found.job, found.pods).leader


def ask_to_stop(place: Place, pod: str) -> bool:
    """Whether the pod took the wish."""
    path = place.proxy_path(pod, PORT, STOP)
    return place.run("create", f"--raw={path}", "--filename=-", stdin=b"{}").is_ok


@contextmanager
def find_window(sent: Sent, run_dir: RunDir, tell: Tell) -> Iterator[OpenWindow]:
    """The leading pod where it still runs and has a bundle, else a collector pod for the time of the block.

    Raises:
        CheckFailed: no pod and no claim, so that nothing is left; or the collector does not come up.
        SchedulerRefused: the cluster refused.
    """
    leader = find_leader(sent)
    facts = read_facts(sent.place, leader) if leader else None
    if facts is not None and facts.bundle_bytes is not None:
        yield OpenWindow(place=sent.place, pod=leader, facts=facts, leads=sent)
        return
    plan = Plan.load(run_dir.plan)
    if kubernetes_settings(plan).results.claim is None:
        what = "its results were in its leading pod, which is gone"
        raise CheckFailed(Problem(run_dir.run_id, what, expected="kubernetes.results.claim for the next one"))
    pod = _start_collector(sent, plan, run_dir)
    tell(f"waiting for pod {pod}, which reads claim {kubernetes_settings(plan).results.claim}")
    try:
        window = _wait_for_collector(sent, pod, run_dir)
    except CheckFailed:
        _remove_pod(sent, pod)
        raise
    yield window  # a collection that is interrupted finds it again
    _remove_pod(sent, pod)


def _remove_pod(sent: Sent, pod: str) -> None:
    with suppress(SchedulerRefused, EnvironmentMissing):
        sent.place.run("delete", "pod", pod, "--ignore-not-found", "--wait=false")


class Mirror:
    """Copies what is new in the trials' logs to ``run_dir.live``."""

    def __init__(self, place: Place, run_dir: RunDir) -> None:
        self._place = place
        self._run_dir = run_dir

    def update(self, submission: Submission) -> None:
        """Until nothing new is there; a pod that does not answer has nothing new."""
        sent = read_sent(submission)
        if sent is None:
            return
        with suppress(SchedulerRefused, EnvironmentMissing):
            leader = find_leader(sent)
            facts = read_facts(sent.place, leader) if leader else None
            if facts is not None:
                for trial in facts.trials:
                    self._copy(leader, trial.name, trial.size_bytes)
                    folder = self._run_dir.live.trial(trial.name)
                    if trial.has_ended and not folder.exit.exists():
                        write_text(folder.exit, "{}\n")

    def _copy(self, pod: str, trial: str, size_bytes: int) -> None:
        path = self._run_dir.live.trial(trial).stdout
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as stream:
            while (offset := stream.tell()) < size_bytes:
                size = min(LOG_BLOCK_BYTES, size_bytes - offset)
                data = read_block(self._place, pod, make_block_path(make_log_name(trial), offset, size))
                if not data:
                    return
                stream.write(data)
                stream.flush()


def _start_collector(sent: Sent, plan: Plan, run_dir: RunDir) -> str:
    """Its name; one that an interrupted collection left is taken again where it still runs."""
    from rlk_repro.k8s import make_collector

    pod = make_collector(plan, run_dir)
    name = str(pod["metadata"]["name"])
    earlier = next((item for item in find_objects(sent).pods if role_of(item) == COLLECTOR), None)
    if earlier is not None:
        if is_ready(earlier):
            return name
        sent.place.run("delete", "pod", name, "--ignore-not-found")
    done = sent.place.send("create", dump_json(pod))
    if not done.is_ok:
        raise kubectl.explain(done)
    return name


def _wait_for_collector(sent: Sent, name: str, run_dir: RunDir) -> OpenWindow:
    until = time.monotonic() + START_TIMEOUT_S
    reason = ""
    while time.monotonic() < until:
        items = sent.place.get("pod", name)
        if not items:
            raise CheckFailed(Problem(run_dir.run_id, f"pod {name} was deleted", hint="collect again"))
        pod = items[0]
        reason = "; ".join(explain_pod(pod))
        if is_ready(pod):
            facts = read_facts(sent.place, name)
            if facts is not None and facts.failure:
                raise CheckFailed(Problem(run_dir.run_id, "cannot be packed in the cluster", got=facts.failure,
                                          hint="room on the results claim; then collect again"))  # fmt: skip
            if facts is not None and not facts.waits_for and facts.bundle_bytes is not None:
                return OpenWindow(place=sent.place, pod=name, facts=facts)
        if pod.get("status", {}).get("phase") in {"Failed", "Succeeded"}:
            break
        time.sleep(POLL_S)
    raise CheckFailed(Problem(run_dir.run_id, f"pod {name} shows no bundle ({reason or 'nothing said'})",
                              hint="kubectl describe pod, then collect again"))  # fmt: skip
