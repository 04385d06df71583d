"""Read the results of a finished run, or the reason why the run was not sealed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlk_repro.analysis.allocations import list_allocations
from rlk_repro.base.console import Tell, silence
from rlk_repro.base.errors import (
    EXIT_BUG,
    HINT,
    BundleUnreadable,
    CheckFailed,
    EnvironmentMissing,
    Problem,
    RlkReproError,
    SpecError,
)
from rlk_repro.base.files import MAX_ANALYSIS_BYTES, load_json, read_end, sha256_file
from rlk_repro.base.secrets import scrub
from rlk_repro.clusters.registry import get_backend
from rlk_repro.plan import Plan
from rlk_repro.rundir.manifest import load_manifests
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import Analysis, TrialStatus
from rlk_repro.rundir.state import Progress, read_state
from rlk_repro.submit.authored import describe_rule_changes, find_flags
from rlk_repro.submit.consent import find_shipped_pins
from rlk_repro.submit.sending import Launched, load_submission, poll
from rlk_repro.workloads.differences import list_differences, read_differences

if TYPE_CHECKING:
    from rlk_repro.report import Context


@dataclass(frozen=True, kw_only=True)
class Result:
    analysis: Analysis
    bundle: Path
    bundle_id: str
    report: Path
    context: Context
    is_ok: bool

    def describe(self) -> dict[str, Any]:
        """Return what ``submit --wait --json`` prints."""
        verdict = self.analysis.verdict
        answer = {"verdict": verdict.word.value, "headline": verdict.headline, "bundle": str(self.bundle)}
        return {**answer, "bundle_id": self.bundle_id, "report": str(self.report), "is_ok": self.is_ok}


def report_context(run_dir: RunDir, bundle: Path, *, is_linked: bool = True) -> Context:
    """Return what a report shows beside the analysis; ``bundle`` is the bundle's path in the report's commands."""
    from rlk_repro.report import Context
    from rlk_repro.report.setting import describe_setting, find_limits, find_own_work

    plan = Plan.load(run_dir.plan)
    run = plan.run
    recorded = read_differences(plan, run_dir)
    return Context(
        plan=plan,
        setting=describe_setting(plan),
        flags=find_flags(plan),
        rule_changes=describe_rule_changes(plan),
        differences=list_differences(plan) if recorded is None else recorded,
        is_as_planned=recorded is None,
        is_sealed=run_dir.is_sealed,
        own_work=find_own_work(plan),
        bundle=str(bundle),
        run_directory=".." if is_linked else "",
        manifests=load_manifests(run_dir),
        allocations=tuple(list_allocations(plan, run_dir, list(plan.groups()))),
        may_claim=() if run.implementation_title else run.may_claim,  # the run file means RL-Kernel
        may_not_claim=find_limits(plan),
        shipped_pins=tuple(find_shipped_pins(plan.stack)),
    )


def finish(launched: Launched, tell: Tell = silence) -> Result:
    """Read the results of a finished run, and write its report beside them.

    Raises:
        RlkReproError: the run was not sealed; the exit code of the run's agent decides the class of the error.
    """
    from rlk_repro.report import write_report

    run_dir = launched.run_dir
    backend = get_backend(launched.submission.cluster)
    if backend.IS_REMOTE:
        backend.collect(launched.submission, run_dir, tell)
    if not run_dir.is_sealed:
        raise _explain_end(launched)
    bundle = backend.collect(launched.submission, run_dir)
    analysis = Analysis.from_json(load_json(run_dir.analysis, max_bytes=MAX_ANALYSIS_BYTES), str(run_dir.analysis))
    bundle_id = sha256_file(run_dir.checksums)
    context = replace(report_context(run_dir, bundle), bundle_id=bundle_id)
    report = write_report(analysis, run_dir.report, context)
    is_ok = all(trial.status is TrialStatus.OK for trial in analysis.trials)
    if analysis.microbatches:  # these trials end when memory runs out
        is_ok = all(result.largest is not None for result in analysis.microbatches)
    context = replace(context, report=str(report))
    return Result(analysis=analysis, bundle=bundle, bundle_id=bundle_id, report=report, context=context, is_ok=is_ok)


def is_worth_resuming(run_dir: RunDir, state: Progress | None) -> bool:
    """Tell whether an ended run is worth resuming: its agent was killed or was asked to stop."""
    code = None if state is None else state.exit_code
    return not run_dir.is_sealed and (code is None or code not in _REFUSALS)


def is_uncollected(run_dir: RunDir, state: Progress | None) -> bool:
    """Tell whether a remote run's bundle and the exit code of its agent are both missing on this machine."""
    has_end = state is not None and state.exit_code is not None
    return is_remote(run_dir) and not has_end and not run_dir.bundle.is_file()


def is_remote(run_dir: RunDir) -> bool:
    submission = load_submission(run_dir)
    return submission is not None and get_backend(submission.cluster).IS_REMOTE


def find_agent_log(run_dir: RunDir) -> str:
    """Return the path of the agent's log, or what brings a remote run's log to this machine."""
    if is_remote(run_dir) and not run_dir.agent_log.is_file():
        return f"rlk-repro collect {run_dir.run_id} brings it"
    return str(run_dir.agent_log)


def _explain_end(launched: Launched) -> RlkReproError:
    run_dir = launched.run_dir
    state = read_state(run_dir)
    code = None if state is None else state.exit_code
    refusal = None if code is None else _REFUSALS.get(code)
    if state is not None and refusal is not None:
        hint = f"see {run_dir.agent_log}" if code == EXIT_BUG else None
        return refusal(*_list_problems(run_dir.run_id, state.message, hint))
    reason = poll(launched).reason or "the agent gave no reason"
    log = run_dir.agent_log
    if code is None:
        by_script = run_dir.job_output(launched.submission.job_id)
        log = by_script if by_script.is_file() else run_dir.agent_output
    return CheckFailed(
        Problem(run_dir.run_id, f"ended without being sealed ({reason})", expected="a sealed bundle",
                quoted=_read_end(log) if code is None else (),
                hint=f"see {log}, then rlk-repro submit --resume {run_dir.run_id}")
    )  # fmt: skip


def _list_problems(where: str, message: str, hint: str | None) -> list[Problem]:
    found: list[Problem] = []
    for line in message.splitlines() or [""]:
        if found and line.startswith(HINT):
            found[-1] = replace(found[-1], hint=line.removeprefix(HINT))
        else:
            found.append(Problem(where, line, hint=hint))
    return found


def _read_end(log: Path) -> tuple[str, ...]:
    lines = read_end(log, MAX_SHOWN_BYTES).decode(errors="replace").splitlines()
    return tuple(scrub(line) for line in lines if line.strip())[-MAX_SHOWN_LINES:]


MAX_SHOWN_LINES: Final = 10
MAX_SHOWN_BYTES: Final = 8192
# These exit codes of an uninterrupted agent are final: the same job, submitted again, would end in the same way.
_REFUSALS: Final[dict[int, type[RlkReproError]]] = {
    error.exit_code: error for error in (CheckFailed, SpecError, EnvironmentMissing, BundleUnreadable, RlkReproError)
}
