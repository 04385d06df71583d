"""From what a user asked for to a submission, and from a finished run directory to its result.

Everything that ``submit``, ``replay`` and their ``--dry-run`` share; the steps of a job are in ``rlk_repro.job``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlk_repro.base.console import Tell, silence
from rlk_repro.base.errors import (
    EXIT_BUG,
    BundleUnreadable,
    CheckFailed,
    EnvironmentMissing,
    Problem,
    RlkReproError,
    SpecError,
)
from rlk_repro.base.files import MAX_ANALYSIS_BYTES, load_json, sha256_file, write_json
from rlk_repro.base.resources import hardware_folders, list_names, profile_folders, run_folders, stack_folders
from rlk_repro.clusters import registry as backends
from rlk_repro.clusters.api import Job, JobState, Status, Submission
from rlk_repro.clusters.registry import get_backend
from rlk_repro.plan import BASELINE, ENABLED, Plan, flag_overrides, make_plan
from rlk_repro.rundir.manifest import load_manifests
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import Analysis, TrialStatus
from rlk_repro.rundir.store import find_run_dir, list_run_dirs, recall, remember
from rlk_repro.spec.load import Loaded, load_hardware, load_profile, load_run, load_stack, parse_overrides
from rlk_repro.submit.authored import describe_rule_changes
from rlk_repro.submit.stage import Inputs, new_run_dir, stage, stage_again
from rlk_repro.workloads import get_workload
from rlk_repro.workloads.differences import find_undeclared, list_differences, read_differences

if TYPE_CHECKING:
    from rlk_repro.report import Context

LOCAL: Final = "local"


@dataclass(frozen=True, kw_only=True)
class Request:
    """The flags of ``submit``; None means not given."""

    run: str
    cluster: str | None = None
    hardware: str | None = None
    profile: str | None = None
    stack: str | None = None
    lane: str | None = None
    pairs: int | None = None
    control_pairs: int | None = None
    variants: tuple[str, ...] = (BASELINE, ENABLED)
    settings: tuple[str, ...] = ()
    is_exploratory: bool = False


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Planned and rendered; nothing has been written or sent.  ``inputs`` is None where they are staged already."""

    plan: Plan
    inputs: Inputs | None
    run_dir: RunDir
    job: Job


