"""Run on Kubernetes: send a RayJob or Job by ``kubectl``; only the pods see the run directory."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.clock import utc_now
from rlk_repro.base.console import Tell, silence
from rlk_repro.base.errors import BundleUnreadable, EnvironmentMissing, Problem, RlkReproError, SchedulerRefused
from rlk_repro.base.files import dump_json, load_json, write_json, write_text
from rlk_repro.base.findings import Finding
from rlk_repro.base.units import format_bytes
from rlk_repro.clusters.api import Bound, Job, JobState, JobStatus, Submission, TrialLine
from rlk_repro.clusters.asking import NO_REPORT, asked_rarely, describe_lost, join_words, require_ended, require_known
from rlk_repro.clusters.k8s import kubectl
from rlk_repro.clusters.k8s.facts import Facts
from rlk_repro.clusters.k8s.fetch import fetch_bundle, put_in_place
from rlk_repro.clusters.k8s.naming import OBJECTS
from rlk_repro.clusters.k8s.objects import dump_objects, render_objects, time_limit_min
from rlk_repro.clusters.k8s.overlay import find_remarks
from rlk_repro.clusters.k8s.pod_exec import LeaderEnded, Pod, find_holder, find_leader, mirror_logs
from rlk_repro.clusters.k8s.pods import kubernetes_settings
from rlk_repro.clusters.k8s.sent import Sent, delete_all, find_objects, read_sent, record_objects
from rlk_repro.clusters.k8s.states import Judged, judge
from rlk_repro.clusters.profiles import Ask, Proposal, load_all_hardware
from rlk_repro.clusters.triallogs import read_logs
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.state import read_last_word
from rlk_repro.spec import Profile

LOG_POLL_S: Final = 2.0
GONE_TIMEOUT_S: Final = 300.0


CLIENT: Final = "kubectl"
IS_REMOTE: Final = True


def available() -> str | None:
    return kubectl.find_obstacle()


def render(plan: Plan, run_dir: RunDir, *, nodes: Sequence[str] = ()) -> Job:
    settings = kubernetes_settings(plan)
    place = Sent.of_plan(plan, run_dir).place
    file = RunDir(run_dir.root.absolute()).job / OBJECTS
    command = ("kubectl", *place.options, "apply", "--validate=strict", f"--filename={file}")
    text = dump_objects(render_objects(plan, run_dir, nodes=nodes))
    return Job(files={OBJECTS: text}, command=command, remarks=tuple(find_remarks(plan, settings)))


def submit(job: Job, run_dir: RunDir) -> Submission:
    """Do a dry run on the server, apply the job, and send the staged files in a ConfigMap, for which the pods wait.

    After a failure no object of the run is left, or the error names the command that deletes what is left.
    """
    plan = Plan.load(run_dir.plan)
    sent = Sent.of_plan(plan, run_dir)
    text = job.files[OBJECTS].encode()
    _remove_earlier(sent)
    kubectl.require(sent.place.send("apply", text, "--dry-run=server"))
    for earlier in (run_dir.state, run_dir.bundle, run_dir.cancelled, run_dir.live.state):
        earlier.unlink(missing_ok=True)
    try:
        made = _find_made(kubectl.require(sent.place.send("apply", text)).stdout)
        submission = _make_submission(sent, made[0])
        _send_inputs(sent, run_dir, made[0], submission)
        _own(sent, made)
    except BaseException as error:
        if not delete_all(sent).is_ok and isinstance(error, RlkReproError):
            raise type(error)(*error.problems, _name_left(sent)) from None
        raise
    return submission


def _name_left(sent: Sent) -> Problem:
    hint = shlex.join(["kubectl", *sent.place.options, "delete", sent.resources, f"--selector={sent.selector}"])
    return Problem("kubernetes", f"objects of {sent.name} may be left, and may hold GPUs", hint=hint)


def poll(submission: Submission, run_dir: RunDir) -> JobStatus:
    return _look(submission, run_dir)[0]


def poll_all(items: Sequence[tuple[Submission, RunDir]]) -> list[JobStatus]:
    return [poll(submission, run_dir) for submission, run_dir in items]


def logs(submission: Submission, run_dir: RunDir, *, is_following: bool) -> Iterator[TrialLine]:
    if read_sent(submission) is None or run_dir.bundle.is_file():
        return read_logs(run_dir, lambda: True)

    def bring_lines() -> bool:
        status, answer = _look(submission, run_dir)
        if answer is not None:
            with suppress(SchedulerRefused, EnvironmentMissing):
                mirror_logs(*answer, run_dir.live)
        return status.state.is_final

    ask = asked_rarely(bring_lines, LOG_POLL_S)
    is_over = ask()
    return read_logs(run_dir.live, ask if is_following and not is_over else lambda: True)


def cancel(submission: Submission, run_dir: RunDir) -> bool:
    sent = read_sent(submission)
    if sent is None or not run_dir.plan.is_file():
        return False
    status = poll(submission, run_dir)
    if status.state.is_final:
        return False
    require_known(status, run_dir)
    is_first = not run_dir.cancelled.exists()
    write_text(run_dir.cancelled, utc_now() + "\n")
    if is_first and status.state is JobState.RUNNING:
        leader = _find_pod(sent, find_leader(sent), run_dir)
        if leader is not None:
            _ask_to_stop(leader)
            return True
    # the pods get SIGTERM; they then have kubernetes.grace_s seconds to write records and pack the run
    kubectl.require(delete_all(sent))
    return True


def _ask_to_stop(leader: Pod) -> None:
    done = leader.ask_to_stop()
    if not done.is_ok:
        hint = "cancel again: this deletes the job, and without results.claim also its finished trials"
        what = f'pod {leader.name} was not asked to stop: "{kubectl.quote_words(done)}"'
        raise SchedulerRefused(Problem("kubernetes", what, hint=hint))


def collect(submission: Submission, run_dir: RunDir, tell: Tell = silence) -> Path:
    """Fetch the bundle from the leading pod, or through a small pod from ``results.claim``; delete the job."""
    sent = read_sent(submission)
    if sent is None:
        raise EnvironmentMissing(Problem(run_dir.run_id, "was not submitted to Kubernetes", got=submission.job_id))
    if not _is_here(run_dir):
        require_ended(poll(submission, run_dir), run_dir)
        _bring(sent, submission, run_dir, tell)
    delete_all(sent)
    return run_dir.bundle


def find_bound(plan: Plan) -> Bound | None:
    return Bound(time_min=time_limit_min(plan), gpus_per_node=plan.layout.gpus_per_node)


def propose_profile(ask: Ask) -> tuple[Proposal, str]:
    from rlk_repro.clusters.k8s.propose import propose_kubernetes

    return propose_kubernetes(kubectl.find_current_place(), load_all_hardware(), ask)


def check_profile(profile: Profile, plan: Plan | None) -> list[Finding]:
    from rlk_repro.clusters.k8s import check

    return check.check_profile(profile, plan)


def _is_here(run_dir: RunDir) -> bool:
    return run_dir.is_sealed and run_dir.bundle.is_file()


def _look(submission: Submission, run_dir: RunDir) -> tuple[JobStatus, tuple[Pod, Facts] | None]:
    if _is_here(run_dir):
        return JobStatus(state=JobState.DONE, reason=read_last_word(run_dir).line), None
    sent = read_sent(submission)
    if sent is None:
        return JobStatus(state=JobState.UNKNOWN, reason=f"{submission.job_id!r} is not a job of Kubernetes"), None
    try:
        found = find_objects(sent)
    except (EnvironmentMissing, SchedulerRefused) as error:
        return JobStatus(state=JobState.UNKNOWN, reason=str(error), is_unreachable=True), None
    if found.job is None:
        return _judge_absent(sent, run_dir), None
    judged = judge(found.job, found.pods, found.events)
    leader = _find_pod(sent, judged.leader, run_dir)
    facts = None if leader is None else leader.read_facts()
    if leader is None or facts is None:
        return _judge_present(judged, _recall(run_dir, judged.leader_uid), run_dir), None
    write_json(run_dir.live.state, {**facts.to_json(), "pod": judged.leader_uid}, is_durable=False)
    if facts.state is not None:
        write_json(run_dir.state, facts.state, is_durable=False)
    return _judge_present(judged, facts, run_dir), (leader, facts)


def _find_pod(sent: Sent, name: str, run_dir: RunDir) -> Pod | None:
    if not name or not run_dir.plan.is_file():
        return None
    return Pod(place=sent.place, name=name, plan=Plan.load(run_dir.plan), run_dir=run_dir)


def _recall(run_dir: RunDir, leader_uid: str = "") -> Facts | None:
    """Return the facts that the leading pod last reported; None if another pod leads now."""
    try:
        answer = load_json(run_dir.live.state)
        facts = Facts.from_json(answer)
    except BundleUnreadable:
        return None
    return facts if leader_uid in {"", answer.get("pod")} else None


def _judge_present(judged: Judged, facts: Facts | None, run_dir: RunDir) -> JobStatus:
    last = read_last_word(run_dir)
    # while an agent runs, its recorded message describes progress, not a result
    message = last.line if last.exit_code is not None else ""
    nodes = ", ".join(judged.nodes)
    if facts is not None and facts.bundle_bytes is not None and facts.is_sealed:
        return JobStatus(state=JobState.DONE, reason=message, nodes=nodes)
    # a job that waits again, because its queue took the nodes back, starts from the beginning
    has_ended = facts is not None and facts.bundle_bytes is not None and judged.state is not JobState.PENDING
    if not judged.state.is_final and not has_ended:
        waits_for = f"waits for {facts.waits_for}" if facts is not None and facts.waits_for else ""
        where = f"on {nodes}" if judged.state is JobState.RUNNING and nodes else ""
        return JobStatus(state=judged.state, reason=join_words(judged.reason, waits_for, where), nodes=nodes)
    if judged.state is JobState.DONE and not has_ended:
        return JobStatus(state=JobState.DONE, reason=message)
    state = JobState.CANCELLED if run_dir.cancelled.exists() else JobState.FAILED
    return JobStatus(state=state, reason=join_words(judged.reason, message) or NO_REPORT)


def _judge_absent(sent: Sent, run_dir: RunDir) -> JobStatus:
    if not run_dir.plan.is_file():
        return describe_lost(f"{sent.kind} {sent.name}")
    facts, last = _recall(run_dir), read_last_word(run_dir)
    if facts is not None and facts.is_sealed:
        return JobStatus(state=JobState.DONE, reason=last.line)
    absent = f"{sent.kind} {sent.name} no longer exists in namespace {sent.place.namespace}"
    gone = "" if run_dir.bundle.is_file() else absent
    if run_dir.cancelled.exists():
        return JobStatus(state=JobState.CANCELLED, reason=join_words(gone, last.line))
    return JobStatus(state=JobState.FAILED, reason=join_words(gone, last.line or NO_REPORT))


def _remove_earlier(sent: Sent) -> None:
    """Remove an earlier submission's objects, because a job's template cannot be changed."""
    if find_objects(sent).is_empty:
        return
    kubectl.require(delete_all(sent))
    until = time.monotonic() + GONE_TIMEOUT_S
    while not find_objects(sent).is_empty:
        if time.monotonic() >= until:
            raise SchedulerRefused(Problem("kubernetes", f"earlier objects of {sent.name} still exist",
                                           expected=f"no object with label {sent.selector}"))  # fmt: skip
        time.sleep(1.0)


def _find_made(text: str) -> list[dict[str, Any]]:
    value: Any = json.loads(text)
    return list(value["items"]) if value.get("kind") == "List" else [value]


def _make_submission(sent: Sent, job: Mapping[str, Any]) -> Submission:
    versions = kubectl.probe_versions(sent.place)
    details = {
        "kind": sent.kind,
        "namespace": sent.place.namespace,
        "name": sent.name,
        "uid": str(job["metadata"]["uid"]),
        "context": sent.place.context,
        **{f"{side}_version": text for side, text in versions.items()},
    }
    return Submission(cluster="k8s", job_id=sent.job_id, submitted_at=utc_now(), details=details)


def _send_inputs(sent: Sent, run_dir: RunDir, job: Mapping[str, Any], submission: Submission) -> None:
    paths = [run_dir.run_yaml, run_dir.stack_yaml, run_dir.hardware_yaml, run_dir.profile_yaml, run_dir.plan]
    files = {path.name: path.read_bytes() for path in paths}
    files[run_dir.submission.name] = dump_json(submission.to_json())
    files["job-objects.yaml"] = (run_dir.job / OBJECTS).read_bytes()
    labels = job["metadata"]["labels"]
    inputs = kubectl.make_config_map(sent.name, sent.place.namespace, labels, job, files)
    kubectl.require(sent.place.send("create", inputs))


def _own(sent: Sent, made: Sequence[Mapping[str, Any]]) -> None:
    """Make the job the owner of its other objects, which Kubernetes then deletes together with the job."""
    patch = json.dumps({"metadata": {"ownerReferences": [kubectl.make_owner(made[0])]}})
    for item in made[1:]:
        kind = str(item["kind"]).lower()
        name = str(item["metadata"]["name"])
        kubectl.require(sent.place.run("patch", kind, name, "--type=merge", f"--patch={patch}"))


def _bring(sent: Sent, submission: Submission, run_dir: RunDir, tell: Tell) -> None:
    try:
        last_state = _fetch(sent, run_dir, tell)
    except LeaderEnded:
        last_state = _fetch(sent, run_dir, tell)
    put_in_place(run_dir)
    if last_state is not None:
        write_json(run_dir.state, last_state)
    if not run_dir.is_sealed:  # the bundle of a sealed run already holds submission.json
        write_json(run_dir.submission, submission.to_json())
    record_objects(sent, run_dir)


def _fetch(sent: Sent, run_dir: RunDir, tell: Tell) -> Mapping[str, Any] | None:
    with find_holder(sent, run_dir, tell) as holder:
        facts = holder.facts
        assert facts.bundle_bytes is not None
        tell(f"fetching {format_bytes(facts.bundle_bytes)} from pod {holder.pod.name}")
        fetch_bundle(holder.ask_bundle, run_dir, facts.bundle_bytes, facts.bundle_sha256, tell)
        return facts.state
