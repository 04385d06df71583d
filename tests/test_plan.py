from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.base.errors import BundleUnreadable, SpecError
from rlk_repro.base.files import dump_json
from rlk_repro.base.resources import list_names, profile_folders, run_folders
from rlk_repro.loss_options import LossOptions, read_loss_options
from rlk_repro.operators import (
    DEFAULT_OPS,
    HAS_BATCH_INVARIANT_LOGP,
    OPERATORS,
    Case,
    Platform,
    Reason,
    Refusal,
    find_conflicts,
    find_refusal,
)
from rlk_repro.plan import Plan, make_plan, order_trials
from rlk_repro.schedule import ORDERS, make_schedule
from rlk_repro.spec import Hardware, Measure, Profile
from rlk_repro.spec.load import load_hardware, load_profile, load_run, load_stack, parse_overrides
from rlk_repro.submit.planning import Request, flag_overrides, seed_apart
from rlk_repro.submit.show import RAN_ON, plan_lines, plan_summary
from rlk_repro.workloads import WORKLOADS
from rlk_repro.workloads.environment import switch_env
from tests import ROOT
from tests.security.hostile import fit_hashes
from tests.support.run_plans import make_run_plan, make_tier_plan


def plan_smoke(*settings: str, hardware: str = "cpu", stack: str = "host", **options: Any) -> Plan:
    overrides = parse_overrides(settings)
    return make_plan(
        run=load_run("smoke", overrides),
        stack=load_stack(stack),
        hardware=load_hardware(hardware),
        profile=load_profile("local", profile_folders("local")),
        overrides=overrides,
        **options,
    )


def test_trials_run_in_abba_order_with_one_seed_per_pair() -> None:
    plan = plan_smoke()
    names = [trial.name for trial in plan.trials[:5]]
    assert names == ["00-p1-baseline", "01-p1-enabled", "02-p2-enabled", "03-p2-baseline", "04-p3-baseline"]
    seeds = {pair: {trial.seed for trial in trials} for pair, trials in plan.pairs().items()}
    assert all(len(found) == 1 for found in seeds.values())
    assert len(set.union(*seeds.values())) == len(seeds)
    baseline = plan_smoke(variants=("baseline",))
    assert all(trial.is_control and trial.variant == "baseline" for trial in baseline.trials)


def test_submissions_at_once_have_seeds_of_their_own() -> None:
    plans = [seed_apart(plan_smoke("measure.pairs=3", "measure.control_pairs=1"), number) for number in (1, 2)]
    seeds = [sorted({trial.seed for trial in plan.trials}) for plan in plans]
    assert seeds == [[*range(1238, 1242)], [*range(1242, 1246)]]
    assert all(plan.sources["measure.seed"].startswith("--") for plan in plans)


