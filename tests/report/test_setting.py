"""A report describes the run itself: changes by flags, what was measured, and what is not RL-Kernel's."""

from __future__ import annotations

import dataclasses

import pytest

from rlk_repro.report.markdown import render_markdown
from rlk_repro.report.setting import OLD_NORMALISER, OWN_ENTROPY, OWN_NORMALISER, describe_setting, find_own_work
from rlk_repro.report.view import make_view
from rlk_repro.rundir.results import DecisionSummary
from tests.support.analysis_examples import EXAMPLES, faster
from tests.support.slurm.examples import plan_for
from tests.support.tier_examples import make_tier_plan


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


@pytest.mark.parametrize(
    ("settings", "hardware", "expected"),
    [
        (("entropy_metric=true",), "h200", (OWN_ENTROPY.format(name="RL-Kernel", normaliser=OLD_NORMALISER),)),
        ((), "h200", ()),
        (('rl_kernel.ops=["logp"]',), "h200", ()),
        (("entropy_metric=false", 'rl_kernel.ops=["ratio_kl"]'), "h200", ()),
    ],
)
def test_rlk_repros_own_pass_is_named_where_enabled_uses_it(settings: tuple[str, ...], hardware: str, expected) -> None:
    assert find_own_work(make_tier_plan("module-qwen3-4b", *settings, hardware=hardware)) == expected
    assert "moments.py" in OWN_ENTROPY
    assert "moments.py" in OWN_NORMALISER


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
