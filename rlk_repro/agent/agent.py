"""Run one node's agent, as leader or follower."""

from __future__ import annotations

from rlk_repro.agent.follower import follow_leader
from rlk_repro.agent.leader import Leader
from rlk_repro.agent.lock import RunLock
from rlk_repro.agent.node import write_preflight
from rlk_repro.agent.parts import NodePlace, Parts, real_parts
from rlk_repro.agent.progress import ProgressWriter
from rlk_repro.agent.stop import Stop
from rlk_repro.base.errors import BundleUnreadable, Problem, SpecError, code_after
from rlk_repro.base.findings import Finding, Level
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.state import Phase
from rlk_repro.workloads import WORKLOADS


def run_agent(run_dir: RunDir, place: NodePlace, *, is_resuming: bool, parts: Parts | None = None) -> int:
    """Run this node's agent to its end and return its exit code.

    Raises:
        BundleUnreadable: no plan can be read.
        SpecError: the directory is sealed, another agent runs in it, or it holds trials and ``is_resuming`` is false.
        EnvironmentMissing: the directory cannot be locked, or the leader of this node is lost.
    """
    plan = _load_plan(run_dir, place)
    parts = real_parts(WORKLOADS[plan.run.workload.kind]) if parts is None else parts
    stop = Stop()
    with stop.installed():
        if not place.is_leader:
            return follow_leader(plan, run_dir, place, parts, stop)
        progress = ProgressWriter(run_dir, len(plan.trials), plan.num_steps)

        def tell(message: str) -> None:
            progress.enter(Phase.PREFLIGHT, message)

        with RunLock(run_dir, place, parts.deadlines, stop, tell) as lock:
            if not lock.is_taken:
                progress.end(code_after(stop.signal), f"stopped by {stop.signal.name}" if stop.signal else "")
                return code_after(stop.signal)
            if run_dir.is_sealed and is_resuming:
                progress.end(0, "sealed by an earlier agent")
                return 0
            _check_unfinished(run_dir, is_resuming=is_resuming)
            return Leader(plan, run_dir, place, parts, stop, progress).run()


def _load_plan(run_dir: RunDir, place: NodePlace) -> Plan:
    try:
        return Plan.load(run_dir.plan)
    except BundleUnreadable as error:
        if run_dir.root.is_dir() and not run_dir.is_sealed:
            write_preflight(run_dir, place, [Finding(Level.BLOCKING, "plan", "readable", error.problems[0].what)])
        raise


def _check_unfinished(run_dir: RunDir, *, is_resuming: bool) -> None:
    if run_dir.is_sealed:
        raise SpecError(Problem(str(run_dir.root), "is already complete and sealed", hint="submit a new run"))
    if not is_resuming and run_dir.trial_dirs():
        raise SpecError(
            Problem(str(run_dir.root), "holds trials of an earlier agent", expected="a new run directory",
                    hint="add --resume to run incomplete pairs again")
        )  # fmt: skip