@dataclass(frozen=True, kw_only=True)
class Launched:
    run_dir: RunDir
    submission: Submission


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a finished run left behind."""

    analysis: Analysis
    bundle: Path
    bundle_id: str
    report: Path
    is_ok: bool

    def to_json(self) -> dict[str, Any]:
        return {"verdict": self.analysis.verdict.word.value, "headline": self.analysis.verdict.headline,
                "bundle": str(self.bundle), "bundle_id": self.bundle_id, "report": str(self.report),
                "is_ok": self.is_ok}  # fmt: skip


def prepare(request: Request) -> Prepared:
    """Resolve, plan and render.

    Raises:
        SpecError: with everything that is wrong in the files and flags.
    """
    if not request.run:
        known = ", ".join(list_names(run_folders()))
        raise SpecError(Problem("--run", "missing", expected=f"a file, or one of {known}"))
    overrides = parse_overrides(request.settings)
    overrides += flag_overrides(lane=request.lane, pairs=request.pairs, control_pairs=request.control_pairs)
    run = load_run(request.run, run_folders(), overrides)
    profile = resolve_profile(request.profile, request.cluster)
    hardware_name = request.hardware or profile.model.hardware
    if hardware_name is None:
        known = ", ".join(sorted(run.model.layouts))
        raise SpecError(Problem("--hardware", "missing, and the profile names none", expected=f"one of {known}"))
    hardware = load_hardware(hardware_name, hardware_folders())
    stack = load_stack(request.stack or run.model.stack, stack_folders())
    plan = make_plan(
        run=run,
        stack=stack,
        hardware=hardware,
        profile=profile,
        overrides=overrides,
        variants=request.variants,
        is_exploratory=request.is_exploratory,
    )
    inputs = Inputs(run=run.data, stack=stack.data, hardware=hardware.data, profile=profile.data)
    return render(plan, inputs)


def prepare_resume(name: str) -> Prepared:
    """The job of a run that did not finish, rendered again; its agent redoes whole pairs that are incomplete.

    Raises:
        CheckFailed: the run is sealed, or still running.
        EnvironmentMissing: nobody here can tell whether it still runs.
    """
    run_dir = find_run_dir(name)
    require_own(run_dir)
    if run_dir.is_sealed:
        raise CheckFailed(Problem(run_dir.run_id, "is sealed: every trial has run", hint="submit it again for more"))
    submission = load_submission(run_dir)
    if submission is not None:
        _require_ended(run_dir, poll(Launched(run_dir=run_dir, submission=submission)))
    return render(load_plan(run_dir), None, run_dir)


def _require_ended(run_dir: RunDir, status: Status) -> None:
    if status.state is JobState.UNKNOWN:
        raise EnvironmentMissing(
            Problem(run_dir.run_id, f"may still be running ({status.reason})", expected="one that has ended")
        )
    if not status.state.is_final:
        raise CheckFailed(Problem(run_dir.run_id, "is still running", hint=f"rlk-repro cancel {run_dir.run_id}"))


def render(plan: Plan, inputs: Inputs | None, run_dir: RunDir | None = None, *, nodes: Sequence[str] = ()) -> Prepared:
    """Render a plan for its cluster; pure but for the choice of a new run id where no directory is given.

    Raises:
        SpecError: neither the trainer nor the cluster could run this plan.
    """
    problems = get_workload(plan.run.workload.kind).find_problems(plan) or find_undeclared(plan)
    if problems:
        raise SpecError(*problems)
    run_dir = run_dir or new_run_dir(plan)
    job = get_backend(plan.cluster).render(plan, run_dir, nodes=nodes)
    return Prepared(plan=plan, inputs=inputs, run_dir=run_dir, job=job)


def resolve_profile(name: str | None, cluster: str | None) -> Loaded[Any]:
    """The profile by name or file; ``local`` by default on the local cluster only.

    Raises:
        SpecError: none given for a real cluster, or a profile made for another cluster.
    """
    wanted = cluster or LOCAL
    get_backend(wanted)
    folders = profile_folders(wanted)
    if name is None:
        if wanted != LOCAL:
            known = ", ".join(list_names(folders)) or "(none)"
            raise SpecError(Problem("--profile", f"needed for cluster {wanted}", expected=f"a file, or one of {known}"))
        name = LOCAL
    profile = load_profile(name, folders)
    if cluster is not None and profile.model.cluster != cluster:
        raise SpecError(
            Problem("--profile", "made for another cluster", got=profile.model.cluster, expected=cluster,
                    hint=f"use --cluster {profile.model.cluster}")
        )  # fmt: skip
    return profile


def submit(prepared: Prepared, details: Iterable[tuple[str, str]] = ()) -> Launched:
    """Write what is not yet in the run directory and send exactly the rendered job.

    Raises:
        EnvironmentMissing: this machine has no such cluster.
        SchedulerRefused: the scheduler said no.
    """
    run_dir = prepared.run_dir
    backend = get_backend(prepared.plan.cluster)
    reason = backend.available()
    if reason is not None:
        raise EnvironmentMissing(Problem(prepared.plan.cluster, reason, hint="--dry-run works anywhere"))
    previous = load_submission(run_dir)
    if prepared.inputs is None:
        stage_again(run_dir, prepared.job)
    else:
        stage(prepared.plan, prepared.inputs, run_dir, prepared.job)
    submission = backend.submit(prepared.job, run_dir)
    kept = {} if previous is None else previous.details
    submission = dataclasses.replace(submission, details={**kept, **submission.details, **dict(details)})
    record_submission(run_dir, submission)
    return Launched(run_dir=run_dir, submission=submission)


def record_submission(run_dir: RunDir, submission: Submission) -> None:
    """For this user, whose commands act on it, and in the run directory, where it is evidence."""
    remember(run_dir, submission.to_json())
    write_json(run_dir.submission, submission.to_json())


def load_plan(run_dir: RunDir) -> Plan:
    return Plan.load(run_dir.plan)


def is_own(run_dir: RunDir) -> bool:
    """Whether this user staged the run directory, as against one that came out of a bundle."""
    return recall(run_dir) is not None


def require_own(run_dir: RunDir) -> None:
    """Raises CheckFailed for a run directory of somebody else: its jobs and its site are not to be acted on."""
    if not is_own(run_dir):
        raise CheckFailed(
            Problem(run_dir.run_id, "was not submitted by you", expected="a run directory of your own submit or replay",
                    hint=f"rlk-repro replay {run_dir.root} runs the same experiment on your own site")
        )  # fmt: skip


def load_submission(run_dir: RunDir) -> Submission | None:
    """What this user submitted; None where nothing was sent, or by somebody else.

    Raises:
        CheckFailed: the run directory tells of another submission.
    """
    own = recall(run_dir)
    if own is None or not run_dir.submission.is_file():
        return None
    told = Submission.from_json(load_json(run_dir.submission), str(run_dir.submission))
    sent = None if own["submission"] is None else Submission.from_json(own["submission"])
    if sent is None or (sent.cluster, sent.job_id) != (told.cluster, told.job_id):
        expected = "none" if sent is None else f"{sent.job_id} on {sent.cluster}"
        got = f"{told.job_id} on {told.cluster}"
        raise CheckFailed(Problem(str(run_dir.submission), "is not what was submitted", got=got, expected=expected))
    return sent


def poll(launched: Launched) -> Status:
    return get_backend(launched.submission.cluster).poll(launched.submission, launched.run_dir)


def poll_all(launched: Sequence[Launched]) -> list[Status]:
    """The same for many, with one question per cluster where it can be asked so."""
    return backends.poll_all([(item.submission, item.run_dir) for item in launched])


def list_launched() -> list[Launched]:
    """Everything below the runs root that was submitted, oldest first."""
    found = ((run_dir, load_submission(run_dir)) for run_dir in list_run_dirs())
    return [Launched(run_dir=run_dir, submission=item) for run_dir, item in found if item is not None]


def wait(launched: Launched, tell: Callable[[str], None], *, is_quiet: bool = False) -> None:
    """Stay until the submission ends, with live progress on a terminal; an interrupt leaves the job running."""
    from rlk_repro.agent.progress import follow
    from rlk_repro.base.console import live_line

    try:
        with live_line(is_quiet=is_quiet) as line:
            follow(launched.run_dir, lambda: poll(launched), line.tell, is_live=line.is_live)
    except KeyboardInterrupt:
        tell(f"the run goes on; stop it with: rlk-repro cancel {launched.run_dir.run_id}")
        raise


def report_context(run_dir: RunDir, bundle: Path, *, is_linked: bool = True) -> Context:
    """What a report shows beside the analysis: manifests, the run's own claims, links to the logs where they lie.

    ``bundle`` is its path as the shown commands should have it.
    """
    from rlk_repro.report import Context
    from rlk_repro.report.setting import describe_setting, find_own_work

    plan = load_plan(run_dir)
    run = plan.run
    recorded = read_differences(plan, run_dir)
    return Context(
        setting=describe_setting(plan),
        rule_changes=describe_rule_changes(plan),
        differences=list_differences(plan) if recorded is None else recorded,
        is_as_planned=recorded is None,
        is_sealed=run_dir.is_sealed,
        own_work=find_own_work(plan),
        bundle=str(bundle),
        run_directory=".." if is_linked else "",
        manifests=load_manifests(run_dir),
        may_claim=run.may_claim,
        may_not_claim=run.may_not_claim,
    )


def finish(launched: Launched, tell: Tell = silence) -> Result:
    """Read what a finished run left, and write its report beside it.

    Raises:
        RlkReproError: the run was not sealed; the class is the one that its agent ended with.
    """
    from rlk_repro.report import write_report

    run_dir = launched.run_dir
    if launched.submission.cluster in backends.REMOTE:
        get_backend(launched.submission.cluster).collect(launched.submission, run_dir, tell)
    if not run_dir.is_sealed:
        raise _explain_end(launched)
    bundle = get_backend(launched.submission.cluster).collect(launched.submission, run_dir)
    analysis = Analysis.from_json(load_json(run_dir.analysis, max_bytes=MAX_ANALYSIS_BYTES), str(run_dir.analysis))
    report = write_report(analysis, run_dir.report, report_context(run_dir, Path(bundle.name)))
    is_ok = all(trial.status is TrialStatus.OK for trial in analysis.trials)
    return Result(analysis=analysis, bundle=bundle, bundle_id=sha256_file(run_dir.checksums),
                  report=report.html, is_ok=is_ok)  # fmt: skip


def _explain_end(launched: Launched) -> RlkReproError:
    """Why a run is not sealed, as its agent put it; resuming is advised only where the same job could then end well."""
    from rlk_repro.agent.progress import read_state

    run_dir = launched.run_dir
    state = read_state(run_dir)
    code = None if state is None else state.exit_code
    refusal = None if code is None else _REFUSALS.get(code)
    if state is not None and refusal is not None:
        hint = f"see {run_dir.agent_log}" if code == EXIT_BUG else None
        return refusal(*(Problem(run_dir.run_id, line, hint=hint) for line in state.message.splitlines() or [""]))
    reason = poll(launched).reason or "its agent left no word"
    log = _find_output(launched) if code is None else run_dir.agent_log
    return CheckFailed(
        Problem(run_dir.run_id, f"ended without being sealed ({reason})", expected="a sealed bundle",
                hint=f"see {log}, then rlk-repro submit --resume {run_dir.run_id}")
    )  # fmt: skip


def _find_output(launched: Launched) -> Path:
    """What was printed outside of the agent's own log: by the batch script where the cluster has one."""
    by_script = launched.run_dir.job_output(launched.submission.job_id.partition(";")[0])
    return by_script if by_script.is_file() else launched.run_dir.agent_output


# by the exit code of an agent that was not interrupted: sent again, the same job would end in the same way
_REFUSALS: Final[dict[int, type[RlkReproError]]] = {
    error.exit_code: error for error in (CheckFailed, SpecError, EnvironmentMissing, BundleUnreadable, RlkReproError)
}
