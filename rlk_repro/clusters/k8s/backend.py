"""Run on Kubernetes by ``kubectl``: one Indexed Job, whose pods share the run directory on a volume claim."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.clock import utc_now
from rlk_repro.base.console import Tell, silence
from rlk_repro.base.errors import EnvironmentMissing, Problem, RlkReproError, SchedulerRefused, SpecError
from rlk_repro.base.files import dump_json, write_json, write_text
from rlk_repro.base.findings import Finding
from rlk_repro.clusters.api import Bound, Job, JobState, JobStatus, Submission, TrialLine
from rlk_repro.clusters.asking import NO_REPORT, describe_lost, join_words, require_ended, require_known
from rlk_repro.clusters.k8s.collect import bring_bundle
from rlk_repro.clusters.k8s.kubectl import Unreachable, find_current_place, quote_last_lines, require
from rlk_repro.clusters.k8s.naming import IN_AGENT, OBJECTS
from rlk_repro.clusters.k8s.objects import dump_objects, render_objects, time_limit_min
from rlk_repro.clusters.k8s.overlay import find_remarks
from rlk_repro.clusters.k8s.pods import find_profile_problems, kubernetes_settings, pod_run_dir
from rlk_repro.clusters.k8s.sent import Found, Sent, find_objects, find_warnings, read_sent
from rlk_repro.clusters.k8s.states import Judged, Object, has_begun, is_running, judge, read_messages
from rlk_repro.clusters.k8s.tree import as_map
from rlk_repro.clusters.profiles import Ask, Proposal, load_all_hardware
from rlk_repro.clusters.triallogs import TRIAL_MARK, read_logs
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.state import Progress, read_last_word
from rlk_repro.spec import Profile

LOG_POLL_S: Final = 2.0
CLIENT: Final = "kubectl"
IS_REMOTE: Final = True


def available() -> str | None:
    return None if shutil.which(CLIENT) else f"{CLIENT} is not on PATH"


def render(plan: Plan, run_dir: RunDir, *, nodes: Sequence[str] = ()) -> Job:
    place = Sent.of_plan(plan, run_dir).place
    file = RunDir(run_dir.root.absolute()).job / OBJECTS
    command = ("kubectl", *place.options, "apply", "--validate=strict", f"--filename={file}")
    text = dump_objects(render_objects(plan, run_dir, nodes=nodes))
    return Job(files={OBJECTS: text}, command=command, remarks=tuple(find_remarks(plan, kubernetes_settings(plan))))


def submit(job: Job, run_dir: RunDir) -> Submission:
    """Do a dry run on the server, apply the objects, and send the staged files in a ConfigMap that the pods wait for.

    The job owns all other objects.  After a failure none is left, or the error names the command that deletes the rest.
    """
    sent = Sent.of_plan(Plan.load(run_dir.plan), run_dir)
    text = job.files[OBJECTS].encode()
    require(sent.delete("--wait"))  # a job's template cannot be changed
    require(sent.place.send("apply", text, "--dry-run=server"))
    for earlier in (run_dir.state, run_dir.bundle, run_dir.cancelled):
        earlier.unlink(missing_ok=True)
    try:
        return _send(sent, text, run_dir)
    except BaseException as error:
        if not sent.delete().is_ok and isinstance(error, RlkReproError):
            hint = shlex.join(["kubectl", *sent.place.options, "delete", sent.kinds, sent.selector])
            left = Problem("kubernetes", f"objects of {sent.name} may be left, and may hold GPUs", hint=hint)
            raise type(error)(*error.problems, left) from None
        raise


def _send(sent: Sent, text: bytes, run_dir: RunDir) -> Submission:
    answer: Any = json.loads(require(sent.place.send("apply", text)).stdout)
    job, *others = answer["items"] if answer["kind"] == "List" else [answer]
    uid = str(job["metadata"]["uid"])
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": sent.name, "uid": uid}
    for item in others:
        where = (str(item["kind"]).lower(), str(item["metadata"]["name"]))
        patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
        require(sent.place.run("patch", *where, "--type=merge", f"--patch={patch}"))
    details = {"kind": "job", "namespace": sent.place.namespace, "name": sent.name, "uid": uid}
    details["context"] = sent.place.context
    for side, version in sent.place.probe_versions().items():
        details[f"{side}_version"] = version
    submission = Submission(cluster="k8s", job_id=sent.job_id, submitted_at=utc_now(), details=details)
    paths = (run_dir.run_yaml, run_dir.stack_yaml, run_dir.hardware_yaml, run_dir.profile_yaml, run_dir.plan)
    files = {path.name: path.read_text() for path in paths}
    files[run_dir.submission.name] = dump_json(submission.to_json()).decode()
    files["job-objects.yaml"] = (run_dir.job / OBJECTS).read_text()
    metadata = {**job["metadata"], "ownerReferences": [owner]}
    kept = {key: metadata[key] for key in ("name", "namespace", "labels", "ownerReferences")}
    inputs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": kept, "data": files}
    require(sent.place.send("create", dump_json(inputs)))
    return submission


def poll(submission: Submission, run_dir: RunDir) -> JobStatus:
    last = read_last_word(run_dir)
    if run_dir.is_sealed and run_dir.bundle.is_file():
        return JobStatus(state=JobState.DONE, reason=last.line)
    sent = read_sent(submission)
    if sent is None:
        return JobStatus(state=JobState.UNKNOWN, reason=f"{submission.job_id!r} is not a Job of Kubernetes")
    try:
        found = find_objects(sent)
        if found.job is None:
            return _judge_absent(sent, found, run_dir)
        judged = judge(found.job, found.pods)
        if judged.state is JobState.PENDING:
            judged = judge(found.job, found.pods, find_warnings(sent))
    except (EnvironmentMissing, SchedulerRefused) as error:
        return JobStatus(state=JobState.UNKNOWN, reason=str(error), is_unreachable=True)
    _bring_state(sent, judged.leader, run_dir)
    return _judge_present(judged, run_dir)


def poll_all(items: Sequence[tuple[Submission, RunDir]]) -> list[JobStatus]:
    return [poll(submission, run_dir) for submission, run_dir in items]


def logs(submission: Submission, run_dir: RunDir, *, is_following: bool) -> Iterator[TrialLine]:
    """Yield what the leading pod prints: its agent repeats every line of every trial's log."""
    sent = read_sent(submission)
    if sent is None or run_dir.bundle.is_file() or not run_dir.plan.is_file():
        yield from read_logs(run_dir, lambda: True)
        return
    trials = {trial.name for trial in Plan.load(run_dir.plan).trials}
    seen: dict[str, int] = {}
    is_over = False
    while not is_over:
        has_read = bool(seen)
        try:
            found = find_objects(sent)
            judged = None if found.job is None else judge(found.job, found.pods)
            is_over = not is_following or judged is None or judged.state.is_final
            if judged is not None and judged.leader is not None and has_begun(judged.leader):
                yield from _read_pod(sent, as_name(judged.leader), seen, trials, is_following=is_following)
        except Unreachable:  # a server that restarts ends no reader
            if not has_read:
                raise
        time.sleep(0 if is_over else LOG_POLL_S)


