"""vime's own trainer as a workload: make the command of vime's ``train.py`` on Ray from a plan.

vime's own launch scripts are not used, because they end every Python process of the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.division import vime_of
from rlk_repro.plan import Plan, Trial
from rlk_repro.prepare.layout import PreparedDir
from rlk_repro.rundir.paths import RolloutDir, RunDir
from rlk_repro.spec import Run, Stack, VimeWorkload
from rlk_repro.workloads.api import Command, Words, Workload
from rlk_repro.workloads.arguments import describe_rollouts
from rlk_repro.workloads.environment import find_env_problems, trainer_module, trial_env
from rlk_repro.workloads.vime import code, rules
from rlk_repro.workloads.vime.arguments import Files, render_arguments, render_env, render_store_arguments
from rlk_repro.workloads.vime.code import describe_source, spell_written
from rlk_repro.workloads.vime.contract import load_contract

if TYPE_CHECKING:
    from rlk_repro.prepare.steps import PrepareRequest, PrepareStep

TRAINER: Final = "rlk_repro.integration.start_vime"
ADDRESS_NAMES: Final = ("VIME_HOST_IP",)
"""The variables in which vime reads the address of its node."""
NOWHERE: Final = Path("/runs/run/id")


class Vime(Workload):
    """vime's own trainer."""

    WORDS = Words(step="training", baseline_trainer="vime")
    find_warnings = staticmethod(rules.find_warnings)
    find_brought = staticmethod(code.find_brought)

    def find_problems(self, plan: Plan) -> list[Problem]:
        problems = [*find_env_problems(plan), *rules.find_problems(plan)]
        if "vime" not in plan.stack.pins:
            return problems
        try:
            contract = load_contract(plan.stack.pins["vime"].commit)
        except SpecError as error:
            return [*problems, *error.problems]
        where = f"run {plan.run.run}"
        if problems:  # A wrong flag of the run's author may cause these problems, so these flags are checked too.
            return [*problems, *contract.find_problems(spell_written(plan), where, is_whole=False)]
        found: dict[str, Problem] = {}
        for argv in self._all_arguments(plan):
            found |= {str(problem): problem for problem in contract.find_problems(argv, where)}
        return list(found.values())

    def trainer_command(self, plan: Plan, trial: Trial, run_dir: RunDir) -> Command:
        files, stored = find_files(plan, run_dir), None
        if plan.is_crossover and plan.run.lane != "live":
            stored = _find_stored(plan, run_dir)
            files = replace(files, rollouts=run_dir.session_rollouts(trial.name).template)
        traces = run_dir.trial(trial.name).traces
        argv = render_arguments(plan, files, trial=trial, traces=traces)
        own = trial_env(plan, trial, run_dir)
        return replace(_make_command(plan, argv, own), stored=stored)

    def rollout_commands(self, plan: Plan, run_dir: RunDir) -> dict[int, Command]:
        """All trials train on the rollouts of one live run, so that pairs do not differ in their data."""
        prepared = PreparedDir.of(plan.profile, run_dir)
        if plan.run.lane == "live" or prepared.rollouts(plan.run, vime_of(plan)) is not None:
            return {}
        seed = plan.run.measure.seed
        argv = render_store_arguments(plan, find_files(plan, run_dir), seed=seed)
        return {seed: _make_command(plan, argv, {})}

    def list_folders(self, run: Run, stack: Stack, prepared: PreparedDir) -> dict[str, Path]:
        """Return the folders that the run's lane needs; a conversion needs the stack's pin of vime."""
        workload = run.workload
        assert isinstance(workload, VimeWorkload)
        folders = {"model": prepared.model(workload.model)}
        if workload.model.checkpoint == "torch_dist":
            vime = stack.pins.get("vime")
            if vime is None:
                raise SpecError(Problem(f"stack {stack.stack}: pins.vime", "missing", expected="a commit of vime"))
            folders["checkpoint"] = prepared.checkpoint(workload.model, vime.commit)
        if (rollouts := prepared.rollouts(run, workload)) is not None:
            folders["rollouts"] = rollouts.path
        if workload.generates(run.lane):
            folders["data"] = prepared.data_folder(workload.data.source)
        return folders

    def list_steps(self, request: PrepareRequest) -> list[PrepareStep]:
        # The import is here, because the download clients would cost every other command 0.1 s.
        from rlk_repro.workloads.vime import prepare

        folders = self.list_folders(request.run, request.stack, request.prepared)
        return prepare.list_steps(request, folders)

    def describe(self, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        model, data, grpo = settings["model"], settings["data"], settings["grpo"]
        yield "model", f"{model['title']}: {describe_source(model['source'], 'weights')}"
        reward = data["rm_type"] or data["custom_rm_path"]
        yield "data", f"{describe_source(data['source'], 'prompts')}; reward {reward}"
        replayed = ", expert routing replayed (R3)" if grpo["use_rollout_routing_replay"] else ""
        yield "rollouts", describe_rollouts(grpo) + replayed
        if settings["what_for"] != "timing":
            yield "meant for", settings["what_for"]

    def _all_arguments(self, plan: Plan) -> list[list[str]]:
        """The live run that stores rollouts may have other flags than a trial."""
        run_dir = RunDir(NOWHERE)
        # the first trial of each variant
        trials = {trial.variant: trial for trial in reversed(plan.trials)}.values()
        shown = [list(self.trainer_command(plan, trial, run_dir).argv[3:]) for trial in trials]
        return [*shown, render_store_arguments(plan, find_files(plan, run_dir), seed=plan.run.measure.seed)]


def find_files(plan: Plan, run_dir: RunDir) -> Files:
    workload = vime_of(plan)
    prepared = PreparedDir.of(plan.profile, run_dir)
    return Files(
        model=prepared.model(workload.model),
        checkpoint=prepared.checkpoint(workload.model, plan.stack.pins["vime"].commit),
        prompts=prepared.data_file(workload.data.source),
        rollouts=_find_stored(plan, run_dir).template,
    )


def _find_stored(plan: Plan, run_dir: RunDir) -> RolloutDir:
    prepared = PreparedDir.of(plan.profile, run_dir).rollouts(plan.run, vime_of(plan))
    return run_dir.rollouts_of(plan.run.measure.seed) if prepared is None else prepared


def _make_command(plan: Plan, argv: list[str], own: dict[str, str]) -> Command:
    command = trainer_module(plan, [TRAINER, *argv], own)
    env = {**render_env(plan), **command.env}
    return replace(command, env=env, needs_ray=True, address_names=ADDRESS_NAMES)
