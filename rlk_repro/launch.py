"""From what a user asked for to a submission, and from a finished run directory to its result.

Everything that ``submit``, ``replay`` and their ``--dry-run`` share; the steps of a job are in ``rlk_repro.job``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlk_repro.backends import get_backend
from rlk_repro.backends.api import Job, JobState, Status, Submission
from rlk_repro.errors import CheckFailed, EnvironmentMissing, Problem, SpecError
from rlk_repro.files import load_json, sha256_file, write_json
from rlk_repro.manifest import Manifest
from rlk_repro.plan import BASELINE, ENABLED, Plan, flag_overrides, make_plan
from rlk_repro.resources import hardware_folders, list_names, profile_folders, run_folders, stack_folders
from rlk_repro.results import Analysis, TrialStatus
from rlk_repro.rundir import RunDir
from rlk_repro.specfile import Loaded, load_hardware, load_profile, load_run, load_stack, parse_overrides
from rlk_repro.stage import Inputs, new_run_dir, stage
from rlk_repro.store import find_run_dir

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
    """Planned and rendered; nothing has been written or sent."""

    plan: Plan
    inputs: Inputs
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


def render(plan: Plan, inputs: Inputs) -> Prepared:
    """Render a plan for its cluster; pure but for the choice of a new run id."""
    run_dir = new_run_dir(plan)
    job = get_backend(plan.cluster).render(plan, run_dir)
    return Prepared(plan=plan, inputs=inputs, run_dir=run_dir, job=job)


def resolve_profile(name: str | None, cluster: str | None) -> Loaded[Any]:
    """The profile by name or file; ``local`` by default on the local cluster only.

    Raises:
        SpecError: none given for a real cluster, or a profile made for another cluster.
    """
    wanted = cluster or LOCAL
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
    """Write the run directory and send exactly the rendered job.

    Raises:
        EnvironmentMissing: this machine has no such cluster.
        SchedulerRefused: the scheduler said no.
    """
    backend = get_backend(prepared.plan.cluster)
    reason = backend.available()
    if reason is not None:
        raise EnvironmentMissing(Problem(prepared.plan.cluster, reason, hint="--dry-run works anywhere"))
    stage(prepared.plan, prepared.inputs, prepared.run_dir, prepared.job)
    submission = backend.submit(prepared.job, prepared.run_dir)
    extra = {**submission.details, **dict(details)}
    submission = Submission(cluster=submission.cluster, job_id=submission.job_id,
                            submitted_at=submission.submitted_at, details=extra)  # fmt: skip
    write_json(prepared.run_dir.submission, submission.to_json())
    return Launched(run_dir=prepared.run_dir, submission=submission)


def resume(name: str) -> Launched:
    """Submit the same job again; the agent redoes whole pairs that are incomplete.

    Raises:
        CheckFailed: the run is sealed, or still running.
    """
    run_dir = find_run_dir(name)
    if run_dir.is_sealed:
        raise CheckFailed(Problem(run_dir.run_id, "is sealed: every trial has run", hint="submit it again for more"))
    plan = load_plan(run_dir)
    backend = get_backend(plan.cluster)
    previous = load_submission(run_dir)
    if previous is not None and backend.poll(previous).state not in _AT_REST:
        raise CheckFailed(Problem(run_dir.run_id, "is still running", hint=f"rlk-repro cancel {run_dir.run_id}"))
    submission = backend.submit(backend.render(plan, run_dir), run_dir)
    write_json(run_dir.submission, submission.to_json())
    return Launched(run_dir=run_dir, submission=submission)


_AT_REST: Final = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED, JobState.UNKNOWN})


def load_plan(run_dir: RunDir) -> Plan:
    return Plan.from_json(load_json(run_dir.plan), str(run_dir.plan))


def load_submission(run_dir: RunDir) -> Submission | None:
    """The submission record, or None where the directory was never submitted."""
    if not run_dir.submission.is_file():
        return None
    return Submission.from_json(load_json(run_dir.submission), str(run_dir.submission))


def poll(launched: Launched) -> Status:
    return get_backend(launched.submission.cluster).poll(launched.submission)


def wait(launched: Launched, tell: Callable[[str], None]) -> None:
    """Stay until the submission ends, with live progress on a terminal; an interrupt leaves the job running."""
    from rlk_repro.console import live_line
    from rlk_repro.job.progress import follow

    try:
        with live_line() as line:
            follow(launched.run_dir, lambda: poll(launched), line.tell, is_live=line.is_live)
    except KeyboardInterrupt:
        tell(f"the run goes on; stop it with: rlk-repro cancel {launched.run_dir.run_id}")
        raise


def report_context(run_dir: RunDir, bundle: Path, *, is_linked: bool = True) -> Context:
    """What a report shows beside the analysis: manifests, the run's own claims, links to the logs where they lie.

    ``bundle`` is its path as the shown commands should have it.
    """
    from rlk_repro.report import Context

    run = load_plan(run_dir).run
    return Context(
        bundle=str(bundle),
        run_directory=".." if is_linked else "",
        manifests=load_manifests(run_dir),
        may_claim=run.may_claim,
        may_not_claim=run.may_not_claim,
    )


def load_manifests(run_dir: RunDir) -> tuple[Manifest, ...]:
    return tuple(
        Manifest.from_json(load_json(node.manifest), str(node.manifest))
        for node in run_dir.node_dirs()
        if node.manifest.is_file()
    )


def finish(launched: Launched) -> Result:
    """Read what a finished run left, and write its report beside it.

    Raises:
        CheckFailed: the run was not sealed; what there is can be collected and resumed.
    """
    from rlk_repro.report import write_report

    run_dir = launched.run_dir
    if not run_dir.is_sealed:
        raise CheckFailed(
            Problem(run_dir.run_id, "ended without being sealed", expected="a sealed bundle",
                    hint=f"see {run_dir.agent_log}, then rlk-repro submit --resume {run_dir.run_id}")
        )  # fmt: skip
    bundle = get_backend(launched.submission.cluster).collect(launched.submission, run_dir)
    analysis = Analysis.from_json(load_json(run_dir.analysis), str(run_dir.analysis))
    report = write_report(analysis, run_dir.report, report_context(run_dir, Path(bundle.name)))
    is_ok = all(trial.status is TrialStatus.OK for trial in analysis.trials)
    return Result(analysis=analysis, bundle=bundle, bundle_id=sha256_file(run_dir.checksums),
                  report=report.html, is_ok=is_ok)  # fmt: skip
