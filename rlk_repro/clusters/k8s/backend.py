"""Run on Kubernetes by ``kubectl``: one Indexed Job, whose pods share the run directory on a volume claim."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.console import Tell, silence
from rlk_repro.base.errors import EnvironmentMissing, Problem, RlkReproError, SchedulerRefused, SpecError
from rlk_repro.base.files import dump_json, write_json, write_text
from rlk_repro.base.findings import Finding
from rlk_repro.base.units import utc_now
from rlk_repro.clusters.api import SURROUNDINGS_MIN, Bound, Job, JobState, JobStatus, Submission, TrialLine
from rlk_repro.clusters.asking import NO_REPORT, describe_lost, join_words, require_ended, require_known
from rlk_repro.clusters.k8s.collect import bring_bundle
from rlk_repro.clusters.k8s.kubectl import (
    Unreachable,
    find_current_place,
    quote_last_lines,
    require,
)
from rlk_repro.clusters.k8s.naming import IN_AGENT, OBJECTS, Sent, kubernetes_settings
from rlk_repro.clusters.k8s.objects import NO_GANG, dump_objects, has_gang, render_objects
from rlk_repro.clusters.k8s.pods import INPUT_FILES, find_profile_problems, pod_run_dir
from rlk_repro.clusters.k8s.states import Judged, Object, has_begun, is_running, judge, read_message
from rlk_repro.clusters.profiles import Ask, Proposal, load_all_hardware
from rlk_repro.clusters.triallogs import TRIAL_MARK, read_logs
from rlk_repro.images.stacks import image_remarks
from rlk_repro.logs.lines import read_lines
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.state import Progress, read_last_word
from rlk_repro.spec import Profile

# What a trial's code writes may have any size.
MOST_LINE_BYTES: Final = 1 << 20
MOST_STATE_BYTES: Final = "65536"
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
    remarks, num_nodes = [*image_remarks(plan)], plan.layout.num_nodes
    if num_nodes > 1 and not has_gang(kubernetes_settings(plan)):
        remarks.append(f"{num_nodes} nodes, and gang scheduling is waived: {NO_GANG}")
    return Job(files={OBJECTS: text}, command=command, remarks=tuple(remarks))


def submit(job: Job, run_dir: RunDir) -> Submission:
    """Do a dry run on the server, create the objects, and send the staged files in a ConfigMap that the pods wait for.

    The job owns all other objects.  After a failure none is left, or the error names the command that deletes the rest.
    """
    import yaml

    from rlk_repro.clusters.k8s.check import require_nodes

    sent = Sent.of_plan(Plan.load(run_dir.plan), run_dir)
    objects = list(yaml.safe_load_all(job.files[OBJECTS]))
    require(sent.delete())  # a job's template cannot be changed
    require(sent.place.send("apply", job.files[OBJECTS].encode(), "--dry-run=server"))
    require_nodes(sent.place, objects[0])
    for earlier in (run_dir.state, run_dir.bundle, run_dir.cancelled):
        earlier.unlink(missing_ok=True)
    try:
        return _send(sent, objects, run_dir)
    except BaseException as error:
        if sent.delete("--wait=false").is_ok or not isinstance(error, RlkReproError):
            raise
        hint = shlex.join(["kubectl", *sent.place.options, "delete", sent.kinds, sent.selector])
        what = f"objects of {sent.name} may be left, and may hold GPUs"
        left = Problem("kubernetes", what, hint=hint)
        raise type(error)(*error.problems, left) from None


def _send(sent: Sent, objects: Sequence[dict[str, Any]], run_dir: RunDir) -> Submission:
    job, *others = objects
    uid = str(json.loads(require(sent.place.send("create", dump_json(job))).stdout)["metadata"]["uid"])
    submission = Submission(
        cluster="k8s",
        job_id=f"{sent.place.namespace}/job/{sent.name}",
        submitted_at=utc_now(),
        details={"kind": "job", "namespace": sent.place.namespace, "name": sent.name, "uid": uid,
                 "context": sent.place.context},
    )  # fmt: skip
    files = {name: (run_dir.root / name).read_text() for name in INPUT_FILES}
    files[run_dir.submission.name] = dump_json(submission.to_json()).decode()
    files["job-objects.yaml"] = (run_dir.job / OBJECTS).read_text()
    kept = {key: job["metadata"][key] for key in ("name", "namespace", "labels")}
    others.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": kept, "data": files})
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": sent.name, "uid": uid}
    for item in others:
        item["metadata"]["ownerReferences"] = [owner]
        require(sent.place.send("create", dump_json(item)))
    return submission


def poll(submission: Submission, run_dir: RunDir) -> JobStatus:
    if run_dir.is_sealed and run_dir.bundle.is_file():
        return JobStatus(state=JobState.DONE, reason=read_last_word(run_dir).line)
    sent = Sent.of(submission)
    if sent is None:
        return JobStatus(state=JobState.UNKNOWN, reason=f"{submission.job_id!r} is not a Job of Kubernetes")
    try:
        job, pods = sent.find_objects()
        judged = _judge_deleted(sent, pods, run_dir) if job is None else judge(job, pods)
        if job is not None and (judged.state is JobState.PENDING or not all(map(has_begun, pods))):
            judged = judge(job, pods, sent.find_warnings())
    except (EnvironmentMissing, SchedulerRefused) as error:
        return JobStatus(state=JobState.UNKNOWN, reason=str(error), is_unreachable=True)
    if job is None and not run_dir.plan.is_file():
        return describe_lost(f"Job {sent.name}")
    _bring_state(sent, judged.leader, run_dir)
    return _conclude(judged, run_dir)


def poll_all(items: Sequence[tuple[Submission, RunDir]]) -> list[JobStatus]:
    return [poll(submission, run_dir) for submission, run_dir in items]


def logs(submission: Submission, run_dir: RunDir, *, is_following: bool) -> Iterator[TrialLine]:
    """Yield what the leading pod prints: its agent repeats every line of every trial's log."""
    sent = Sent.of(submission)
    if sent is None or run_dir.bundle.is_file() or not run_dir.plan.is_file():
        yield from read_logs(run_dir, lambda: True)
        return
    trials = {trial.name for trial in Plan.load(run_dir.plan).trials}
    seen: dict[str, int] = {}
    has_answered = is_over = False
    while not is_over:
        try:
            job, pods = sent.find_objects()
            has_answered = True
            judged = None if job is None else judge(job, pods)
            leader = None if judged is None else judged.leader
            if leader is not None and has_begun(leader):
                pod = leader["metadata"]["name"]
                yield from _read_pod(sent, pod, seen, trials, is_following=is_following)
            is_over = not is_following or judged is None or judged.state.is_final
        except Unreachable:  # a server that restarts ends no reader who follows
            if not (is_following and has_answered):
                raise
        time.sleep(0 if is_over else LOG_POLL_S)