def cancel(submission: Submission, run_dir: RunDir) -> bool:
    """Delete the job: its pods get SIGTERM, and pack the run on its claim within ``kubernetes.grace_s`` seconds."""
    sent = read_sent(submission)
    if sent is None or not run_dir.plan.is_file():
        return False
    status = poll(submission, run_dir)
    if status.state.is_final:
        return False
    require_known(status, run_dir)
    grace = ("--grace-period=1",) if run_dir.cancelled.exists() else ()
    write_text(run_dir.cancelled, utc_now() + "\n")
    require(sent.delete("--wait=false", *grace))
    return True


def collect(submission: Submission, run_dir: RunDir, tell: Tell = silence) -> Path:
    """Bring the bundle from the claim, and delete the job and all its objects."""
    sent = read_sent(submission)
    if sent is None:
        raise EnvironmentMissing(Problem(run_dir.run_id, "was not submitted as a Job of Kubernetes",
                                         got=submission.job_id))  # fmt: skip
    if not (run_dir.is_sealed and run_dir.bundle.is_file()):
        require_ended(poll(submission, run_dir), run_dir)
        bring_bundle(sent, run_dir, tell)
        if not run_dir.is_sealed:  # the bundle of a sealed run already holds submission.json
            write_json(run_dir.submission, submission.to_json())
    sent.delete()
    return run_dir.bundle