@given(pairs=st.integers(0, 12), control_pairs=st.integers(0, 12), has_enabled=st.booleans())
def test_the_order_is_balanced_for_every_number_of_pairs(pairs: int, control_pairs: int, has_enabled: bool) -> None:
    run = load_run("smoke", flag_overrides(Request(run="smoke", pairs=max(pairs, 1), control_pairs=control_pairs)))
    trials = list(order_trials(run.model.measure, has_enabled=has_enabled))
    assert [trial.index for trial in trials] == list(range(2 * (max(pairs, 1) + control_pairs)))
    assert len({trial.name for trial in trials}) == len(trials)
    enabled_first = sum(first.variant == "enabled" for first, second in zip(trials[::2], trials[1::2], strict=True)
                        if first.variant != second.variant)  # fmt: skip
    assert enabled_first == (max(pairs, 1) // 2 if has_enabled else 0)
    assert all(first.pair == second.pair for first, second in zip(trials[::2], trials[1::2], strict=True))


def test_hashes_are_stable_and_cover_the_documented_values() -> None:
    plan = plan_smoke()
    assert (plan.experiment_hash, plan.plan_hash) == (plan_smoke().experiment_hash, plan_smoke().plan_hash)
    assert plan_smoke("measure.pairs=8").experiment_hash != plan.experiment_hash
    other_site = plan.profile.model_copy(update={"profile": "elsewhere"})
    moved = dataclasses.replace(plan, profile=other_site)
    assert moved.experiment_hash == plan.experiment_hash
    assert moved.plan_hash != plan.plan_hash


def test_a_plan_survives_a_round_trip_and_notices_a_change() -> None:
    plan = plan_smoke("measure.pairs=8")
    value = plan.to_json()
    assert Plan.from_json(value) == plan
    value["experiment"]["run"]["measure"]["alpha"] = 0.1
    with pytest.raises(BundleUnreadable, match="hashes do not fit the content"):
        Plan.from_json(value)


def test_a_plan_remembers_where_each_value_came_from_without_machine_paths() -> None:
    sources = plan_smoke("measure.pairs=8").sources
    assert sources["measure.pairs"] == "--set measure.pairs"
    assert sources["lane"].startswith("smoke.yaml:")
    assert sources["measure.alpha"] == "default"
    assert not any("/" in source for source in sources.values())


def test_changed_measurement_rules_need_exploratory() -> None:
    with pytest.raises(SpecError) as caught:
        plan_smoke("measure.alpha=0.2")
    assert str(caught.value) == (
        "--set measure.alpha: changes a measurement rule of the run, got 0.2, expected the run's own rule\n"
        "  hint: add --exploratory; the verdict will then say that the rules changed"
    )
    assert plan_smoke("measure.alpha=0.2", is_exploratory=True).is_exploratory
    assert not plan_smoke(is_exploratory=True).is_exploratory


def test_a_removed_key_is_refused_in_a_file_and_readable_in_a_plan(tmp_path: Path) -> None:
    loaded = load_hardware("cpu")
    old = Hardware.model_validate({**loaded.model.model_dump(by_alias=True), "all_reduce": {"source": "x"}})
    recorded = dataclasses.replace(plan_smoke(), hardware=old)
    assert Plan.from_json(recorded.to_json()) == recorded
    file = tmp_path / "old.yaml"
    file.write_bytes(loaded.data + b"\nall_reduce: {source: x}\n")
    with pytest.raises(SpecError, match=r"all_reduce: was removed in version 0\.3"):
        load_hardware(str(file))


OLD_KEYS = {
    "preflight": {"max_clock_skew_s": 7, "max_file_latency_ms": 7, "policy": {"governor": "warn"}},
    "kubernetes": {"kind": "rayjob", "ray_version": "2.60.0", "hold_min": 5.0},
}


def test_removed_keys_of_a_profile_are_refused_and_readable_in_a_plan(tmp_path: Path) -> None:
    profile = {"profile": "old", "cluster": "k8s", **OLD_KEYS}
    recorded = dataclasses.replace(plan_smoke(), profile=Profile.model_validate(profile))
    assert Plan.from_json(recorded.to_json()) == recorded
    file = tmp_path / "old.yaml"
    file.write_text(json.dumps(profile, indent=1))
    with pytest.raises(SpecError) as caught:
        load_profile(str(file), [])
    problems = caught.value.problems
    assert {item.what for item in problems} == {"was removed in version 0.3"}
    where = [item.where.partition("old.yaml:")[2] for item in problems]
    assert where == [
        "5: preflight.max_clock_skew_s",
        "6: preflight.max_file_latency_ms",
        "8: preflight.policy.governor",
        "12: kubernetes.kind",
        "13: kubernetes.ray_version",
        "14: kubernetes.hold_min",
    ]
    ray = "delete the key: the agents start Ray themselves, in a Job"
    claim = "delete the key: results are on the claim, results.claim"
    assert [item.hint for item in problems] == [*["delete the key"] * 3, ray, ray, claim]


def test_an_enabled_variant_with_no_eligible_operator_is_refused() -> None:
    older: dict[str, Any] = {"hardware": "mi300x", "stack": "rl-kernel-host"}
    with pytest.raises(SpecError) as caught:
        plan_smoke("rl_kernel.ops=[logp]", **older)
    assert "run smoke: rl_kernel.ops: logp: not eligible here" in str(caught.value)
    assert plan_smoke("rl_kernel.ops=[logp]", **older, variants=("baseline",)).trials
    assert plan_smoke("rl_kernel.ops=[logp]", **(older | {"stack": "vime-host-027c809"})).trials


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ((), "none, too few pairs: even without any difference, the gates on reward and length fail in 45 % of runs"),
        (("measure.pairs=2",), "none: the verdicts 'faster' and 'slower' need 6 pairs, and this run has 2"),
        (("measure.pairs=2",), "measure.pairs (--set measure.pairs)"),
        (("measure.pairs=1", "workload.what_for=agreement"), "2 trials in 1 pair and 0 control pairs"),
        (("measure.pairs=1", "workload.what_for=agreement"), "none: a run with what_for: agreement measures no time"),
    ],
)
def test_the_dry_run_says_what_the_pairs_can_show(settings: tuple[str, ...], words: str) -> None:
    plan = plan_smoke(*settings)
    text = "\n".join(plan_lines(plan))
    assert plan.plan_hash[:12] in text
    assert words in text
    assert plan_summary(plan)["smallest_visible_effect"] is None
    assert 0.02 < plan_summary(plan_smoke("measure.pairs=12"))["smallest_visible_effect"] < 0.06


