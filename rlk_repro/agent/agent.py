"""Run one node's agent, as leader or follower."""

from __future__ import annotations

from rlk_repro.agent.follower import Follower
from rlk_repro.agent.leader import Leader
from rlk_repro.agent.lock import RunLock
from rlk_repro.agent.parts import Agent, NodePlace, Parts, real_parts
from rlk_repro.base.errors import code_after
from rlk_repro.base.stop import Stop
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.state import Phase, ProgressWriter
from rlk_repro.workloads import WORKLOADS


def run_agent(run_dir: RunDir, place: NodePlace, *, parts: Parts | None = None) -> int:
    """Run this node's agent to its end and return its exit code.

    Raises:
        BundleUnreadable: no plan can be read.
        SpecError: another agent runs in the directory.
        EnvironmentMissing: the directory cannot be locked, or the leader of this node is lost.
    """
    plan = Plan.load(run_dir.plan)
    parts = real_parts(WORKLOADS[plan.run.workload.kind]) if parts is None else parts
    agent = Agent(plan=plan, run_dir=run_dir, place=place, parts=parts, stop=Stop())
    with agent.stop.installed():
        return _lead(agent) if place.is_leader else Follower(agent).run()


def _lead(agent: Agent) -> int:
    run_dir, stop = agent.run_dir, agent.stop
    progress = ProgressWriter(run_dir, len(agent.plan.trials), agent.plan.num_steps)
    with RunLock(agent, lambda message: progress.enter(Phase.PREFLIGHT, message)) as lock:
        if not lock.is_taken:
            code = code_after(stop.signal)
            progress.end(code, f"stopped by {stop.signal.name}" if stop.signal else "")
            return code
        if run_dir.is_sealed:
            progress.end(0, "sealed by an earlier agent")
            return 0
        return Leader(agent, progress).run()
