"""vime as a workload: what its argument lists are made of, and which plans are refused before there is a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from rlk_repro.base.errors import CheckFailed, SpecError
from rlk_repro.bundle.verify import open_verified
from rlk_repro.division import divide
from rlk_repro.integration.start_vime import check_rollouts
from rlk_repro.plan import Plan
from rlk_repro.rundir.differences import split_arguments
from rlk_repro.rundir.paths import RunDir
from rlk_repro.schedule import make_schedule
from rlk_repro.spec import Measure, StoredRollouts
from rlk_repro.switches import OPS_DIR, SWITCH, SWITCH_SCHEDULE
from rlk_repro.workloads import WORKLOADS
from rlk_repro.workloads.vime.memory import count_parameters, estimate_memory
from tests import ROOT
from tests.support.prepare_examples import make_rollout
from tests.support.slurm.examples import plan_for
from tests.support.vime_examples import list_plans, list_runs, trial_argv, with_workload

VIME = WORKLOADS["vime"]

RUN_DIR = RunDir(Path("/shared/runs/qwen3-4b/20261120T120000Z-0123abcd-4567"))
LIVE = ("lane=live", "measure.design=parallel")
STORED = StoredRollouts(name="eight", num_files=20, digest="sha256:" + "0" * 64, made_by="a test")


def flags_of(plan: Plan, number: int = 0) -> Mapping[str, tuple[str, ...]]:
    return dict(split_arguments(trial_argv(plan, RUN_DIR, number)))


def plan_lane(lane: str, run: str = "qwen3-4b", hardware: str = "h200", *more: str) -> Plan:
    return plan_for(run, hardware, settings=(f"lane={lane}", "measure.design=parallel", *more))


def plan_sessions(lane: str) -> Plan:
    plan = plan_lane(lane)
    measure = Measure(design="crossover")
    return dataclasses.replace(plan, run=plan.run.model_copy(update={"measure": measure}))


@pytest.mark.parametrize(("name", "plan"), list_plans(), ids=lambda item: item if isinstance(item, str) else "")
def test_every_shipped_plan_can_be(name: str, plan: Plan) -> None:
    assert [str(problem) for problem in VIME.find_problems(plan)] == []
    assert not all(plan.explain_operators().values())
    command = VIME.trainer_command(plan, plan.trials[0], RUN_DIR)
    assert (command.needs_ray, command.argv.count("rlk_repro.integration.vime.install")) == (True, 1)
    where = [finding.where for finding in VIME.find_warnings(plan)]
    # Sessions of qwen3-30b-a3b-random-4l ran well, but PyTorch reserved 130 GiB of 140.
    near = ["memory of a training GPU"] if name.startswith("qwen3-30b-a3b-random-4l.") else []
    assert where == (["workload.data.source.revision"] if name.startswith("qwen3-4b.") else near)


def test_pairs_differ_in_their_seed_alone() -> None:
    plan = plan_for("qwen3-4b", "h200", settings=LIVE)
    one, two = (flags_of(plan, number) for number in (0, 2))
    assert {flag for flag in one if one[flag] != two[flag]} == {"--seed", "--rollout-seed"}
    assert [one["--seed"], two["--seed"]] == [("1234",), ("1235",)]


def test_training_and_inference_on_different_gpus() -> None:
    plan = plan_for("glm4-9b", "h200", settings=LIVE)
    flags = flags_of(plan)
    assert (flags["--actor-num-gpus-per-node"], flags["--rollout-num-gpus"]) == (("4",), ("4",))
    assert "--colocate" not in flags
    assert divide(plan).data_parallel == 1


def test_the_lanes_are_vime_s_own_options() -> None:
    template = str(RUN_DIR.rollouts_of(1234).path / "{rollout_id}.pt")
    live, fixed, alone = (flags_of(plan_lane(lane)) for lane in ("live", "fixed-rollout", "train-only"))
    forged = {"--rollout-function-path": ("vime.rollout.forge_load.generate_rollout",),
              "--load-forge-rollout-data": (template,)}  # fmt: skip
    assert fixed == {**live, **forged}
    assert alone["--load-debug-rollout-data"] == (template,)
    assert {"--debug-train-only", "--disable-rollout-global-dataset"} <= alone.keys()
    assert alone["--rollout-num-gpus"] == ("0",)
    assert not {flag for flag in alone if flag.startswith("--vllm-")} | {"--prompt-data", "--colocate"} & alone.keys()


def test_a_lane_without_rollouts_of_its_own_stores_them_once_without_a_switch() -> None:
    plan = plan_lane("train-only")
    ((seed, command),) = VIME.rollout_commands(plan, RUN_DIR).items()
    stored = dict(split_arguments(command.argv[3:]))
    assert seed == plan.run.measure.seed
    assert {flag: value for flag, value in stored.items() if flag != "--save-debug-rollout-data"} == flags_of(
        plan_lane("live")
    )
    assert stored["--save-debug-rollout-data"] == (RUN_DIR.rollouts_of(1234).template,)
    assert not {SWITCH, OPS_DIR} & command.env.keys()
    assert VIME.rollout_commands(plan_lane("live"), RUN_DIR) == {}
    assert VIME.rollout_commands(with_workload(plan, rollouts=STORED), RUN_DIR) == {}


@pytest.mark.parametrize("lane", ["live", "fixed-rollout", "train-only"])
def test_a_session_has_one_command_with_its_schedule_and_rollouts_of_its_own(lane: str) -> None:
    plan = plan_sessions(lane)
    assert VIME.find_problems(plan) == []
    command = VIME.trainer_command(plan, plan.trials[1], RUN_DIR)
    schedule = make_schedule(plan.run.measure, plan.trials[1].seed)
    assert (command.env[SWITCH], command.env[SWITCH_SCHEDULE]) == ("1", schedule.text)
    argv = dict(split_arguments(command.argv[3:]))
    assert argv["--num-rollout"] == (str(len(schedule.text)),)
    if lane == "live":
        assert command.stored is None
        return
    flag = "--load-forge-rollout-data" if lane == "fixed-rollout" else "--load-debug-rollout-data"
    assert argv[flag] == (f"{RUN_DIR.root}/.work/rollouts-01-s2-crossover/{{rollout_id}}.pt",)
    assert command.stored == RUN_DIR.rollouts_of(plan.run.measure.seed)
    (store,) = VIME.rollout_commands(plan, RUN_DIR).values()
    assert dict(split_arguments(store.argv[3:]))["--num-rollout"] == ("40",)


def test_sessions_on_rollouts_that_were_stored_before_need_one_for_each_step_of_half_a_block() -> None:
    plan = with_workload(plan_sessions("train-only"), rollouts=STORED)
    (problem,) = VIME.find_problems(plan)
    assert "got 20, expected 40 or more" in str(problem)
    plan = with_workload(plan, rollouts=STORED.model_copy(update={"num_files": 40}))
    assert VIME.find_problems(plan) == []
    stored = VIME.trainer_command(plan, plan.trials[0], RUN_DIR).stored
    assert stored is not None
    assert stored.path == Path("/shared/runs/prepared/rollouts/eight")


@pytest.mark.parametrize(
    ("changed", "freeze_after"), [({}, "6"), ({"period_steps": 1}, "5"), ({"period_steps": 1, "warmup_steps": 1}, "1")]
)
def test_no_scored_step_follows_the_freeze_of_python_s_objects(changed: dict[str, int], freeze_after: str) -> None:
    plan = plan_for("qwen3-4b-random", "h200")
    measure = plan.run.measure.model_copy(update=changed)
    plan = dataclasses.replace(plan, run=plan.run.model_copy(update={"measure": measure}))
    assert VIME.trainer_command(plan, plan.trials[0], RUN_DIR).env["RLK_REPRO_GC_FREEZE_AFTER"] == freeze_after


def test_prepared_things_lie_where_the_profile_says() -> None:
    plan = plan_for("qwen3-4b", "h200", settings=LIVE)
    assert flags_of(plan)["--hf-checkpoint"] == ("/shared/runs/prepared/models/Qwen--Qwen3-4B@1cfa9a720891",)
    profile = plan.profile.model_copy(update={"prepared_dir": "/data/prepared"})
    assert flags_of(dataclasses.replace(plan, profile=profile))["--prompt-data"] == (
        "/data/prepared/datasets/zhuzilin--gsm8k@unpinned/train.parquet",
    )


@pytest.mark.parametrize(
    ("what_for", "flags", "variable"),
    [
        ("agreement", {"--deterministic-mode", "--vllm-enable-deterministic-inference", "--vllm-attention-backend",
                       "--vllm-worker-extension-cls", "--vllm-enforce-eager"}, "CUBLAS_WORKSPACE_CONFIG"),
        ("deterministic", {"--deterministic-mode", "--vllm-enable-deterministic-inference", "--vllm-attention-backend"},
         "CUBLAS_WORKSPACE_CONFIG"),
        ("profiler", {"--use-pytorch-profiler", "--profile-step-start", "--profile-step-end", "--profile-target",
                      "--tensorboard-dir"}, None),
    ],
)  # fmt: skip
def test_runs_that_do_not_time_are_separate(what_for: str, flags: set[str], variable: str | None) -> None:
    timing = plan_for("qwen3-4b", "h200", settings=LIVE)
    plan = with_workload(timing, what_for=what_for)
    assert [str(problem) for problem in VIME.find_problems(plan)] == [
        f"run qwen3-4b: measure.pairs: a run with what_for: {what_for} measures no time, got 6, expected at most 5 "
        "pairs, so that the run gives no verdict on speed"
    ]
    few = plan_for("qwen3-4b", "h200", settings=(*LIVE, f"workload.what_for={what_for}"))
    few = dataclasses.replace(
        few, run=few.run.model_copy(update={"measure": few.run.measure.model_copy(update={"pairs": 5})})
    )
    assert VIME.find_problems(few) == []
    assert flags_of(few).keys() - flags_of(timing).keys() == flags
    assert variable is None or variable in VIME.trainer_command(few, few.trials[0], RUN_DIR).env


def test_a_removed_purpose_is_readable_in_a_plan_and_refused_in_a_run() -> None:
    settings = (*LIVE, "workload.what_for=memory-history", "measure.pairs=2")
    old = plan_for("qwen3-4b", "h200", settings=settings)
    assert Plan.from_json(old.to_json()) == old
    (problem,) = VIME.find_problems(old)
    assert "workload.what_for: was removed in version 0.3" in str(problem)


SETTINGS = [
    ("layouts.h200.tensor_parallel=3", "layouts.h200.tensor_parallel: the product of tensor, pipeline and context "
     "parallel sizes is 3, expected a divisor of the 8 training GPUs"),
    ("layouts.h200.expert_parallel=3", "layouts.h200.expert_parallel: the product of expert, expert tensor and "
     "pipeline parallel sizes is 3"),
    ("workload.model.arguments.num-experts=126", "layouts.h200.expert_parallel: does not divide num-experts, got 8, "
     "expected a divisor of 126"),
    ("workload.placements.h200.sequence_parallel=false", "workload.placements.h200.sequence_parallel: experts with "
     "tensor parallelism need this setting"),
    ("workload.placements.h200.max_tokens_per_gpu=4096", "workload.placements.h200.max_tokens_per_gpu: is too small "
     "for the longest sample (5120 tokens), got 4096, expected 5120 or more"),
    ("workload.placements.h200.rollout_num_gpus_per_engine=3", "workload.placements.h200.rollout_num_gpus_per_engine: "
     "does not divide the number of GPUs that generate"),
    ("workload.placements.h200.rollout_num_gpus=8", "workload.placements.h200.rollout_num_gpus: leaves no GPU for the "
     "training, got 8, expected less than 8"),
    ("workload.arguments={vllm-max-model-len: 8k}", "workload.arguments.vllm-max-model-len: does not fit the longest "
     "sample (5120 tokens), got '8k', expected a number from 5120 to 100000000"),
    ("workload.arguments={num-layer: 3}", "--num-layer: is unknown to vime 1fc199d9, which would ignore the flag"),
    ("workload.arguments={lr-decay-style: sudden}", "--lr-decay-style: is not one of the choices, got 'sudden'"),
    ("workload.arguments={seed: 7}", "workload.arguments.seed: follows from other settings"),
    ("workload.arguments={colocate: true}", "workload.arguments.colocate: follows from other settings"),
    ("workload.arguments={use-rollout-routing-replay: true}", "workload.arguments.use-rollout-routing-replay: follows"),
    ("workload.arguments={eval-interval: 5}", "workload.arguments.eval-interval: evaluates between steps"),
    ("workload.model.arguments.load=/x", "workload.model.arguments.load: makes the trials of a run differ"),
    ("workload.model.arguments.hidden-size=wide", "--hidden-size: has a value of the wrong type, got 'wide', expected "
    "a "
     "whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "problem"), SETTINGS)
def test_mistakes_that_are_refused_before_there_is_a_job(setting: str, problem: str) -> None:
    plan = plan_for("qwen3-30b-a3b", "h200", settings=(setting,))
    found = [str(item) for item in VIME.find_problems(plan)]
    assert any(item.startswith(f"run qwen3-30b-a3b: {problem}") for item in found), found


AUTHORED = [
    ("workload.grpo.global_batch_size=256", "workload.grpo.global_batch_size: is not rollout_batch_size x "
     "n_samples_per_prompt / num_steps_per_rollout, got 256, expected 128"),
    ("workload.grpo.num_steps_per_rollout=3", "workload.grpo.num_steps_per_rollout: does not divide the samples"),
    ("workload.grpo.use_rollout_routing_replay=true", "workload.grpo.use_rollout_routing_replay: needs experts, but "
     "the model is dense"),
    ("workload.data.custom_rm_path=a.b", "workload.data.rm_type: the reward is missing or given twice"),
    ("workload.placements={h200: {}}", "workload.placements: no value for hardware a100"),
    ("workload.placements.gb200={}", "workload.placements.gb200: no layout for this hardware"),
    ("workload.model.arguments.num-layers=0", "workload.model.arguments.num-layers: is out of range, got 0, expected 1 "
     "to 10000"),
    ("workload.model.arguments.num-query-groups=5", "workload.model.arguments.num-query-groups: does not divide "
     "num-attention-heads, got 5, expected a divisor of 32"),
    ("workload.model.arguments={num-experts: 4, moe-router-topk: 8}", "workload.model.arguments: moe-router-topk: "
    "exceeds "
     "the number of experts, got 8, expected at most 4"),
    ("measure.scored_steps=1000000", "measure.scored_steps"),
    ("workload.arguments={swiglu: false}", "workload.arguments: swiglu: cannot switch a flag off"),
    ("workload.model.source.revision=main", "workload.model.source"),
    ("workload.what_for=speed", "workload.what_for: wrong value, got 'speed'"),
    ("rl_kernel.ops_on={h200: [kl]}", "rl_kernel.ops_on: h200[0]: no such operator, got 'kl'"),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "problem"), AUTHORED)
def test_mistakes_that_the_file_itself_shows(setting: str, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        plan_for("qwen3-4b", "h200", settings=(setting,))
    assert problem in str(caught.value)


@pytest.mark.parametrize("lane", ["live", "fixed-rollout", "train-only"])
def test_routing_replay_needs_a_kernel_that_reports_its_experts(lane: str) -> None:
    """In the lane without servers too, as long as it stores its own rollouts."""
    settings = ("workload.arguments.vllm-moe-backend=auto", f"lane={lane}")
    plan = plan_for("vime-train-only-r3", "gb200", settings=settings)
    (problem,) = VIME.find_problems(plan)
    assert "workload.arguments.vllm-moe-backend: is not known to report the chosen experts" in str(problem)
    stored = STORED.model_copy(update={"num_files": 100})
    assert lane != "train-only" or VIME.find_problems(with_workload(plan, rollouts=stored)) == []


def test_a_stack_without_vime_is_refused() -> None:
    (problem,) = VIME.find_problems(plan_for("vime-smoke", "h200", stack="host"))
    assert str(problem).startswith("stack host: pins.vime: missing, but needed to check the flags")


@pytest.mark.parametrize(
    ("run", "billions"), [("qwen3-4b", 4.02), ("qwen3-30b-a3b", 30.53), ("glm-4.5-air", 106.85), ("glm4-9b", 9.4)]
)
def test_parameters_are_counted_as_published(run: str, billions: float) -> None:
    assert sum(count_parameters(list_runs()[run].model)) / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize(
    ("run", "bytes_per_weight"),
    [("qwen3-30b-a3b-random-4l", 18), ("qwen3-30b-a3b-random-12l", 10), ("qwen3-30b-a3b-random", 16 / 4)],
)
def test_the_states_of_a_weight_take_18_bytes_and_fewer_with_other_optimizers(run: str, bytes_per_weight: int) -> None:
    """GPUs that share experts and dense weights hold equal parts of both."""
    plan = plan_for(run, "h200")
    num_weights = sum(count_parameters(list_runs()[run].model))
    assert estimate_memory(plan).states_gib * 2**30 == pytest.approx(bytes_per_weight * num_weights)


def test_sixteen_layers_that_filled_two_h200_have_a_warning() -> None:
    with open_verified(ROOT / "docs" / "evidence" / "qwen3-30b-a3b-16l-full-h200.tgz") as (run_dir, _):
        (warning,) = VIME.find_warnings(Plan.load(run_dir.plan))
    found = "about 131 GiB (weights, gradients, optimizer 89, activations 3, logits 26, fragments 13)"
    assert (warning.expected, warning.found) == ("at most 130 GiB", found)


def test_rollouts_must_all_be_there_before_vime_starts(tmp_path: Path) -> None:
    argv = ["--num-rollout", "3", "--load-forge-rollout-data", f"{tmp_path}/{{rollout_id}}.pt"]
    for number in (0, 2):
        (tmp_path / f"{number}.pt").write_bytes(make_rollout(0))
    with pytest.raises(CheckFailed, match=r"1 of 3 stored rollouts are missing or empty, got '.*/1.pt'"):
        check_rollouts(argv)
    (tmp_path / "1.pt").write_bytes(make_rollout(0))
    check_rollouts(argv)
    with pytest.raises(CheckFailed, match="names one file for all steps"):
        check_rollouts(["--load-debug-rollout-data", str(tmp_path / "0.pt")])
    check_rollouts(["--num-rollout", "3"])