def cancel(submission: Submission, run_dir: RunDir) -> bool:
    """Delete the job: its pods get SIGTERM, and pack the run on its claim within ``kubernetes.grace_s`` seconds."""
    sent = Sent.of(submission)
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
    sent = Sent.of(submission)
    if sent is None:
        what = "was not submitted as a Job of Kubernetes"
        raise EnvironmentMissing(Problem(run_dir.run_id, what, got=submission.job_id))
    if not (run_dir.is_sealed and run_dir.bundle.is_file()):
        require_ended(poll(submission, run_dir), run_dir)
        bring_bundle(sent, run_dir, tell)
        if not run_dir.is_sealed:  # the bundle of a sealed run already holds submission.json
            write_json(run_dir.submission, submission.to_json())
    sent.delete("--wait=false")
    return run_dir.bundle


def find_bound(plan: Plan) -> Bound | None:
    needed_min = plan.all_limits_min + SURROUNDINGS_MIN
    limit_min = min(needed_min, kubernetes_settings(plan).max_time_min or needed_min)
    return Bound(time_min=math.ceil(limit_min), gpus_per_node=plan.layout.gpus_per_node)


def propose_profile(ask: Ask) -> tuple[Proposal, str]:
    from rlk_repro.clusters.k8s.propose import propose_kubernetes

    return propose_kubernetes(find_current_place(), load_all_hardware(), ask)