@pytest.mark.parametrize(
    "change", [{"pair": "p1/../../../escape"}, {"variant": "enabled"}, {"is_control": True}, {"index": 7}, {"seed": 1}]
)
def test_trials_that_no_plan_gives_are_refused_with_any_hashes(change: dict[str, Any]) -> None:
    value = plan_smoke().to_json()
    value["experiment"]["trials"][0] |= change
    fit_hashes(value)
    with pytest.raises(BundleUnreadable, match="trials do not follow from the plan's other values"):
        Plan.from_json(value)


@pytest.mark.parametrize(
    ("path", "item"),
    [
        ("experiment.trials", "abc"),
        ("experiment.variants", []),
        ("experiment.variants", ["enabled", "x"]),
        ("experiment.run.layouts", {}),
        ("experiment.hardware.hardware", "h100"),
        ("sources", ["abc"]),
        ("profile", None),
        ("plan_hash", 3),
        ("experiment", []),
    ],
)
def test_a_broken_plan_file_is_an_error_that_names_it(path: str, item: object) -> None:
    value = plan_smoke().to_json()
    target = value
    for part in path.split(".")[:-1]:
        target = target[part]
    target[path.rpartition(".")[2]] = item
    with pytest.raises(BundleUnreadable, match=r"^plan\.json"):
        Plan.from_json(value)


def test_a_gpu_layout_needs_gpus_and_a_cpu_layout_none() -> None:
    with pytest.raises(SpecError, match="gpus_per_node: does not fit the hardware, got 0, expected 1 or more"):
        plan_smoke("layouts.h200.gpus_per_node=0", hardware="h200")
    with pytest.raises(SpecError, match="gpus_per_node: does not fit the hardware, got 1, expected 0 on a CPU"):
        plan_smoke("layouts.cpu.gpus_per_node=1")


def test_the_expected_duration_follows_the_number_of_trials() -> None:
    minutes = plan_smoke().expected_minutes() or 0
    assert plan_smoke("measure.pairs=12").expected_minutes() == pytest.approx(2 * minutes)
    assert plan_smoke("measure.scored_steps=99", is_exploratory=True).expected_minutes() is None
    assert plan_summary(plan_smoke(hardware="h200"))["gpu_hours"] == pytest.approx(12 * 0.1 / 60)


