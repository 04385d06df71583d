"""Run on this machine: one node agent, started detached from this process.

The agent is identified by pid, start time and standard output: a later process can have the same pid, and a copied run
directory names an agent of the original.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from rlk_repro.base import proc, procfs
from rlk_repro.base.console import Tell, silence
from rlk_repro.base.disk import open_stream
from rlk_repro.base.errors import EnvironmentMissing, Problem, SpecError
from rlk_repro.base.files import dump_json
from rlk_repro.base.findings import Finding, sort_findings
from rlk_repro.base.units import utc_now
from rlk_repro.clusters.api import Bound, Job, JobState, JobStatus, Submission, TrialLine
from rlk_repro.clusters.asking import describe_lost, require_ended
from rlk_repro.clusters.profiles import Ask, Proposal, load_all_hardware, name_hardware
from rlk_repro.clusters.triallogs import read_logs
from rlk_repro.plan import Plan
from rlk_repro.probes.gpu import count_gpus
from rlk_repro.probes.gpu_use import VISIBLE
from rlk_repro.probes.host import divide_cores
from rlk_repro.rundir.manifest import Fact, Manifest
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.state import read_last_word
from rlk_repro.spec import Hardware, Layout, Profile

AGENT: Final = ("-m", "rlk_repro.job")
COMMAND_FILE: Final = "command.json"
SCHEMA: Final = 1
CLIENT: Final = None
IS_REMOTE: Final = False
_AGENTS: Final[list[object]] = []
"""Agents that outlive this process; Python warns if the handle of a running process goes."""


def available() -> str | None:
    return None


def render(plan: Plan, run_dir: RunDir, *, nodes: Sequence[str] = ()) -> Job:
    problems = [*_find_problems(plan, nodes)]
    if problems:
        raise SpecError(*problems)
    share = _take_share(plan.profile.gpus)
    argv = [*share, "python", *AGENT, "RUN_DIR"]
    record = {"schema": SCHEMA, "argv": argv, "experiment_hash": plan.experiment_hash}
    command = (*share, sys.executable, *AGENT, str(run_dir.root.absolute()))
    return Job(files={COMMAND_FILE: dump_json(record).decode()}, command=command)


def _take_share(gpus: Sequence[int]) -> tuple[str, ...]:
    """Return the words before a command that give it ``gpus`` and a like share of the processors."""
    if not gpus:
        return ()
    words = ["env", f"{VISIBLE}={','.join(map(str, gpus))}"]
    shares = divide_cores(count_gpus())
    processors = sorted(number for gpu in gpus for number in shares.get(gpu, ()))
    if processors:
        words += ["taskset", "--cpu-list", ",".join(map(str, processors))]
    return tuple(words)


def _find_problems(plan: Plan, nodes: Sequence[str]) -> Iterator[Problem]:
    here = platform.node()
    if set(nodes) - {here}:
        yield Problem("--same-nodes", "the local cluster is this machine", got=", ".join(nodes), expected=here)
    if plan.stack.images and plan.hardware.image_platform not in plan.stack.locks:
        yield Problem(f"stack {plan.stack.stack}", "runs in images, but the local cluster starts no containers",
                      expected="a stack with a lock, or one without images",
                      hint="--stack host uses the software of this machine")  # fmt: skip
    if plan.profile.gpus:
        yield from _find_gpu_problems(plan.profile.gpus, plan.layout.gpus_per_node)
    if plan.layout.num_nodes > 1:
        where = f"run {plan.run.run}: layouts.{plan.hardware.hardware}.num_nodes"
        yield Problem(where, "the local cluster has one node", got=plan.layout.num_nodes, expected="1")


def _find_gpu_problems(gpus: Sequence[int], wanted: int) -> Iterator[Problem]:
    numbers, num_gpus = ", ".join(map(str, gpus)), count_gpus()
    if len(set(gpus)) != wanted:
        expected = f"{wanted} of this machine's GPUs, as the run uses"
        yield Problem("--gpus", "not the run's number of GPUs", got=numbers, expected=expected)
    elif num_gpus and max(gpus) >= num_gpus:
        yield Problem("--gpus", "no such GPU", got=numbers, expected=f"numbers from 0 to {num_gpus - 1}")


def submit(job: Job, run_dir: RunDir) -> Submission:
    """Start the agent in its own session, so that it outlives this process."""
    for earlier in (run_dir.state, run_dir.bundle):
        earlier.unlink(missing_ok=True)
    with open_stream(run_dir.agent_output, "ab") as output:
        agent = proc.start(job.command, output_fd=output.fileno(), env={**os.environ, **job.env})
    _AGENTS.append(agent)
    stat = procfs.read_stat(agent.pid)
    return Submission(
        cluster="local",
        job_id=f"{agent.pid}:{stat.start_ticks if stat else 0}",
        submitted_at=utc_now(),
        details={"host": platform.node()},
    )


def poll(submission: Submission, run_dir: RunDir) -> JobStatus:
    elsewhere = _find_other_host(submission)
    if elsewhere is not None:
        return JobStatus(state=JobState.UNKNOWN, reason=elsewhere)
    if _find_pid(submission, run_dir) is not None:
        return JobStatus(state=JobState.RUNNING)
    if not run_dir.plan.is_file():
        return describe_lost(f"process {submission.job_id}")
    return _describe_end(run_dir)


def poll_all(items: Sequence[tuple[Submission, RunDir]]) -> list[JobStatus]:
    return [poll(submission, run_dir) for submission, run_dir in items]


def logs(submission: Submission, run_dir: RunDir, *, is_following: bool) -> Iterator[TrialLine]:
    return read_logs(run_dir, lambda: not is_following or poll(submission, run_dir).state is not JobState.RUNNING)


def cancel(submission: Submission, run_dir: RunDir) -> bool:
    _require_this_host(submission, run_dir)
    pid = _find_pid(submission, run_dir)
    if pid is None:
        return False
    try:
        return proc.signal_process(pid, signal.SIGTERM)
    except PermissionError:
        raise EnvironmentMissing(Problem(run_dir.run_id, "was started by another user")) from None


def collect(submission: Submission, run_dir: RunDir, tell: Tell = silence) -> Path:
    """Return the bundle; if a killed agent left no bundle, pack the run directory first."""
    from rlk_repro.bundle.seal import pack

    if run_dir.is_sealed and run_dir.bundle.is_file():
        return run_dir.bundle
    _require_this_host(submission, run_dir)
    require_ended(poll(submission, run_dir), run_dir)
    tell(f"packing run directory {run_dir.root}")
    return pack(run_dir)


def find_bound(plan: Plan) -> Bound | None:  # noqa: ARG001
    return None


def propose_profile(ask: Ask) -> tuple[Proposal, str]:  # noqa: ARG001
    from rlk_repro.probes import gpu

    found = _find_hardware(gpu.probe())
    values = {"schema": 1, "profile": "here", "cluster": "local", "purpose": "This machine."}
    if found is not None:
        return Proposal(values={**values, "hardware": found}), "this machine"
    remark = "rlk-repro knows no hardware with these GPUs: submit with --hardware"
    return Proposal(values=values, remarks=[remark]), "this machine"


def guess_hardware(manifest: Manifest) -> Hardware:
    """Guess this machine's hardware by the names of its GPUs; if no name is known, return hardware without GPUs."""
    hardware = load_all_hardware()
    return hardware[_find_hardware(manifest.sections.get("gpu", {})) or "cpu"]


