"""Run one node's agent, as leader or follower."""

from __future__ import annotations

from rlk_repro.agent.follower import Follower
from rlk_repro.agent.leader import Leader
from rlk_repro.agent.lock import RunLock
from rlk_repro.agent.node import write_preflight
from rlk_repro.agent.parts import Agent, NodePlace, Parts, real_parts
from rlk_repro.base.errors import BundleUnreadable, Problem, SpecError, code_after
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.stop import Stop
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.progress import ProgressWriter
from rlk_repro.rundir.state import Phase
from rlk_repro.workloads import WORKLOADS


def run_agent(run_dir: RunDir, place: NodePlace, *, is_resuming: bool, parts: Parts | None = None) -> int:
    """Run this node's agent to its end and return its exit code.

    Raises:
        BundleUnreadable: no plan can be read.
        SpecError: the directory is sealed, another agent runs in it, or it holds trials and ``is_resuming`` is false.
        EnvironmentMissing: the directory cannot be locked, or the leader of this node is lost.
    """
    try:
        plan = Plan.load(run_dir.plan)
    except BundleUnreadable as error:
        if run_dir.root.is_dir() and not run_dir.is_sealed:
            write_preflight(run_dir, place, [Finding(Level.BLOCKING, "plan", "readable", error.problems[0].what)])
        raise
    parts = real_parts(WORKLOADS[plan.run.workload.kind]) if parts is None else parts
    agent = Agent(plan=plan, run_dir=run_dir, place=place, parts=parts, stop=Stop())
    with agent.stop.installed():
        return _lead(agent, is_resuming=is_resuming) if place.is_leader else Follower(agent).run()


def _lead(agent: Agent, *, is_resuming: bool) -> int:
    run_dir, stop = agent.run_dir, agent.stop
    progress = ProgressWriter(run_dir, len(agent.plan.trials), agent.plan.num_steps)
    with RunLock(agent, lambda message: progress.enter(Phase.PREFLIGHT, message)) as lock:
        if not lock.is_taken:
            code = code_after(stop.signal)
            progress.end(code, f"stopped by {stop.signal.name}" if stop.signal else "")
            return code
        if run_dir.is_sealed:
            if not is_resuming:
                raise SpecError(Problem(str(run_dir.root), "is already complete and sealed", hint="submit a new run"))
            progress.end(0, "sealed by an earlier agent")
            return 0
        if run_dir.trial_dirs() and not is_resuming:
            raise SpecError(
                Problem(str(run_dir.root), "holds trials of an earlier agent", expected="a new run directory",
                        hint="add --resume to run incomplete pairs again")
            )  # fmt: skip
        return Leader(agent, progress).run()
