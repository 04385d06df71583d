"""From a plan to the commands of the reference trainer and of the module and operator tiers."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_repro import switches
from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.errors import SpecError
from rlk_repro.base.files import load_json, write_json
from rlk_repro.bench import module_arguments
from rlk_repro.plan import Plan, Trial
from rlk_repro.refengine.arguments import parse_args
from rlk_repro.report.html import render_html
from rlk_repro.report.markdown import render_markdown
from rlk_repro.rundir.differences import Kind, Started, compare
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import GateStatus
from rlk_repro.spec import ModuleWorkload, OperatorsWorkload, ReferenceWorkload
from rlk_repro.spec.values import ENABLED
from rlk_repro.submit import finishing, planning
from rlk_repro.submit.show import plan_lines
from rlk_repro.switches import ENGINES_DIR, OPS_DIR, SWITCH, SWITCH_MODE, SWITCH_OPS
from rlk_repro.workloads import WORKLOADS, environment
from rlk_repro.workloads.api import Command
from rlk_repro.workloads.differences import find_undeclared, list_differences, read_differences
from rlk_repro.workloads.environment import resolve_env
from tests.support.job_examples import PROFILE, SETTINGS, make_example_plan
from tests.support.make_run import finish_run, make_run
from tests.support.run_plans import list_all_plans, make_run_plan, make_tier_plan
from tests.support.vime_examples import list_plans

REFERENCE = WORKLOADS["reference"]

RUN_DIR = RunDir(Path("/runs/a b/{x}"))
FIRST, SECOND = "00-p1-baseline", "01-p1-enabled"


def commands(plan: Plan) -> dict[str, Command]:
    return {trial.name: REFERENCE.trainer_command(plan, trial, RUN_DIR) for trial in plan.trials}


def test_variants_differ_in_the_declared_switches_and_where_they_write() -> None:
    found = commands(make_example_plan()[0])
    baseline, enabled = found[FIRST], found[SECOND]
    assert baseline.argv == enabled.argv
    fixed = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    switches = {SWITCH: "1", SWITCH_MODE: "auto", SWITCH_OPS: "logp,ratio_kl"}
    assert baseline.env == {**fixed, OPS_DIR: f"/runs/a b/{{x}}/trials/{FIRST}/ops"}
    assert enabled.env == {**fixed, **switches, OPS_DIR: f"/runs/a b/{{x}}/trials/{SECOND}/ops"}


def test_every_flag_is_the_trainers_and_every_setting_arrives() -> None:
    settings = ["workload.grpo.use_kl_loss=false", "workload.grpo.calculate_per_token_loss=true",
                "workload.model.dtype=bfloat16", "workload.task.max_operand=7", "workload.num_threads=3"]  # fmt: skip
    plan = make_example_plan([*settings, "measure.warmup_steps=2", "measure.scored_steps=5"])[0]
    argv = commands(plan)[FIRST].argv
    assert argv[:3] == (sys.executable, "-m", "rlk_repro.refengine")
    args = parse_args(argv[3:])
    workload = plan.run.workload
    assert isinstance(workload, ReferenceWorkload)
    expected = workload.model.model_dump() | workload.grpo.model_dump() | {"max_operand": 7, "num_threads": 3}
    assert {name: getattr(args, name) for name in expected} == expected
    assert (args.num_rollout, args.device, args.dtype) == (7, "cpu", "bfloat16")
    assert args.custom_megatron_init_path == "rlk_repro.integration.reference.install"


def test_the_live_lane_stores_nothing_and_the_train_only_lane_reads_what_was_stored() -> None:
    assert REFERENCE.rollout_commands(make_example_plan()[0], RUN_DIR) == {}
    plan = make_example_plan([*SETTINGS, "lane=train-only"])[0]
    stored = REFERENCE.rollout_commands(plan, RUN_DIR)
    assert list(stored) == [1234, 1235]
    for seed, command in stored.items():
        assert "RLK_REPRO_OPS_DIR" not in command.env
        args = parse_args(command.argv[3:])
        assert (args.seed, args.num_rollout) == (seed, plan.num_steps)
        assert args.save_debug_rollout_data == f"/runs/a b/{{x}}/rollouts/{seed}/{{rollout_id}}.pt"
    for command in commands(plan).values():
        args = parse_args(command.argv[3:])
        assert args.load_debug_rollout_data == f"/runs/a b/{{x}}/rollouts/{args.seed}/{{rollout_id}}.pt"


def test_the_profiles_variables_reach_every_trainer_and_secrets_stay_names() -> None:
    profile = PROFILE + b"env: {HF_HOME: /data, HF_TOKEN: {from_env: MY_TOKEN}}\n"
    for command in commands(make_example_plan(profile=profile)[0]).values():
        assert command.env["HF_HOME"] == "/data"
        assert command.from_env == {"HF_TOKEN": "MY_TOKEN"}
        assert resolve_env(command, {"MY_TOKEN": "x"})["HF_TOKEN"] == "x"


def test_all_absent_variables_are_named_at_once() -> None:
    command = Command(argv=("x",), env={}, from_env={"A": "NO_B", "B": "NO_A", "C": "YES"})
    with pytest.raises(SpecError) as caught:
        resolve_env(command, {"YES": ""})
    assert str(caught.value) == (
        "environment variable NO_A: is not set, expected a value\n  hint: export NO_A=…\n"
        "environment variable NO_B: is not set, expected a value\n  hint: export NO_B=…"
    )


def test_every_variable_of_a_variant_is_declared() -> None:
    found = {value for value in vars(switches).values() if isinstance(value, str) and value.startswith(("RLK", "VIME"))}
    assert found - {switches.COMMITS} == environment.DECLARED


def test_a_profile_may_not_set_what_the_launcher_sets() -> None:
    profile = PROFILE + b'env: {OMP_NUM_THREADS: "4", VIME_RL_KERNEL: "1", OTHER: x}\n'
    problems = REFERENCE.find_problems(make_example_plan(profile=profile)[0])
    assert [str(problem) for problem in problems] == [
        f"profile local: env.{name}: is set by the launcher, expected another variable"
        for name in ("OMP_NUM_THREADS", "VIME_RL_KERNEL")
    ]


def test_more_than_one_process_is_refused() -> None:
    assert REFERENCE.find_problems(make_example_plan()[0]) == []
    plan = make_example_plan(["layouts.h200.num_nodes=2", "layouts.h200.tensor_parallel=2"], hardware="h200")[0]
    assert [str(problem) for problem in REFERENCE.find_problems(plan)] == [
        f"run smoke: layouts.h200.{name}: the reference trainer is one process on one device, got 2, expected at most 1"
        for name in ("num_nodes", "tensor_parallel")
    ]


# What differs between the variants: the declared switches and the record folders, in every plan that may run.


PLANS = dict([*list_all_plans(), *list_plans()])
SWITCHES = {SWITCH, SWITCH_MODE, SWITCH_OPS}
Change = Callable[[Command], Command]


def started(variant: str, argv: str = "train.py --seed 1", **env: str) -> Started:
    number = {"baseline": "00", "enabled": "01"}[variant]
    return Started(trial=f"{number}-p1-{variant}", variant=variant, argv=argv.split(), env=env)


@pytest.mark.parametrize("name", PLANS)
def test_a_shipped_plan_differs_in_the_declared_switches_only(name: str) -> None:
    plan = PLANS[name]
    found = list_differences(plan)
    if not plan.has_enabled or plan.is_crossover:  # a session runs both variants in the same processes
        assert found == ()
        return
    assert {item.name for item in found if item.kind is Kind.SWITCH} == SWITCHES
    engines = {ENGINES_DIR} if plan.run.workload.compares_engines else set()
    assert {item.name for item in found if item.kind is Kind.FOLDER} == {OPS_DIR} | engines
    assert len(found) == 4 + len(engines)
    assert find_undeclared(plan) == []


@pytest.mark.parametrize(
    ("argv", "env", "expected"),
    [
        ("train.py --seed 2", {}, "--seed 1 2"),
        ("train.py", {}, "--seed 1 not set"),
        ("other.py --seed 1", {}, "program train.py other.py"),
        ("train.py --seed 1", {"NCCL_ALGO": "Ring"}, "NCCL_ALGO not set Ring"),
        ("train.py --seed 1", {OPS_DIR: "/elsewhere"}, f"{OPS_DIR} not set /elsewhere"),
    ],
)
def test_other_differences_are_not_declared(argv: str, env: dict[str, str], expected: str) -> None:
    (found,) = compare(started("baseline"), started("enabled", argv, **env))
    assert (f"{found.name} {found.baseline} {found.enabled}", found.kind) == (expected, Kind.UNDECLARED)


def test_a_folder_is_one_only_by_the_name_of_its_own_trial() -> None:
    own = compare(started("baseline", X="/r/00-p1-baseline"), started("enabled", X="/r/01-p1-enabled"))
    assert [item.kind for item in own] == [Kind.FOLDER]
    other = compare(started("baseline", X="/r/00-p1-baseline"), started("enabled", X="/r/03-p2-enabled"))
    assert [item.kind for item in other] == [Kind.UNDECLARED]


def test_secrets_are_compared_and_never_shown() -> None:
    first, second = "hf_" + "a1" * 12, "hf_" + "b2" * 12
    found = list(compare(started("baseline", HF_TOKEN=first), started("enabled", HF_TOKEN=second)))
    found += compare(started("baseline", f"t --note {first}"), started("enabled", f"t --note {second}"))
    found += compare(started("baseline", f"t --a 1 --note {first}"), started("enabled", f"t --note {first} --a 1"))
    assert [item.kind for item in found] == [Kind.UNDECLARED] * 3
    assert not any(secret in str(item) for item in found for secret in (first, second))


def break_enabled(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """A reference workload that starts its enabled trials otherwise."""
    real = REFERENCE.trainer_command

    def trainer_command(plan: Plan, trial: Trial, run_dir: RunDir) -> Command:
        command = real(plan, trial, run_dir)
        return change(command) if trial.variant == ENABLED else command

    monkeypatch.setattr(REFERENCE, "trainer_command", trainer_command)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda item: dataclasses.replace(item, argv=(*item.argv, "--lr", "1")), "run smoke: --lr: differs between"),
        (lambda item: dataclasses.replace(item, env={**item.env, "TF32": "1"}), "run smoke: TF32: differs between"),
    ],
)
def test_a_plan_whose_variants_differ_in_more_is_refused(
    change: Change, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_run_plan("smoke", "cpu")
    break_enabled(monkeypatch, change)
    with pytest.raises(SpecError, match=expected):
        planning.prepare(planning.Request(run="smoke", hardware="cpu"))
    assert "a difference between the variants is not declared" in "\n".join(plan_lines(plan))


def test_a_report_shows_what_was_recorded_and_the_gate_agrees(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "id")
    finish_run(run_dir)
    plan = Plan.load(run_dir.plan)
    trial = next(trial for trial in plan.trials if trial.variant == ENABLED)
    path = run_dir.trial(trial.name).env
    record = load_json(path)
    before = read_differences(plan, run_dir)
    assert before is not None
    assert Kind.UNDECLARED not in {item.kind for item in before}
    write_json(path, {**record, "env": {**record["env"], "NCCL_ALGO": "Ring"}})
    after = read_differences(plan, run_dir)
    assert after is not None
    found = [item for item in after if item.kind is Kind.UNDECLARED]
    assert [(item.name, item.baseline, item.enabled) for item in found] == [("NCCL_ALGO", "not set", "Ring")]
    analysis = analyse(run_dir)
    gate = next(gate for gate in analysis.gates if gate.name == "manifests")
    assert gate.status is GateStatus.FAILED
    context = finishing.report_context(run_dir, run_dir.bundle)
    for text in (render_markdown(analysis, context), render_html(analysis, context)):
        assert "What differs between the variants" in text
        assert "NOT DECLARED: NCCL" in text.replace("\\", "")


# The module and the operator tier.


MODULE, OPERATORS = WORKLOADS["module"], WORKLOADS["operators"]


def test_every_setting_of_the_module_tier_arrives_under_vimes_name() -> None:
    settings = ["workload.grpo.calculate_per_token_loss=true", "workload.grpo.use_tis=true",
                "workload.grpo.advantage_estimator=gspo", "workload.batch.num_microbatches=3"]  # fmt: skip
    plan = make_tier_plan("module-smoke", *settings, "measure.scored_steps=5")
    argv = MODULE.trainer_command(plan, plan.trials[0], RUN_DIR).argv
    assert argv[:3] == (sys.executable, "-m", "rlk_repro.bench.module")
    args = module_arguments.parse_args(argv[3:])
    workload = plan.run.workload
    assert isinstance(workload, ModuleWorkload)
    expected = workload.batch.model_dump() | workload.grpo.model_dump()
    assert {name: getattr(args, name) for name in expected} == expected
    assert (args.seed, args.num_rollout, args.device, args.tensor_model_parallel_size) == (1234, 6, "cpu", 1)


def test_a_split_vocabulary_has_a_process_per_rank() -> None:
    plan = make_tier_plan("module-qwen3-4b-tp2", hardware="h200")
    argv = MODULE.trainer_command(plan, plan.trials[0], RUN_DIR).argv
    assert argv[1:8] == (
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "rlk_repro.bench.module"),
    )
    args = module_arguments.parse_args(argv[8:])
    assert (args.device, args.tensor_model_parallel_size, args.vocab_size) == ("cuda", 2, 151936)


def test_without_the_entropy_metric_both_variants_are_told_so_whatever_the_shell_says() -> None:
    for setting, expected in (("false", "0"), ("true", None)):
        plan = make_tier_plan("module-smoke", f"entropy_metric={setting}")
        for trial in plan.trials:
            command = MODULE.trainer_command(plan, trial, RUN_DIR)
            env = resolve_env(command, {"RLK_REPRO_ENTROPY_METRIC": "left over"})
            assert env.get("RLK_REPRO_ENTROPY_METRIC") == expected


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("gpus_per_node=2", "does not fit tensor_parallel, got 2, expected 1, one GPU per rank"),
        ("num_nodes=2", "the module tier can only split the vocabulary over the GPUs of one node"),
    ],
)
def test_other_layouts_of_the_module_tier_are_refused(setting: str, problem: str) -> None:
    plan = make_tier_plan("module-smoke", f"layouts.h200.{setting}", hardware="h200")
    (found,) = MODULE.find_problems(plan)
    where = f"run module-smoke: layouts.h200.{setting.partition('=')[0]}"
    assert str(found).startswith(f"{where}: {problem}")


def test_a_trial_gets_the_whole_suite_and_its_sweeps() -> None:
    plan = make_tier_plan("operators-smoke", "measure.scored_steps=3", "workload.implementations=[torch-compile]")
    command = OPERATORS.trainer_command(plan, plan.trials[0], RUN_DIR)
    assert command.argv[:-1] == (
        *(sys.executable, "-m", "rlk_repro.bench.operators"),
        *("--seed", "1234", "--num-rollout", "3", "--device", "cpu", "--suite"),
    )
    assert OperatorsWorkload.model_validate_json(command.argv[-1]) == plan.run.workload
    assert OPERATORS.rollout_commands(plan, RUN_DIR) == {}