def find_bound(plan: Plan) -> Bound | None:
    return Bound(time_min=time_limit_min(plan), gpus_per_node=plan.layout.gpus_per_node)


def propose_profile(ask: Ask) -> tuple[Proposal, str]:
    from rlk_repro.clusters.k8s.propose import propose_kubernetes

    return propose_kubernetes(find_current_place(), load_all_hardware(), ask)


def check_profile(profile: Profile, plan: Plan | None) -> list[Finding]:
    from rlk_repro.clusters.k8s import check

    problems = [*find_profile_problems(profile)]
    if problems:
        raise SpecError(*problems)
    return check.check_profile(profile, plan)


def as_name(item: Object) -> str:
    return str(item["metadata"]["name"])


def _bring_state(sent: Sent, leader: Object | None, run_dir: RunDir) -> None:
    """Copy the agent's last progress report; a pod that has ended left it in its termination log."""
    if leader is None or not run_dir.plan.is_file():
        return
    text = (read_messages(leader) or [""])[-1]
    if is_running(leader):
        path = f"{pod_run_dir(Plan.load(run_dir.plan), run_dir)}/{run_dir.state.name}"
        text = sent.place.run("exec", as_name(leader), IN_AGENT, "--", "cat", path).stdout
    with suppress(ValueError, KeyError, TypeError):  # no report yet, or the last lines of an agent that crashed
        value = json.loads(text)
        Progress.from_json(value)
        write_json(run_dir.state, value, is_durable=False)


def _judge_present(judged: Judged, run_dir: RunDir) -> JobStatus:
    last, nodes = read_last_word(run_dir), ", ".join(judged.nodes)
    # while an agent runs, its recorded message describes progress, not a result
    message = last.line if last.exit_code is not None else ""
    if judged.state is JobState.DONE:
        return JobStatus(state=JobState.DONE, reason=message)
    if not judged.state.is_final:
        where = f"on {nodes}" if judged.state is JobState.RUNNING and nodes else ""
        return JobStatus(state=judged.state, reason=join_words(judged.reason, where), nodes=nodes)
    if not message and judged.leader is not None:
        message = quote_last_lines("\n".join(read_messages(judged.leader)))
    state = JobState.CANCELLED if run_dir.cancelled.exists() else JobState.FAILED
    return JobStatus(state=state, reason=join_words(judged.reason, message) or NO_REPORT)


def _judge_absent(sent: Sent, found: Found, run_dir: RunDir) -> JobStatus:
    if not run_dir.plan.is_file():
        return describe_lost(f"Job {sent.name}")
    ending = [as_name(pod) for pod in found.pods if as_map(pod.get("status")).get("phase") == "Running"]
    if ending:
        return JobStatus(state=JobState.RUNNING, reason=f"the job is deleted, and its pods end: {', '.join(ending)}")
    last = read_last_word(run_dir)
    if last.exit_code == 0:
        return JobStatus(state=JobState.DONE, reason=last.line)
    if run_dir.cancelled.exists():
        return JobStatus(state=JobState.CANCELLED, reason=last.line if last.exit_code else "")
    gone = "" if run_dir.bundle.is_file() else f"Job {sent.name} no longer exists in namespace {sent.place.namespace}"
    return JobStatus(state=JobState.FAILED, reason=join_words(gone, last.line or NO_REPORT))


def _read_pod(
    sent: Sent, pod: str, seen: dict[str, int], trials: set[str], *, is_following: bool
) -> Iterator[TrialLine]:
    """Yield the trials' lines that this pod printed, without those that ``seen`` counts from an earlier connection."""
    follow = ("--follow",) if is_following else ()
    with sent.place.stream("logs", pod, IN_AGENT, *follow) as stream:
        for number, line in enumerate(stream, start=1):
            if number <= seen.get(pod, 0):
                continue
            seen[pod] = number
            trial, mark, text = line.decode(errors="replace").rstrip("\n").partition(TRIAL_MARK)
            if mark and trial in trials:
                yield TrialLine(trial=trial, text=text)