def _find_hardware(facts: Mapping[str, Fact]) -> str | None:
    devices = facts.get("devices")
    names = [str(device.get("name")) for device in devices] if isinstance(devices, list) else []
    return name_hardware(names, (), load_all_hardware()) if names else "cpu"


def check_profile(profile: Profile, plan: Plan | None) -> list[Finding]:
    """Run preflight's checks on this machine, except the checks of the run directory and the trainer's modules."""
    from rlk_repro.agent.preflight.checks import judge
    from rlk_repro.agent.preflight.facts import Facts
    from rlk_repro.probes.gpu import busy_gpus
    from rlk_repro.probes.node import probe_node

    hardware = load_all_hardware()
    name = plan.hardware.hardware if plan is not None else profile.hardware or "cpu"
    if name not in hardware:
        raise SpecError(Problem(f"profile {profile.profile}: hardware", "no such hardware", got=name))
    model = hardware[name]
    layout = Layout(gpus_per_node=model.gpus_per_node)
    manifest = probe_node("here")
    facts = Facts(manifest=manifest, hardware=model, layout=layout, limits=profile.preflight, busy=busy_gpus())
    return sort_findings(judge(facts))


def _find_other_host(submission: Submission) -> str | None:
    host = submission.details.get("host")
    here = platform.node()
    return None if host in {None, here} else f"the run was started on {host}, but this machine is {here}"


def _require_this_host(submission: Submission, run_dir: RunDir) -> None:
    elsewhere = _find_other_host(submission)
    if elsewhere is not None:
        host = submission.details["host"]
        raise EnvironmentMissing(
            Problem(run_dir.run_id, elsewhere, hint=f"run this command on {host}, which knows the run's state")
        )


def _find_pid(submission: Submission, run_dir: RunDir) -> int | None:
    pid, _, start_ticks = submission.job_id.partition(":")
    if not (pid.isdecimal() and start_ticks.isdecimal()):
        return None
    stat = procfs.read_stat(int(pid))
    is_same = stat is not None and stat.is_running and stat.start_ticks == int(start_ticks)
    return int(pid) if is_same and _has_output(int(pid), run_dir.agent_output) else None


def _has_output(pid: int, path: Path) -> bool:
    """Whether a process writes its standard output to exactly this file, even after the file was moved."""
    try:
        return path.samefile(f"/proc/{pid}/fd/1")
    except PermissionError:  # another user's process: only pid and start time can be compared
        return True
    except OSError:
        return False


def _describe_end(run_dir: RunDir) -> JobStatus:
    last = read_last_word(run_dir)
    if run_dir.is_sealed:
        return JobStatus(state=JobState.DONE, reason=last.line)
    if last.exit_code is None:
        return JobStatus(state=JobState.FAILED, reason="the agent was killed or crashed without a report")
    return JobStatus(state=JobState.CANCELLED if last.is_interrupted else JobState.FAILED, reason=last.line)
