"""Run the leading agent: preflight, stored rollouts, trials in plan order, analysis, seal, pack.

The run directory is always packed; it is sealed only when every trial has run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from rlk_repro.agent.budget import Budget
from rlk_repro.agent.journal import Journal
from rlk_repro.agent.node import (
    describe_node,
    find_unlike_nodes,
    make_sampler,
    read_preflight,
    wait_for,
    write_preflight,
)
from rlk_repro.agent.outcome import is_good_end
from rlk_repro.agent.parts import NodePlace, Parts
from rlk_repro.agent.preflight.gpu import find_busy, wait_until_idle
from rlk_repro.agent.preflight.parts import record_prepared
from rlk_repro.agent.process import StopTimes
from rlk_repro.agent.progress import ProgressWriter
from rlk_repro.agent.ray.member import RayMember
from rlk_repro.agent.ray.steps import Steps
from rlk_repro.agent.resume import find_open_trials, find_whole_pairs, set_aside
from rlk_repro.agent.rollouts import count_stored, lay_out_rollouts, store_rollouts
from rlk_repro.agent.step import Use, read_report
from rlk_repro.agent.stop import Stop
from rlk_repro.agent.telemetry import Current
from rlk_repro.agent.trial import Outcome, TrialWatch, run_command, run_trial
from rlk_repro.base.disk import Unwritable
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem, SpecError, code_after
from rlk_repro.base.files import write_bytes, write_json, write_text
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.secrets import Scrubber
from rlk_repro.plan import Plan, Trial
from rlk_repro.rundir.exits import read_exit
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import TrialStatus
from rlk_repro.rundir.state import Phase
from rlk_repro.workloads.api import Command
from rlk_repro.workloads.environment import profile_env, resolve_env

PREFLIGHT_HINT: Final = "docs/preflight.md says what each check needs, and how a profile turns a check into a warning"
MAX_FAILED_FIRST: Final = 4
"""The run stops when its first 4 trials (each variant twice) fail, because later trials would very likely fail too."""


class Leader:
    """The leading agent: ``run`` is called once, in the main thread, while the run directory is locked."""

    def __init__(
        self, plan: Plan, run_dir: RunDir, place: NodePlace, parts: Parts, stop: Stop, progress: ProgressWriter
    ) -> None:
        self._plan = plan
        self._run_dir = run_dir
        self._place = place
        self._parts = parts
        self._stop = stop
        scrubber = Scrubber.from_environment(named=profile_env(plan)[1].values())
        self._journal = Journal(run_dir, place.allocation, place.node, scrubber.text)
        self._progress = progress
        self._limits = StopTimes(time_limit_s=plan.time_limit_min * 60, grace_s=parts.deadlines.grace_s)
        self._current = Current()
        self._budget = Budget(place.until)
        self._findings: list[Finding] = []
        self._lost_early: list[str] = []
        member = RayMember(plan=plan, run_dir=run_dir, place=place, parts=parts, stop=stop)
        self._steps = Steps(member, self._journal.record, self._note)

    def run(self) -> int:
        """Run all steps and return the agent's exit code (docs/formats.md)."""
        self._steps.open()
        before = self._count_done()
        code, message = self._run_phases()
        if code and self._budget.is_over and self._count_done() > before:
            write_text(self._run_dir.again, self._place.allocation)
        if (self._steps.lost or self._lost_early) and self._stop.signal is None:
            write_text(self._run_dir.lost, self._place.allocation)
        with self._journal.phase("pack") as phase:
            self._parts.pack(self._run_dir)
        is_told = phase.error is None or (code != 0 and isinstance(phase.error, Unwritable))
        code = code or phase.exit_code
        self._progress.end(code, message if is_told else f"not packed: {phase.error}")
        self._journal.give_room()
        return code

    def _count_done(self) -> int:
        """Count the work that a later allocation does not repeat: complete pairs and sessions, stored rollouts."""
        return len(find_whole_pairs(self._plan, self._run_dir)) + count_stored(self._run_dir)

    def _run_phases(self) -> tuple[int, str]:
        phases: tuple[tuple[str, Callable[[], None]], ...] = (
            ("scheduler records", self._clean_records),
            ("set aside", self._set_aside),
            ("preflight", self._check_fitness),
            ("rollouts", self._store_rollouts),
            ("trials", self._run_trials),
            ("analyse", self._analyse),
        )
        code, message = 0, ""
        for name, do in phases:
            with self._journal.phase(name) as phase:
                do()
            if self._stop.signal is not None:
                code, message = code_after(self._stop.signal), f"stopped by {self._stop.signal.name}"
            elif phase.error is not None:
                code, message = phase.exit_code, f"{name}: {phase.error}"
            if code:
                break
        self._end_followers()
        return self._seal() if code == 0 else (code, message)

    def _clean_records(self) -> None:
        """Remove secrets from the output of Slurm's tools: a job's comment or command line may hold secrets."""
        for path in self._run_dir.scheduler.glob("*.txt"):
            text = path.read_text(errors="surrogateescape")
            clean = self._journal.clean(text)
            if clean != text:
                write_bytes(path, clean.encode(errors="surrogateescape"))

    def _set_aside(self) -> None:
        self._journal.keep_room()
        for name in set_aside(self._plan, self._run_dir):
            self._journal.record("set aside", trial=name)

    def _check_fitness(self) -> None:
        self._progress.enter(Phase.PREFLIGHT)
        problems = self._parts.workload.find_problems(self._plan)
        if problems:
            raise SpecError(*problems)
        for trial in self._plan.trials:
            resolve_env(self._make_command(trial), os.environ)
        record_prepared(self._plan, self._run_dir)
        self._findings = describe_node(self._plan, self._run_dir, self._place, self._parts, self._stop)
        others = [finding for node in self._place.followers for finding in self._collect_follower(node)]
        self._note(find_unlike_nodes(self._plan, self._run_dir, self._place))
        blocking = self._find_blocking(others)
        if blocking and self._plan.profile.preflight.on_blocking == "stop":
            self._lost_early = self._list_ended()
            *problems, last = (
                Problem(item.where, "preflight check failed", got=item.found, expected=item.expected)
                for item in blocking
            )
            raise EnvironmentMissing(*problems, replace(last, hint=PREFLIGHT_HINT))

    def _find_blocking(self, others: list[Finding]) -> list[Finding]:
        return [finding for finding in (*others, *self._findings) if finding.level is Level.BLOCKING]

    def _list_ended(self) -> list[str]:
        return [node for node in self._place.followers if self._has_left(node)]

    def _has_left(self, node: str) -> bool:
        return read_report(self._run_dir, node, self._place.allocation).has_left

    def _collect_follower(self, node: str) -> list[Finding]:
        read = partial(read_preflight, self._run_dir, node, self._place.allocation)
        deadline_s = self._parts.deadlines.followers_s
        wait_for(lambda: read() is not None or self._has_left(node), self._stop, deadline_s)
        if self._stop.signal is not None:
            return read() or []
        # whether the agent has left is read first: an agent writes its record before it leaves
        has_left, found = self._has_left(node), read()
        if found is not None:
            return found
        reason = "no record: the agent of this node has ended" if has_left else "no record"
        expected = f"a preflight record within {deadline_s:g} s"
        self._note([Finding(Level.BLOCKING, f"nodes.{node}", expected, reason)])
        return []

    def _store_rollouts(self) -> None:
        commands = self._parts.workload.rollout_commands(self._plan, self._run_dir)
        for number, (seed, command) in enumerate(commands.items(), start=1):
            self._progress.enter(Phase.PREPARING, f"storing rollouts {number} of {len(commands)}")
            store_rollouts(self._plan, self._run_dir, seed, command, partial(self._run_plainly, seed))
            if self._stop.signal is not None:
                return

    def _run_plainly(self, seed: int, command: Command, log: Path) -> Outcome:
        with self._serve(Use(seed=seed), command) as watch:
            limits = replace(self._limits, time_limit_s=self._plan.storing_limit_min * 60)
            return run_command(command, log, self._run_dir, limits=limits, stop=self._stop, watch=watch)

    @contextmanager
    def _serve(self, use: Use, command: Command) -> Iterator[TrialWatch]:
        with self._steps.serve(use, command) as watch:
            yield watch
        if self._steps.lost and self._stop.signal is None:
            raise EnvironmentMissing(
                *(Problem(f"nodes.{node}", f"is lost: {reason}") for node, reason in self._steps.lost.items())
            )

    def _note(self, findings: list[Finding]) -> None:
        if findings:
            self._findings += findings
            write_preflight(self._run_dir, self._place, self._findings)

    def _run_trials(self) -> None:
        trials = find_open_trials(self._plan, self._run_dir)
        with make_sampler(self._plan, self._run_dir, self._place, lambda: self._current):
            for number, trial in enumerate(trials):
                self._budget.begin(trial.pair)
                self._wait_until_idle(trial)
                if self._stop.signal is not None:
                    return
                with self._seeing_others(trial):
                    self._run_trial(trial, num_left=len(trials) - number)
                if trial is not trials[-1]:
                    self._require_one_that_ends_well()

    @contextmanager
    def _seeing_others(self, trial: Trial) -> Iterator[None]:
        """Look for other runs on this machine before and after a trial, because the local cluster has no scheduler."""
        look = self._parts.find_other_runs if self._plan.cluster == "local" else list
        before = look()
        yield
        if found := sorted({*before, *look()}):
            where = f"{trial.name}: host.other_runs"
            self._note([Finding(Level.WARNING, where, "no other run", f"other runs: {', '.join(found)}")])

    def _require_one_that_ends_well(self) -> None:
        folders = [self._run_dir.trial(trial.name) for trial in self._plan.trials]
        statuses = {folder.name: read_exit(folder).status for folder in folders}
        ended = {name: status for name, status in statuses.items() if status is not TrialStatus.MISSING}
        if len(ended) >= MAX_FAILED_FIRST and set(ended.values()) == {TrialStatus.FAILED}:
            last = list(ended)[-1]
            raise CheckFailed(
                Problem(last, f"failed, like all of the first {len(ended)} trials",
                        expected="at least one trial that exits with 0", hint=f"read trials/{last}/stdout.log")
            )  # fmt: skip

    def _wait_until_idle(self, trial: Trial) -> None:
        if self._plan.num_gpus == 0:
            return
        busy = wait_until_idle(self._parts.busy_gpus, self._stop.wait, self._parts.deadlines.idle_s)
        self._note(list(find_busy(busy, Level.WARNING, f"{trial.name}: gpu")))

    def _run_trial(self, trial: Trial, *, num_left: int) -> None:
        self._progress.begin_trial(trial.name, trial.index, num_left)

        def see_pid(pid: int) -> None:
            self._current = Current(trial=trial.name, session=pid)

        command = self._make_command(trial)
        with self._lay_out_rollouts(trial, command), self._serve(Use(trial=trial.name), command) as watch:
            try:
                outcome = run_trial(
                    command,
                    self._run_dir,
                    self._run_dir.trial(trial.name),
                    allocation=self._place.allocation,
                    limits=self._limits,
                    stop=self._stop,
                    watch=replace(watch, see_output=self._progress.see_output, see_pid=see_pid),
                )
            finally:
                self._current = Current()
            self._progress.end_trial(outcome.ended.duration_s)
            self._journal.record(
                "trial",
                trial=trial.name,
                status=outcome.status.value,
                reason=outcome.reason,
                num_leftovers=outcome.ended.num_leftovers,
            )

    @contextmanager
    def _lay_out_rollouts(self, trial: Trial, command: Command) -> Iterator[None]:
        if command.stored is None:
            yield
            return
        folder = self._run_dir.session_rollouts(trial.name)
        with lay_out_rollouts(self._plan, trial, command.stored, folder) as files:
            self._journal.record("rollouts", trial=trial.name, files=files)
            yield

    def _make_command(self, trial: Trial) -> Command:
        return self._parts.workload.trainer_command(self._plan, trial, self._run_dir)

    def _analyse(self) -> None:
        self._progress.enter(Phase.ENDING, "analysing")
        write_json(self._run_dir.analysis, self._parts.analyse(self._run_dir))

    def _end_followers(self) -> None:
        """Wait until all followers have ended: no process may write while the directory is sealed or packed."""
        self._steps.end()
        for node in self._place.followers:
            if not wait_for(partial(self._has_left, node), self._stop, self._parts.deadlines.followers_end_s):
                self._journal.record("no end marker", follower=node)

    def _seal(self) -> tuple[int, str]:
        self._progress.enter(Phase.ENDING, "sealing")
        with self._journal.phase("seal") as phase:
            self._parts.seal(self._run_dir)
        if phase.error is not None:
            return phase.exit_code, f"seal: {phase.error}"
        records = [read_exit(self._run_dir.trial(trial.name)) for trial in self._plan.trials]
        num_ok = sum(is_good_end(self._plan, record.status) for record in records)
        return int(num_ok < len(records)), f"sealed, {num_ok} of {len(records)} trials ok"
