"""Run the leading agent: preflight, stored rollouts, trials in plan order, analysis, seal, pack.

The run directory is always packed; it is sealed only when every trial has run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Final

from rlk_repro.agent import node
from rlk_repro.agent.budget import Budget
from rlk_repro.agent.ends import is_good_end
from rlk_repro.agent.journal import Journal, find_exit_code
from rlk_repro.agent.parts import Agent
from rlk_repro.agent.process import StopTimes
from rlk_repro.agent.ray.steps import Steps
from rlk_repro.agent.resume import find_open_trials, find_whole_pairs, set_aside
from rlk_repro.agent.rollouts import are_stored, count_stored, lay_out_rollouts, record_stored
from rlk_repro.agent.step import ROLLOUTS, Stage, read_report
from rlk_repro.agent.trial import run_command, run_trial
from rlk_repro.base.disk import Unwritable
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem, SpecError, code_after
from rlk_repro.base.files import load_record, write_bytes, write_json, write_text
from rlk_repro.base.findings import Finding, Level
from rlk_repro.plan import Trial
from rlk_repro.probes.telemetry import Current
from rlk_repro.rundir.exits import read_exit
from rlk_repro.rundir.manifest import OTHER_RUNS
from rlk_repro.rundir.paths import TrialDir
from rlk_repro.rundir.results import LESS_MEMORY, Analysis, PairStatus, TrialStatus
from rlk_repro.rundir.state import Phase, ProgressWriter
from rlk_repro.workloads import record_prepared
from rlk_repro.workloads.environment import resolve_env

PREFLIGHT_HINT: Final = "rlk-repro doctor repeats the checks; preflight.policy in the profile makes a check a warning"
MAX_FAILED_FIRST: Final = 4
"""The run stops when its first 4 trials (each variant twice) fail, because later trials would very likely fail too."""
MAX_SPOILED_FIRST: Final = 2
"""The run stops when 2 sessions lack memory or have no block that counts, before one is scored."""
MEMORY_HINT: Final = f"the GPU's memory is full: use {LESS_MEMORY}"


class Leader:
    """The leading agent: ``run`` is called once, in the main thread, while the run directory is locked."""

    def __init__(self, agent: Agent, progress: ProgressWriter) -> None:
        self._agent = agent
        self._plan, self._run_dir, self._place = agent.plan, agent.run_dir, agent.place
        self._stop, self._workload = agent.stop, agent.parts.workload
        self._journal = Journal(agent.run_dir, agent.place, agent.make_scrubber().text)
        self._progress = progress
        self._current = Current()
        self._budget = Budget(agent.place.until)
        self._findings: list[Finding] = []
        self._num_transports: int | None = 0
        self._fall_back: list[Problem] = []
        self._has_scored = False
        self._steps = Steps(agent, self._journal.record, self._note)

    def run(self) -> int:
        """Run all steps and return the agent's exit code (docs/formats.md)."""
        self._steps.enter(Stage.WAITING)
        before = self._count_done()
        code, message = self._run_phases()
        has_lost = bool(self._steps.lost) or any(map(self._has_left, self._place.followers))
        self._end_followers()
        if code == 0:
            code, message = self._run_phase("seal", self._seal)
        if code == 0:
            code, message = self._judge_trials()
        if not self._run_dir.is_sealed:
            self._ask_for_another(has_lost=has_lost, has_new=self._count_done() > before)
        error = self._journal.run("pack", lambda: self._agent.parts.pack(self._run_dir))
        is_told = error is None or (code != 0 and isinstance(error, Unwritable))
        code = code or find_exit_code(error)
        self._progress.end(code, message if is_told else f"not packed: {error}")
        self._journal.give_room()
        return code

    def _ask_for_another(self, *, has_lost: bool, has_new: bool) -> None:
        """Name this allocation in a file if another one may continue the run."""
        if self._budget.is_over and has_new:
            write_text(self._run_dir.again, self._place.allocation)
        elif has_lost and self._stop.signal is None:
            write_text(self._run_dir.lost, self._place.allocation)

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
        for name, do in phases:
            code, message = self._run_phase(name, do)
            if self._stop.signal is not None:
                return code_after(self._stop.signal), f"stopped by {self._stop.signal.name}"
            if code:
                return code, message
        return 0, ""

    def _run_phase(self, name: str, do: Callable[[], None]) -> tuple[int, str]:
        error = self._journal.run(name, do)
        return find_exit_code(error), f"{name}: {error}"

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
        problems = self._workload.find_problems(self._plan)
        if problems:
            raise SpecError(*problems)
        for trial in self._plan.trials:
            resolve_env(self._workload.trainer_command(self._plan, trial, self._run_dir), os.environ)
        record_prepared(self._plan, self._run_dir)
        self._findings = node.describe_node(self._agent)
        others: list[Finding] = []
        for name in self._place.followers:
            others += self._collect_follower(name)
        self._note(node.judge_nodes(self._agent))
        blocking = [finding for finding in (*others, *self._findings) if finding.level is Level.BLOCKING]
        if blocking and self._plan.profile.preflight.on_blocking == "stop":
            problems = [
                Problem(item.where, "preflight check failed", got=item.found, expected=item.expected)
                for item in blocking
            ]
            problems[-1] = replace(problems[-1], hint=PREFLIGHT_HINT)
            raise EnvironmentMissing(*problems)

    def _has_left(self, name: str) -> bool:
        return read_report(self._run_dir, name, self._place.allocation).has_left

    def _collect_follower(self, name: str) -> list[Finding]:
        read = partial(node.read_preflight, self._run_dir, name, self._place.allocation)
        deadline_s = self._agent.deadlines.followers_s
        self._agent.wait_for(lambda: read() is not None or self._has_left(name), deadline_s)
        # whether the agent has left is read first: an agent writes its record before it leaves
        has_left, found = self._has_left(name), read()
        if found is not None or self._stop.signal is not None:
            return found or []
        reason = "no record: the agent of this node has ended" if has_left else "no record"
        expected = f"a preflight record within {deadline_s:g} s"
        self._note([Finding(Level.BLOCKING, f"nodes.{name}", expected, reason)])
        return []

    def _store_rollouts(self) -> None:
        commands = self._workload.rollout_commands(self._plan, self._run_dir)
        limits = self._make_limits(self._plan.storing_limit_min)
        for number, (seed, command) in enumerate(commands.items(), start=1):
            self._progress.enter(Phase.PREPARING, f"storing rollouts {number} of {len(commands)}")
            if are_stored(self._run_dir, seed):
                continue
            log = self._run_dir.rollouts_of(seed).stdout
            log.parent.mkdir(parents=True, exist_ok=True)
            with self._steps.serve(f"{ROLLOUTS}{seed}", command) as watch:
                outcome = run_command(command, log, self._run_dir, limits=limits, stop=self._stop, watch=watch)
            if self._stop.signal is not None:
                return
            record_stored(self._plan, self._run_dir, seed, command, outcome)

    def _make_limits(self, minutes: float) -> StopTimes:
        return StopTimes(time_limit_s=minutes * 60, grace_s=self._agent.deadlines.grace_s)

    def _note(self, findings: list[Finding]) -> None:
        if findings:
            self._findings += findings
            node.write_preflight(self._run_dir, self._place, self._findings)

    def _run_trials(self) -> None:
        trials = find_open_trials(self._plan, self._run_dir)
        with node.make_sampler(self._agent, lambda: self._current):
            for number, trial in enumerate(trials):
                self._budget.begin(trial.pair)
                self._note(node.find_late_busy(self._agent, trial.name))
                if self._stop.signal is not None:
                    return
                earlier = self._find_other_runs()
                self._run_trial(trial, num_left=len(trials) - number)
                self._note_other_runs(trial, earlier)
                if self._fall_back:
                    raise EnvironmentMissing(*self._fall_back)
                if trial is not trials[-1]:
                    self._require_one_that_ends_well()
                    self._require_a_scored_session()

    def _find_other_runs(self) -> tuple[list[str], list[str]]:
        """Look for runs that began after preflight: the local cluster has no scheduler."""
        return self._agent.parts.find_runs() if self._plan.cluster == "local" else ([], [])

    def _note_other_runs(self, trial: Trial, earlier: tuple[list[str], list[str]]) -> None:
        """Name the other runs that a trial had at its start (``earlier``) or has at its end."""
        later = self._find_other_runs()
        found, beside = (list(dict.fromkeys([*earlier[place], *later[place]])) for place in (0, 1))
        if found:
            where, runs = f"{trial.name}: {OTHER_RUNS}", f"other runs: {', '.join(found)}"
            self._note([Finding(Level.WARNING, where, "no other run", runs)])
        if beside:
            where, runs = f"{trial.name}: host.runs_beside", f"on other GPUs: {', '.join(beside)}"
            self._note([Finding(Level.INFO, where, "a machine of its own", runs)])

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

    def _require_a_scored_session(self) -> None:
        """Refuse to go on if the first sessions are spoiled: the others would very likely be too.

        A session that failed for another reason may do better when it is repeated.
        """
        if not self._plan.is_crossover or self._has_scored or self._stop.signal is not None:
            return
        pairs = Analysis.from_json(self._agent.parts.analyse(self._run_dir)).pairs
        self._has_scored = any(pair.status is PairStatus.SCORED for pair in pairs)
        spoiled = [pair for pair in pairs if pair.status is PairStatus.VOID or pair.lacks_memory]
        if self._has_scored or len(spoiled) < MAX_SPOILED_FIRST:
            return
        last = spoiled[-1]
        trial = last.first.partition(":")[0]
        hint = MEMORY_HINT if last.lacks_memory else f"read trials/{trial}/stdout.log"
        where = f"session {last.pair}"
        what = f"does not count, and no session before it did ({len(spoiled)} spoiled)"
        raise CheckFailed(Problem(where, what, got=last.reason, expected="a scored session", hint=hint))

    def _run_trial(self, trial: Trial, *, num_left: int) -> None:
        self._progress.begin_trial(trial.name, trial.index, num_left)

        def see_pid(pid: int) -> None:
            self._current = Current(trial=trial.name, session=pid)

        command = self._workload.trainer_command(self._plan, trial, self._run_dir)
        limits = self._make_limits(self._plan.time_limit_min)
        with ExitStack() as stack:
            if command.stored is not None:
                folder = self._run_dir.session_rollouts(trial.name)
                files = stack.enter_context(lay_out_rollouts(self._plan, trial, command.stored, folder))
                self._journal.record("rollouts", trial=trial.name, files=files)
            watch = stack.enter_context(self._steps.serve(trial.name, command))
            try:
                look = partial(self._find_fall_back, self._run_dir.trial(trial.name), watch.find_trouble)
                watch = replace(watch, see_output=self._progress.see_output, see_pid=see_pid, find_trouble=look)
                outcome = run_trial(self._agent, command, self._run_dir.trial(trial.name), limits, watch)
            finally:
                self._current, self._num_transports = Current(), None
            self._progress.end_trial(outcome.ended.duration_s)
            self._journal.record("trial", trial=trial.name, status=outcome.status.value, reason=outcome.reason)

    def _find_fall_back(self, folder: TrialDir, find_trouble: Callable[[], str]) -> str:
        """During the first trial, return why it must end if NCCL fell back to slower paths than the hardware has."""
        if self._num_transports is None or self._plan.num_gpus < 2:
            return find_trouble()
        files = folder.libraries_files()
        if len(files) == self._num_transports:
            return find_trouble()
        self._num_transports = len(files)
        transports = {str(rank): load_record(path).get("transport") for rank, path in files.items()}
        found = node.judge_nodes(self._agent, transports)
        blocking = [item for item in found if item.level is Level.BLOCKING]
        if found:
            self._note(found)
            self._num_transports = None  # one finding is enough
        if not blocking or self._plan.profile.preflight.on_blocking != "stop":
            return find_trouble()
        self._fall_back = [Problem(item.where, "NCCL fell back to a slower path", got=item.found,
                                   expected=item.expected, hint=PREFLIGHT_HINT) for item in blocking]  # fmt: skip
        return str(self._fall_back[0])

    def _analyse(self) -> None:
        self._progress.enter(Phase.ENDING, "analysing")
        write_json(self._run_dir.analysis, self._agent.parts.analyse(self._run_dir))

    def _end_followers(self) -> None:
        """Wait until all followers have ended: no process may write while the directory is sealed or packed."""
        self._steps.enter(Stage.ENDED)
        for name in self._place.followers:
            if not self._agent.wait_for(partial(self._has_left, name), self._agent.deadlines.followers_end_s):
                self._journal.record("no end marker", follower=name)

    def _seal(self) -> None:
        self._progress.enter(Phase.ENDING, "sealing")
        self._agent.parts.seal(self._run_dir)

    def _judge_trials(self) -> tuple[int, str]:
        records = [read_exit(self._run_dir.trial(trial.name)) for trial in self._plan.trials]
        num_ok = sum(is_good_end(self._plan, record.status) for record in records)
        return int(num_ok < len(records)), f"sealed, {num_ok} of {len(records)} trials ok"
