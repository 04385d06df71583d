"""Run one command of the plan and record it: command, environment, log, and how it ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlk_repro.agent.ends import judge
from rlk_repro.agent.parts import Agent
from rlk_repro.agent.process import Ended, StopTimes, no_trouble, run_guarded
from rlk_repro.base.disk import writing
from rlk_repro.base.files import write_json
from rlk_repro.base.logwriter import LogWriter
from rlk_repro.base.places import hide_places, make_hider
from rlk_repro.base.secrets import Scrubber, scrub_argv
from rlk_repro.base.stop import Stop
from rlk_repro.base.units import format_utc, utc_now
from rlk_repro.probes import environment
from rlk_repro.probes.host import count_oom_kills
from rlk_repro.rundir.exits import EXIT_SCHEMA
from rlk_repro.rundir.paths import RunDir, TrialDir
from rlk_repro.rundir.results import TrialStatus
from rlk_repro.workloads.api import Command
from rlk_repro.workloads.environment import resolve_env

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    status: TrialStatus
    reason: str
    ended: Ended
    started_unix_s: float

    def to_json(self, allocation: str) -> dict[str, Any]:
        return {
            "schema": EXIT_SCHEMA,
            "status": self.status.value,
            "code": self.ended.code,
            "signal": None if self.ended.signal is None else self.ended.signal.name,
            "reason": self.reason,
            "allocation": allocation,
            "started_at": format_utc(self.started_unix_s),
            "ended_at": format_utc(self.started_unix_s + self.ended.duration_s),
            "duration_s": self.ended.duration_s,
        }


@dataclass(frozen=True, kw_only=True)
class TrialWatch:
    """What an agent adds to a command: the allocation's variables (not recorded), and functions called during the run.

    ``see_output`` gets whole log lines without secrets.  ``find_trouble`` returns why the command must end, or an empty
    text; ``settle`` returns the final outcome.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    see_output: Callable[[bytes], object] = lambda _: None
    see_pid: Callable[[int], object] = lambda _: None
    find_trouble: Callable[[], str] = no_trouble
    settle: Callable[[Outcome], Outcome] = lambda outcome: outcome


def run_trial(agent: Agent, command: Command, folder: TrialDir, limits: StopTimes, watch: TrialWatch) -> Outcome:
    """Run one trial in its new folder; ``exit.json`` is written last, and never in part.

    Raises:
        SpecError: a variable of ``from_env`` is not set.
    """
    run_dir, env = agent.run_dir, resolve_env(command, os.environ)
    with writing(folder.path):
        folder.path.mkdir(parents=True)
        folder.ops.mkdir()
        folder.libraries.mkdir()
    write_json(folder.command, record_command(command, run_dir))
    write_json(folder.env, record_env(command, run_dir, env))
    found = run_command(command, folder.stdout, run_dir, limits=limits, stop=agent.stop, watch=watch)
    outcome = replace(found, reason=hide_places(found.reason, run_dir.root))
    write_json(folder.exit, outcome.to_json(agent.place.allocation))
    return outcome


def run_command(
    command: Command, log: Path, run_dir: RunDir, *, limits: StopTimes, stop: Stop, watch: TrialWatch
) -> Outcome:
    """Run a command and write its output to ``log``; secrets are removed, and names replace this machine's folders."""
    hide = make_hider(run_dir.root)
    env = resolve_env(replace(command, env={**command.env, **watch.env}), os.environ)
    scrubber = Scrubber.from_environment(named=command.from_env.values())
    num_oom_kills = count_oom_kills()
    started_unix_s = time.time()
    with LogWriter(log, lambda block: hide(scrubber.bytes(block)), utc_now, scrubber.find_open) as writer:

        def see_output(data: bytes) -> None:
            block = writer.feed(data)
            if block:
                watch.see_output(block)

        ended = run_guarded(
            command.argv,
            env,
            limits=limits,
            stop=stop,
            cwd=run_dir.root,  # Ray lets every worker import from the folder in which the trainer started
            see_output=see_output,
            see_pid=watch.see_pid,
            find_trouble=watch.find_trouble,
        )
    has_oom_kill = num_oom_kills is not None and (count_oom_kills() or 0) > num_oom_kills
    status, reason = judge(ended, writer.tail, has_oom_kill=has_oom_kill)
    return watch.settle(Outcome(status=status, reason=reason, ended=ended, started_unix_s=started_unix_s))


def record_command(command: Command, run_dir: RunDir) -> dict[str, Any]:
    """Return the content of ``command.json``; names such as ``{run_dir}`` replace this machine's folders."""
    scrubber = Scrubber.from_environment(named=command.from_env.values())
    argv = [scrubber.text(part) for part in scrub_argv(command.argv)]
    return {"schema": SCHEMA, "argv": [hide_places(part, run_dir.root) for part in argv]}


def record_env(command: Command, run_dir: RunDir, env: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of ``env.json``: variables that the command sets, and inherited ones that affect a run."""
    scrubber = Scrubber.from_environment(named=command.from_env.values())
    recorded = environment.select(env) | {name: scrubber.text(value) for name, value in command.env.items()}
    recorded |= {name: f"<from {source}>" for name, source in command.from_env.items()}
    return {"schema": SCHEMA, "env": {name: hide_places(value, run_dir.root) for name, value in recorded.items()}}