# what a dry run says of time and GPU-hours: with the rollouts that are stored first, if there is an estimate
@pytest.mark.parametrize(
    ("run", "hardware", "hours", "first", "has_run"),
    [
        ("qwen3-30b-a3b", "h200", 53.07, 17.07, True),
        ("qwen3-4b", "h200", 9.2, 3.2, True),
        ("glm-4.5-air", "gb200", 269.33, 85.33, False),
        ("vime-train-only", "h200", 0.2, None, True),
        ("qwen3-4b-random", "mi300x", None, "", False),
    ],
)
def test_the_cost_holds_the_rollouts_and_says_whether_the_hardware_ever_ran(
    run: str, hardware: str, hours: float | None, first: Any, has_run: bool
) -> None:
    plan = make_run_plan(run, hardware)
    summary, text = plan_summary(plan), "\n".join(plan_lines(plan))
    storing = summary["rollouts_first"]
    assert (storing is None) is (first == "")
    assert first in {"", None} or storing["gpu_hours"] == pytest.approx(first, abs=0.01)
    assert hours is None or summary["gpu_hours"] == pytest.approx(hours, abs=0.01)
    assert ("rollouts that are stored first: no estimate" in text) is (first is None)
    assert summary["has_run_on_hardware"] is has_run
    assert (f"no run on {hardware} has been published" in text) is not has_run


def test_the_dry_run_says_what_the_baseline_lacks_and_which_operators_are_left_out() -> None:
    plan = make_run_plan("qwen3-4b-random", "mi300x")
    lines = [" ".join(line.split()) for line in plan_lines(plan)]
    expected = {
        "entropy metric not computed, in both variants",
        "garbage collector objects frozen after the warm-up (gc.freeze), in both variants",
        "logp not on mi300x in this run: expect no gain, since logp gives nearly all of it",
    }
    assert expected <= set(lines)
    assert not any("metric" in line or "garbage" in line for line in plan_lines(plan_smoke()))


def test_the_hardware_that_ran_is_that_of_the_evidence() -> None:
    named = {path.stem.rpartition("-")[2] for path in (ROOT / "docs/evidence").glob("*.tgz")}
    assert named | {"cpu"} == RAN_ON


@pytest.mark.parametrize(
    ("run", "hardware", "settings", "limit_min"),
    [
        ("qwen3-30b-a3b", "h200", (), 135),
        ("qwen3-30b-a3b", "h200", ("measure.design=parallel",), 90),
        ("qwen3-30b-a3b", "h200", ("time_limit_min=7",), 7),
        ("qwen3-4b-random", "h200", (), 10),  # minutes of a session
        ("module-qwen3-30b-a3b", "h200", (), 10),
        ("module-qwen3-30b-a3b", "cpu", (), 30),
        ("smoke", "cpu", (), 5),
    ],
)
def test_a_time_limit_is_the_run_s_own_or_half_as_much_again_as_its_estimate(
    run: str, hardware: str, settings: tuple[str, ...], limit_min: float
) -> None:
    assert make_run_plan(run, hardware, *settings).time_limit_min == limit_min


@pytest.mark.parametrize("name", list_names(run_folders()))
def test_every_shipped_run_plans_on_every_hardware_that_it_names(name: str) -> None:
    run = load_run(name)
    for hardware in run.model.layouts:
        plan = make_plan(
            run=run,
            stack=load_stack(run.model.stack),
            hardware=load_hardware(hardware),
            profile=load_profile("local", profile_folders("local")),
        )
        assert WORKLOADS[run.model.workload.kind].find_problems(plan) == []
        assert Plan.from_json(json.loads(dump_json(plan.to_json()))).plan_hash == plan.plan_hash


SESSIONS = ("measure.design=crossover", "measure.sessions=3")


def test_a_session_is_a_trial_alone_in_its_pair() -> None:
    plan = plan_smoke(*SESSIONS, is_exploratory=True)
    assert [trial.name for trial in plan.trials] == ["00-s1-crossover", "01-s2-crossover", "02-s3-crossover"]
    assert [trial.seed for trial in plan.trials] == [1234, 1235, 1236]
    assert plan.has_enabled
    assert plan.pairs() == {}
    assert {name: len(trials) for name, trials in plan.groups().items()} == {"s1": 1, "s2": 1, "s3": 1}
    assert (plan.num_steps, plan.run.measure.num_stored) == (2 + 10 * 8 + 2, 40)
    assert Plan.from_json(json.loads(dump_json(plan.to_json()))) == plan
    assert plan.expected_minutes() is None
    text = "\n".join(plan_lines(plan))
    assert (
        "3 of 84 steps: 2 warm-up steps, 8 blocks and 2 control blocks, each of 4 × 2 steps, and 2 shadow steps" in text
    )