def check_profile(profile: Profile, plan: Plan | None) -> list[Finding]:
    from rlk_repro.clusters.k8s import check

    problems = [*find_profile_problems(profile)]
    if problems:
        raise SpecError(*problems)
    return check.check_profile(profile, plan)


def _bring_state(sent: Sent, leader: Object | None, run_dir: RunDir) -> None:
    """Copy the agent's last progress report; a pod that has ended left it in its termination log."""
    if leader is None or not run_dir.plan.is_file():
        return
    text = read_message(leader)
    if is_running(leader):
        path = f"{pod_run_dir(Plan.load(run_dir.plan), run_dir)}/{run_dir.state.name}"
        words = (leader["metadata"]["name"], IN_AGENT, "--", "head", "-c", MOST_STATE_BYTES, path)
        text = sent.place.run("exec", *words).stdout
    with suppress(ValueError, KeyError, TypeError):  # no report yet, or the last lines of an agent that crashed
        value = json.loads(text)
        Progress.from_json(value)
        write_json(run_dir.state, value, is_durable=False)


def _judge_deleted(sent: Sent, pods: Sequence[Object], run_dir: RunDir) -> Judged:
    ending = [pod["metadata"]["name"] for pod in pods if pod.get("status", {}).get("phase") == "Running"]
    state, reason = JobState.FAILED, f"Job {sent.name} no longer exists in namespace {sent.place.namespace}"
    if ending:
        state, reason = JobState.RUNNING, f"the job is deleted, and its pods end: {', '.join(ending)}"
    elif run_dir.cancelled.exists() or run_dir.bundle.is_file():
        reason = ""
    return Judged(state=state, reason=reason, leader=None, nodes=())


def _conclude(judged: Judged, run_dir: RunDir) -> JobStatus:
    last, nodes = read_last_word(run_dir), ", ".join(judged.nodes)
    if not judged.state.is_final:
        where = f"on {nodes}" if judged.state is JobState.RUNNING and nodes else ""
        return JobStatus(state=judged.state, reason=join_words(judged.reason, where), nodes=nodes)
    # while an agent runs, its recorded message describes progress, not a result
    message = last.line if last.exit_code is not None else ""
    if judged.state is JobState.DONE or last.exit_code == 0:
        return JobStatus(state=JobState.DONE, reason=message)
    if not message and judged.leader is not None:
        message = quote_last_lines(read_message(judged.leader))
    reason = join_words(judged.reason, message)
    if run_dir.cancelled.exists():
        return JobStatus(state=JobState.CANCELLED, reason=reason)
    return JobStatus(state=JobState.FAILED, reason=reason or NO_REPORT)


def _read_pod(
    sent: Sent, pod: str, seen: dict[str, int], trials: set[str], *, is_following: bool
) -> Iterator[TrialLine]:
    """Yield the trials' lines of this pod, without those that ``seen`` counts."""
    follow = ("--follow",) if is_following else ()
    with sent.place.stream("logs", pod, IN_AGENT, *follow) as stream:
        for number, line in read_lines(stream, MOST_LINE_BYTES):
            if number <= seen.get(pod, 0):
                continue
            seen[pod] = number
            trial, mark, text = line.decode(errors="replace").rstrip("\n").partition(TRIAL_MARK)
            if mark and trial in trials:
                yield TrialLine(trial=trial, text=text)