def test_sessions_and_design_may_change_without_exploratory() -> None:
    assert not plan_smoke(*SESSIONS).is_exploratory
    with pytest.raises(SpecError, match="--variants: a session runs both variants, got 'baseline'"):
        plan_smoke(*SESSIONS, variants=("baseline",), is_exploratory=True)
    parallel = plan_smoke("measure.sessions=4")
    assert Measure.of_crossover.isdisjoint(parallel.to_json()["experiment"]["run"]["measure"])
    assert parallel.plan_hash == plan_smoke().plan_hash


NOTHING = "changes nothing here: this run measures"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["measure.pairs=4"], f"--set measure.pairs: {NOTHING} sessions, not pairs, got 4, "
         "expected --sessions, or --set measure.design=parallel"),
        (["measure.control_pairs=1"], f"--set measure.control_pairs: {NOTHING} sessions, not pairs, got 1, "
         "expected this value left out, or --set measure.design=parallel"),
        (["measure.design=parallel", "measure.blocks=3"], f"--set measure.blocks: {NOTHING} pairs, not sessions, "
         "got 3, expected this value left out, or --set measure.design=crossover"),
        (["measure.warmup_steps=1"], "--set measure.warmup_steps: is too small to warm up both variants, got 1, "
         "expected 2 or more"),
        (["measure.blocks=200", "measure.sessions=16"], "--set measure.blocks: 16 sessions of 1620 steps, got 200, "
         "expected at most 20000 steps in total, including warm-up"),
    ],
)  # fmt: skip
def test_keys_of_the_other_design_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        plan_smoke("measure.design=crossover", *settings, is_exploratory=True)
    assert str(caught.value) == message


def test_objects_can_only_be_frozen_after_a_warm_up_of_a_trained_model() -> None:
    with pytest.raises(SpecError, match="--set gc_freeze: this workload trains no model, got True, expected false"):
        make_tier_plan("module-smoke", "gc_freeze=true")
    with pytest.raises(SpecError, match="leaves no warm-up step, which gc_freeze needs, got 0, expected 1 or more"):
        plan_smoke("gc_freeze=true", "measure.warmup_steps=0", is_exploratory=True)
    assert "gc_freeze" not in plan_smoke().experiment["run"]
    assert plan_smoke("gc_freeze=true").experiment["run"]["gc_freeze"] is True


@pytest.mark.parametrize(
    ("setting", "title", "enabled", "baseline"),
    [
        (None, "", "logp,ratio_kl", ""),
        ("implementation", "torch.compile in place of vime's function", "compiled_logp", ""),
        ("baseline_implementation", "RL-Kernel in place of torch.compile", "logp,ratio_kl", "compiled_logp"),
    ],
)
def test_an_implementation_serves_a_variant(setting: str | None, title: str, enabled: str, baseline: str) -> None:
    settings = [f"rl_kernel.{setting}=torch-compile"] if setting else []
    plan = make_tier_plan("module-qwen3-4b", *settings, hardware="h200")
    needs_rl_kernel = enabled != "compiled_logp"
    assert (plan.run.switch_title, plan.needs_rl_kernel) == (title, needs_rl_kernel)
    assert [",".join(plan.ops_of(variant)) for variant in ("enabled", "baseline")] == [enabled, baseline]
    env = switch_env(plan, plan.trials[0])
    assert env["VIME_RL_KERNEL_OPS"] == enabled
    assert env.get("VIME_RL_KERNEL_BASELINE_OPS", "") == baseline
    lines = "\n".join(plan_lines(plan))
    assert title in lines
    assert ("if RL-Kernel is installed" in lines) is needs_rl_kernel
    keys = {"implementation", "baseline_implementation"} & plan.experiment["run"]["rl_kernel"].keys()
    assert keys == ({setting} if setting else set())


@pytest.mark.parametrize(
    ("run", "names", "message"),
    [
        ("module-qwen3-4b-tp2", ["implementation"], r"compiled_logp: not eligible here \(needs the whole vocab"),
        ("module-qwen3-4b-tp2", ["baseline_implementation"], r"compiled_logp: not eligible here \(needs the whole"),
        ("module-qwen3-4b", ["implementation", "baseline_implementation"], "serves both variants"),
    ],
)
def test_torch_compile_needs_the_whole_vocabulary_and_serves_one_variant(
    run: str, names: list[str], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        make_tier_plan(run, *(f"rl_kernel.{name}=torch-compile" for name in names), hardware="h200")


# The schedule of a session is balanced, comes from the seed alone, and gives both variants the same work in half a

SMALL = Measure(design="crossover", blocks=2, control_blocks=1)


@st.composite
def measures(draw: st.DrawFn) -> Measure:
    return Measure(
        design="crossover",
        warmup_steps=draw(st.integers(2, 6)),
        blocks=draw(st.integers(1, 9)),
        control_blocks=draw(st.integers(0, 4)),
        period_steps=draw(st.integers(1, 3)),
        shadow_steps=draw(st.integers(0, 3)),
    )


def test_the_text_of_a_seed_never_changes() -> None:
    assert make_schedule(SMALL, 1234).text == "beeebbbbeebbbbbbbbbbeeeebbss"
    assert len({make_schedule(Measure(design="crossover", blocks=20), seed).text for seed in range(40)}) == 40


@given(measure=measures(), seed=st.integers(0, 2**31))
def test_blocks_are_balanced_and_the_last_rollout_of_a_period_is_scored(measure: Measure, seed: int) -> None:
    schedule = make_schedule(measure, seed)
    for is_control, number in ((False, measure.blocks), (True, measure.control_blocks)):
        orders = Counter(block.order for block in schedule.blocks if block.is_control is is_control)
        assert sum(orders.values()) == number
        assert abs(orders[ORDERS[0]] - orders[ORDERS[1]]) == number % 2
    assert len(schedule.rollouts) == len(schedule.text) == measure.num_steps
    for number, rollout in enumerate(schedule.rollouts):
        if rollout.block is not None:  # control blocks run the baseline
            is_enabled = rollout.label == "B" and not schedule.blocks[rollout.block].is_control
            assert schedule.variant_of(number) == ("enabled" if is_enabled else "baseline")
    scored = [number for number in range(measure.num_steps) if schedule.is_scored(number)]
    first, step = measure.warmup_steps, measure.period_steps
    assert scored == list(range(first + step - 1, measure.num_steps - measure.shadow_steps, step))
    assert len(scored) == measure.num_scored
    assert {schedule.variant_of(number) for number in range(first)} == {"baseline", "enabled"}
    assert schedule.text[first:].count("s") == measure.shadow_steps
    assert schedule.text.rstrip("s").count("s") == 0


@given(measure=measures(), seed=st.integers(0, 2**31))
def test_both_periods_of_half_a_block_have_the_same_stored_rollouts(measure: Measure, seed: int) -> None:
    rollouts = [rollout for rollout in make_schedule(measure, seed).rollouts if rollout.block is not None]
    size = measure.period_steps
    periods = [[item.stored for item in rollouts[at : at + size]] for at in range(0, len(rollouts), size)]
    assert all(first == second for first, second in zip(periods[::2], periods[1::2], strict=True))
    distinct = [number for period in periods[::2] for number in period]
    assert distinct == list(range(measure.num_stored))


def test_every_balanced_arrangement_is_drawn_about_as_often_as_any_other() -> None:
    measure = Measure(design="crossover", blocks=4, control_blocks=0)
    drawn = Counter(tuple(block.order for block in make_schedule(measure, seed).blocks) for seed in range(1200))
    assert len(drawn) == 6
    assert all(150 < number < 250 for number in drawn.values())
    odd = Measure(design="crossover", blocks=3, control_blocks=0)
    more = Counter(sum(block.order == ORDERS[0] for block in make_schedule(odd, seed).blocks) for seed in range(1000))
    assert set(more) == {1, 2}
    assert 430 < more[1] < 570


# What operators.py promises: the table is complete, and eligibility names its reason.

OLDER, NEWER = HAS_BATCH_INVARIANT_LOGP
QWEN3_4B = {
    "advantage_estimator": "grpo",
    "use_kl_loss": True,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "low_var_kl",
    "entropy_coef": 0.0,
    "eps_clip": 0.2,
    "eps_clip_high": 0.28,
    "rollout_batch_size": 32,
    "n_samples_per_prompt": 8,
    "global_batch_size": 256,
}


def make_linear_case(**changes: Any) -> Case:
    """One in which nothing stands against ``linear_logp``."""
    return Case(**{"platform": "cuda", "has_entropy_metric": False, **changes})


def test_every_operator_runs_natively_on_a_cpu_alone_and_two_are_routed_by_default() -> None:
    assert DEFAULT_OPS == ("logp", "ratio_kl")
    assert find_conflicts(DEFAULT_OPS) == []
    for op, operator in OPERATORS.items():
        assert operator.name == op
        for platform, implementations in operator.implementations.items():
            assert {item.is_native for item in implementations} == {platform is Platform.CPU}
    served = {op: [OPERATORS[op].serves(needs_grad=needs_grad) for needs_grad in (True, False)] for op in OPERATORS}
    assert served == {
        "logp": [False, True], "ratio_kl": [True, False], "grpo_loss": [True, False], "linear_logp": [True, True],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("op", "case", "expected"),
    [
        ("logp", Case(platform="cuda", tensor_parallel=8, context_parallel=2), None),
        ("ratio_kl", Case(platform="rocm", tensor_parallel=4), None),
        ("logp", Case(platform="rocm", commit=NEWER), None),
        ("logp", Case(platform="rocm", commit=OLDER), Refusal(Reason.PLATFORM, "rocm, RL-Kernel 202f0e30e567")),
        ("logp", Case(platform="tpu"), Refusal(Reason.PLATFORM, "tpu")),
        ("logp", Case(platform="cuda", loss=LossOptions(has_no_grad_pass=False)), Refusal(Reason.NO_SUCH_CALL)),
        ("ratio_kl", Case(platform="cuda", loss=LossOptions(has_entropy_gradient=True)),
         Refusal(Reason.ENTROPY_GRADIENT)),
        ("ratio_kl", Case(platform="cuda", loss=LossOptions(is_top_p_replayed=True)),
         Refusal(Reason.TOP_P_REPLAY)),
        ("grpo_loss", Case(platform="cuda"), None),
        ("grpo_loss", Case(platform="cuda", tensor_parallel=2),
         Refusal(Reason.TENSOR_PARALLEL, "tensor parallel size 2")),
        ("grpo_loss", Case(platform="cuda", context_parallel=2),
         Refusal(Reason.CONTEXT_PARALLEL, "context parallel size 2")),
        ("grpo_loss", Case(platform="cuda", loss=LossOptions(is_clip_symmetric=False)),
         Refusal(Reason.LOSS_OPTIONS, "asymmetric clip")),
        ("grpo_loss", Case(platform="cuda", loss=LossOptions(kl_loss_type="k3")),
         Refusal(Reason.LOSS_OPTIONS, "KL type k3 from stored log-probs")),
        ("grpo_loss", Case(platform="cuda", loss=LossOptions(has_other_terms=True)),
         Refusal(Reason.LOSS_OPTIONS, "correction terms")),
        ("linear_logp", make_linear_case(), None),
        ("linear_logp", make_linear_case(tensor_parallel=8, context_parallel=2), None),
        ("linear_logp", make_linear_case(platform="rocm", tensor_parallel=8),
         Refusal(Reason.TENSOR_PARALLEL, "TritonLinearLogpOp is plain PyTorch with tensor parallel size 8")),
        ("linear_logp", make_linear_case(has_entropy_metric=True), Refusal(Reason.ENTROPY_METRIC)),
        ("linear_logp", make_linear_case(has_output_layer=False),
         Refusal(Reason.OUTPUT_LAYER, "this workload has no output layer")),
        ("linear_logp", make_linear_case(loss=LossOptions(has_multi_token_prediction=True)),
         Refusal(Reason.OUTPUT_LAYER, "multi-token prediction")),
        ("linear_logp", make_linear_case(loss=LossOptions(loss_type="sft_loss")),
         Refusal(Reason.LOSS_TYPE, "sft_loss")),
        ("linear_logp", make_linear_case(loss=LossOptions(rollout_temperature=0.8)),
         Refusal(Reason.TEMPERATURE, "0.8")),
    ],
)  # fmt: skip
def test_a_case_is_refused_for_its_first_reason(op: str, case: Case, expected: Refusal | None) -> None:
    assert find_refusal(op, case) == expected


def test_an_implementation_counts_by_class_or_backend_name_and_only_on_its_platform() -> None:
    logp = OPERATORS["logp"]
    generic = logp.find_implementation("cuda", "FusedLogpGenericOp")
    assert generic is not None
    assert generic is logp.find_implementation("cuda", "CUDA_FUSED_LOGP_GENERIC")
    assert logp.find_implementation("cuda", "NativeLogpOp") is None
    refusal = find_refusal("grpo_loss", Case(platform="cuda", tensor_parallel=4))
    assert str(refusal) == "needs the whole vocabulary on one rank (tensor parallel size 4)"


def test_operators_conflict_where_they_would_serve_one_call() -> None:
    assert find_conflicts(OPERATORS) == [
        ("grpo_loss", "linear_logp"),
        ("grpo_loss", "ratio_kl"),
        ("linear_logp", "logp"),
        ("linear_logp", "ratio_kl"),
    ]


@pytest.mark.parametrize(
    ("changes", "has_pass"),
    [
        ({}, True),
        ({"use_kl_loss": False}, False),
        ({"use_kl_loss": False, "kl_coef": 0.1}, True),
        ({"use_kl_loss": False, "global_batch_size": 128}, True),
        ({"use_kl_loss": False, "num_steps_per_rollout": 2}, True),
        ({"use_kl_loss": False, "num_steps_per_rollout": 2, "use_rollout_logprobs": True}, False),
        ({"use_kl_loss": False, "advantage_estimator": "gspo"}, True),
        ({"use_kl_loss": False, "use_critic": True}, True),
        ({"loss_type": "sft_loss", "compute_advantages_and_returns": False}, False),
        ({"loss_type": "sft_loss", "compute_advantages_and_returns": False, "num_steps_per_rollout": 2}, False),
        ({"use_kl_loss": False, "use_routing_replay": True}, True),
        ({"use_kl_loss": False, "use_routing_replay": True, "use_rollout_routing_replay": True}, False),
    ],
)
def test_a_pass_without_gradient_is_found_where_vime_makes_one(changes: dict[str, Any], has_pass: bool) -> None:
    assert read_loss_options(QWEN3_4B | changes).has_no_grad_pass is has_pass


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({}, "is_clip_symmetric", False),
        ({"entropy_coef": 0.01}, "has_entropy_gradient", True),
        ({"rollout_top_p": 0.9}, "is_top_p_replayed", True),
        ({"eps_clip_high": None}, "is_clip_symmetric", True),
        ({"kl_loss_coef": 0.001}, "kl_loss_type", "low_var_kl"),
        ({"use_tis": True}, "has_other_terms", True),
        ({"advantage_estimator": "gspo"}, "has_other_terms", True),
        ({"loss_type": "custom_loss"}, "has_other_terms", True),
        ({"loss_type": "custom_loss"}, "loss_type", "custom_loss"),
        ({"rollout_temperature": 0.9}, "rollout_temperature", 0.9),
        ({"mtp_num_layers": 1}, "has_multi_token_prediction", True),
    ],
)
def test_each_option_is_seen(changes: dict[str, Any], field: str, value: object) -> None:
    assert getattr(read_loss_options(QWEN3_4B | changes), field) == value


def test_steps_that_no_analysis_can_hold_are_refused_with_their_line() -> None:
    with pytest.raises(SpecError, match=r"measure\.scored_steps: 12 trials of 5002 steps, got 5000"):
        plan_smoke("measure.scored_steps=5000", "measure.pairs=6", "measure.warmup_steps=2", is_exploratory=True)
