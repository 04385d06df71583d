"""The answer in plain words, the memory verdict and the next command follow from the analysis."""

from __future__ import annotations

import csv
import dataclasses
import math
from dataclasses import replace
from pathlib import Path

import pytest

from rlk_repro.analysis.allocations import Allocation
from rlk_repro.analysis.memory import MemoryWord, judge_memory
from rlk_repro.base.findings import Finding, Level
from rlk_repro.replay.recorded import load_result
from rlk_repro.report.agreement import make_agreement
from rlk_repro.report.answer import describe_answer, describe_ground, list_suspects, suggest_next
from rlk_repro.report.basis import describe_basis, describe_sensitivity
from rlk_repro.report.blocks import Facts
from rlk_repro.report.csv_tables import write_tables
from rlk_repro.report.markdown import render_markdown, render_summary
from rlk_repro.report.records import _make_rl_kernel_cell, make_commands
from rlk_repro.report.results import BY_BLOCKS, make_effects
from rlk_repro.report.sections import make_verdict
from rlk_repro.report.setting import (
    NO_COLLECTION,
    NO_ENTROPY,
    NO_R3,
    OLD_NORMALISER,
    OWN_ENTROPY,
    OWN_NORMALISER,
    describe_setting,
    find_limits,
    find_own_work,
)
from rlk_repro.report.view import Context, View, make_view
from rlk_repro.rundir.manifest import Manifest
from rlk_repro.rundir.results import Analysis, DecisionSummary, GateStatus, PairStatus, TrialStatus, VerdictWord
from rlk_repro.statistics.power import Design
from tests import ROOT
from tests.support.analysis_examples import EXAMPLES, faster, small
from tests.support.run_plans import make_tier_plan
from tests.support.slurm.examples import plan_for


def change(
    word: VerdictWord, *, low: float, high: float, memory: tuple[float, float] = (1.0, 1.0), workload: str = "vime"
) -> Analysis:
    """Return the small example with another word and other intervals."""
    analysis = small()
    ends = {"step_time_s": (low, high), "mean_step_time_s": (low, high), "peak_memory_bytes": memory}
    effects = tuple(
        replace(item, low=ends[item.metric][0], high=ends[item.metric][1], ratio=sum(ends[item.metric]) / 2, n=6)
        if item.metric in ends
        else item
        for item in analysis.effects
    )
    verdict = replace(analysis.verdict, word=word, headline=f"{word}: because; more", num_pairs=6)
    return replace(analysis, effects=effects, verdict=verdict, workload=workload)


@pytest.mark.parametrize("status", [PairStatus.VOID, PairStatus.DROPPED])
def test_the_times_of_the_answer_are_those_of_the_scored_pairs(status: PairStatus) -> None:
    analysis = change(VerdictWord.FASTER, low=0.95, high=0.96)
    first, second = analysis.pairs
    lost = replace(analysis, pairs=(first, replace(second, status=status)))
    names = {first.first, first.second}
    without = replace(lost, trials=tuple(trial for trial in analysis.trials if trial.name in names))
    assert describe_answer(make_view(lost)) == describe_answer(make_view(without))


@pytest.mark.parametrize(
    ("ends", "word"),
    [
        ((0.5, 0.98), MemoryWord.SMALLER),
        ((1.02, 1.03), MemoryWord.LARGER),
        ((0.995, 1.005), MemoryWord.SAME),
        ((0.98, 1.0), MemoryWord.INCONCLUSIVE),
    ],
)
def test_memory_has_its_own_verdict_word(ends: tuple[float, float], word: MemoryWord) -> None:
    assert judge_memory(change(VerdictWord.INCONCLUSIVE, low=0.9, high=1.1, memory=ends)).word is word


def set_undecided(analysis: Analysis, name: str) -> Analysis:
    gates = (replace(gate, status=GateStatus.UNDECIDED) if gate.name == name else gate for gate in analysis.gates)
    return replace(analysis, gates=tuple(gates))


def test_without_rl_kernel_memory_is_inconclusive() -> None:
    found = judge_memory(set_undecided(change(VerdictWord.INCONCLUSIVE, low=0.9, high=1.1), "rl_kernel_active"))
    assert (found.word, "RL-Kernel is not proved to have run" in found.sentence) == (MemoryWord.INCONCLUSIVE, True)
    failed = judge_memory(change(VerdictWord.NOT_COMPARABLE, low=0.9, high=1.1))
    assert "the variants are not comparable" in failed.sentence


def test_memory_is_not_judged_where_a_gate_is_undecided_or_a_trial_ran_out_of_memory() -> None:
    analysis = change(VerdictWord.FASTER, low=0.95, high=0.96, memory=(1.0, 1.0))
    assert judge_memory(analysis).word is MemoryWord.SAME
    undecided = set_undecided(analysis, "manifests")
    assert judge_memory(undecided).sentence.startswith("inconclusive: undecided gates: manifests;")
    trials = (replace(analysis.trials[0], status=TrialStatus.OUT_OF_MEMORY), *analysis.trials[1:])
    found = judge_memory(replace(analysis, trials=trials))
    assert found.sentence.startswith(f"inconclusive: {trials[0].name} ran out of memory;")


def test_a_larger_run_is_proposed_only_where_it_decides_the_speed() -> None:
    def propose(analysis: Analysis, *flags: str, **changes: float) -> str:
        effects = tuple(replace(item, **changes) for item in analysis.effects)  # type: ignore[arg-type]
        context = Context(flags=flags or None)
        return suggest_next(make_view(replace(analysis, effects=effects), context), "b.tgz")

    open_one = change(VerdictWord.INCONCLUSIVE, low=1.0, high=1.2)
    flag = "--set entropy_metric=true"
    assert f" --pairs 6 {flag}  # " in propose(open_one, flag, ratio=1.5, n=2, sd_log=0.05)
    for flags in ((), (401 * "x",)):
        command = "rlk-repro replay b.tgz  # this run with its own settings; 6 pairs would decide"
        assert propose(open_one, *flags, ratio=1.5, n=2, sd_log=0.05) == command
    decided = change(VerdictWord.INCONCLUSIVE, low=0.90, high=0.92)
    assert propose(decided, sd_log=0.01) == "rlk-repro replay b.tgz --analyze-only"
    again = propose(set_undecided(decided, "peak_memory_bytes"), sd_log=0.01)
    assert again == "rlk-repro replay b.tgz  # this run again; undecided so far: peak_memory_bytes"


@pytest.mark.parametrize("is_sealed", [True, False])
@pytest.mark.parametrize(
    ("run", "reason", "half"),
    [
        ("qwen3-30b-a3b-random-4l", "s1: no block counts (1 repeated allocation in step 6)", 23040),
        ("qwen3-30b-a3b-random-4l", "s1: out of memory; s2: failed", 23040),
        ("qwen3-30b-a3b-random-4l", "s1: failed", None),
        ("glm4-9b", "s1: out of memory", None),  # the longest sample would not fit
    ],
)
def test_where_memory_was_full_smaller_microbatches_are_proposed(
    run: str, reason: str, half: int | None, is_sealed: bool
) -> None:
    analysis = change(VerdictWord.INCONCLUSIVE, low=0.9, high=1.1)
    pairs = tuple(replace(pair, status=PairStatus.VOID, reason=reason) for pair in analysis.pairs)
    full = replace(analysis, pairs=pairs, verdict=replace(analysis.verdict, num_pairs=0))
    setting = "--set workload.placements.h200.max_tokens_per_gpu="

    def suggest(*flags: str) -> str:
        context = Context(plan=plan_for(run, "h200"), flags=flags, is_sealed=is_sealed)
        return suggest_next(make_view(full, context), "b.tgz")

    flags = f" --pairs {full.num_pairs_planned} --set gc_freeze=false {setting}{half}  # smaller"
    assert (flags in suggest(f"{setting}46080", "--set gc_freeze=false")) is (half is not None)
    assert "# smaller" not in suggest(401 * "x")


@pytest.mark.parametrize("is_folder", [True, False])
def test_for_an_unsealed_run_no_command_is_advised_that_needs_a_seal(is_folder: bool) -> None:
    context = Context(bundle="x", is_sealed=False, is_folder=is_folder)
    view = make_view(change(VerdictWord.FASTER, low=0.2, high=0.3), context)
    commands = [suggest_next(view, "x"), *(command for command, _ in make_commands(view).lines)]
    assert [command.partition(" x")[0] for command in commands] == ["rlk-repro inspect", "rlk-repro report"]
    assert "- bundle: `x` (not sealed)" in render_summary(view.analysis, context)


def test_an_inconclusive_result_names_the_suspects_among_its_findings() -> None:
    analysis = change(VerdictWord.INCONCLUSIVE, low=0.9, high=1.1)
    findings = (
        Finding(Level.WARNING, "00-p1-baseline: host.other_runs", "no other run", "theirs"),
        Finding(Level.WARNING, "01-p1-enabled: host.other_runs", "no other run", "theirs"),
        Finding(Level.INFO, "host.governor", "performance", "powersave"),
        Finding(Level.INFO, "01-p1-enabled: host.runs_beside", "a machine of its own", "on other GPUs: hers"),
        Finding(Level.WARNING, "host.load_average", "below 8", "40"),
        Finding(Level.WARNING, "nodes", "1", "2"),
    )
    trials = (replace(analysis.trials[0], throttled_fraction=0.2), *analysis.trials[1:])
    found = replace(analysis, findings=findings, trials=trials)
    assert list_suspects(make_view(found)) == (
        "another run on this machine (theirs); a run beside it (on other GPUs: hers); a busy host (40); "
        "GPUs slowed down by heat or power (1 trial)"
    )
    assert list_suspects(make_view(analysis)) == ""
    assert list_suspects(make_view(replace(found, verdict=change(VerdictWord.FASTER, low=0.5, high=0.6).verdict))) == ""


# A report describes the run itself: changes by flags, what was measured, and what is not RL-Kernel's.


def test_values_that_flags_changed_are_shown_also_where_they_equal_a_default() -> None:
    settings = ("entropy_metric=true", "workload.lead_ms=0", 'rl_kernel.ops=["logp"]')
    setting = dict(describe_setting(make_tier_plan("module-qwen3-4b", *settings, hardware="h200")))
    changed = "entropy_metric = true (--set), rl_kernel.ops = [logp] (--set), workload.lead_ms = 0.0 (--set)"
    found = (setting["overrides"], setting["entropy metric"], setting["device"])
    assert found == (changed, "computed, in both variants", "idle before each pass, in both variants")
    plan = plan_for("qwen3-4b-random", "h200", settings=("gc_freeze=false",))
    assert dict(describe_setting(plan))["overrides"] == "gc_freeze = false (--set)"


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


@pytest.mark.parametrize(
    ("run", "settings", "expected"),
    [
        ("qwen3-4b-random", (), [NO_COLLECTION, NO_ENTROPY]),
        ("qwen3-4b-random", ("gc_freeze=false", "entropy_metric=true"), []),
        ("qwen3-30b-a3b-random-4l", (), [NO_COLLECTION, NO_ENTROPY, NO_R3]),
        ("module-qwen3-4b", (), [NO_ENTROPY]),
        ("smoke", (), []),
    ],
)
@pytest.mark.parametrize("is_old", [False, True])
def test_what_settings_hide_is_said_once_and_only_where_it_holds(
    run: str, settings: tuple[str, ...], expected: list[str], is_old: bool
) -> None:
    plan = plan_for(run, "h200", settings=settings)
    own = plan.run.may_not_claim
    if is_old:
        own = (f"{NO_COLLECTION}, as it was said", f"{NO_ENTROPY}, and nothing about other lengths", *own)
    found = find_limits(dataclasses.replace(plan, run=plan.run.model_copy(update={"may_not_claim": own})))
    starts = [start for start in (NO_COLLECTION, NO_ENTROPY, NO_R3) if any(start in text for text in found)]
    assert starts == expected
    assert len(found) == len(set(found))
    assert {*plan.run.may_not_claim} <= {*found}
    assert not is_old or any(text.endswith("nothing about other lengths") for text in found)


def test_timers_with_other_work_inside_are_marked_and_have_no_ratio() -> None:
    analysis = faster()
    decision = DecisionSummary(
        op="grpo_loss", implementation="TritonGRPOLossOp", reason="", is_rl_kernel=True, calls=8, tokens=9, fallbacks=0
    )
    trials = tuple(dataclasses.replace(trial, decisions=(decision,)) for trial in analysis.trials)
    view = make_view(dataclasses.replace(analysis, trials=trials))
    assert not view.is_comparable("module_log_probs_forward_s")
    assert view.is_comparable("module_grpo_loss_forward_s")
    text = render_markdown(view.analysis)
    marked = [line for line in text.splitlines() if line.startswith("| log-prob, forward")]
    assert any("other work †" in line for line in marked)
    assert "† Not comparable" in text
    assert "†" not in render_markdown(EXAMPLES["small"]())


# A report names what an operator resolved to, and what pairs could have shown.


@pytest.mark.parametrize(
    ("op", "implementation", "is_rl_kernel", "word"),
    [
        ("logp", "FusedLogpGenericOp", True, "yes"),
        ("logp", "NativeLogpOp", True, "native"),
        ("logp", "rlk_repro.refengine.core", False, "no"),
        ("an operator of a later version", "SomeOp", True, "yes"),
    ],
)
def test_plain_pytorch_is_called_native(op: str, implementation: str, is_rl_kernel: bool, word: str) -> None:
    decision = DecisionSummary(
        op=op, implementation=implementation, reason="", is_rl_kernel=is_rl_kernel, calls=1, tokens=1, fallbacks=0
    )
    assert _make_rl_kernel_cell(decision).text == word


def test_the_sensitivity_is_the_effect_that_nine_in_ten_such_experiments_find() -> None:
    analysis = faster()
    effect = dataclasses.replace(analysis.effects[0], n=6, sd_log=0.146)
    assert describe_sensitivity(analysis, effect) == (
        "with this noise (standard deviation 14.6 %), 6 pairs detect a speed-up of 31.6 % in 9 of 10 runs"
    )
    assert "sensitivity" in dict(describe_basis(make_view(analysis, Context())).items)
    chance = Design(6, 0.146, analysis.verdict.threshold, 0.05, 0).power(math.log1p(0.316))
    assert chance == pytest.approx(0.9, abs=0.01)


def view_of(*pairs: tuple[str, ...], lost: str = "") -> View:
    analysis = small()
    status = {lost: PairStatus.VOID}
    analysis = replace(
        analysis, pairs=tuple(replace(pair, status=status.get(pair.pair, pair.status)) for pair in analysis.pairs)
    )
    allocations = tuple(
        Allocation(name=str(number), pairs=names, nodes=("a",), gpus=(f"GPU-{number}",))
        for number, names in enumerate(pairs)
    )
    return make_view(analysis, Context(allocations=allocations))


def test_the_ground_of_a_result_counts_the_allocations_with_results() -> None:
    assert describe_ground(view_of(("p1",), ("p2",))).endswith(", in 2 allocations")
    for view in (view_of(("p1", "p2")), view_of(("p1",), ("p2",), lost="p2"), view_of()):
        assert "allocation" not in describe_ground(view)


# Reports on bundles of older rules show the noise of blocks beside the sealed interval.

EVIDENCE = ROOT / "docs" / "evidence"
FOUR_INTERVAL = "12.70 to 14.31 %; the noise of its blocks alone gives 12.69 to 14.32 %"
FOUR = ("qwen3-30b-a3b-random-4l-h200.tgz", FOUR_INTERVAL, "3.35")
OTHER = ("qwen3-4b-random-tp2-h100.tgz", "3.12 to 3.74 %)", "1.65")


@pytest.mark.parametrize(("bundle", "interval", "sensitivity"), [FOUR, OTHER])
def test_a_narrow_interval_beside_the_noise(bundle: str, interval: str, sensitivity: str) -> None:
    view = make_view(*load_result(EVIDENCE / bundle, is_linked=False)[:2])
    assert interval in describe_answer(view)
    assert f"speed-up of {sensitivity}" in dict(describe_basis(view).items)["sensitivity"].text
    tables = make_effects(view).blocks
    assert BY_BLOCKS in [column.name for table in tables for column in table.columns]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("shipped", "tree", "note", "is_linked"),
    [
        (("vime",), None, "pinned, tree verified", True),
        ((), None, "pinned, tree verified", False),
        (("vime",), "0" * 40, "not the pinned one", False),
    ],
)
def test_a_commit_is_linked_only_where_this_version_ships_its_pin(
    shipped: tuple[str, ...], tree: str | None, note: str, *, is_linked: bool
) -> None:
    plan = plan_for("qwen3-4b-random", "h200")
    code = {"vime": {"tree": tree or plan.stack.pins["vime"].tree}}
    context = Context(plan=plan, shipped_pins=shipped, manifests=(Manifest(node="n", sections={"code": code}),))
    facts = next(block for block in make_verdict(make_view(small(), context)).blocks if isinstance(block, Facts))
    cell = dict(facts.items)["vime"]
    assert (cell.note, cell.target.startswith("https://github.com/")) == (note, is_linked)


def test_a_baseline_that_torch_compile_serves_is_named() -> None:
    plan = make_tier_plan("module-qwen3-4b", "rl_kernel.baseline_implementation=torch-compile", hardware="h200")
    assert dict(describe_setting(plan))["baseline"] == "vime with torch.compile and its entropy metric removed"


def test_tables_for_other_tools_have_a_row_per_step_and_per_effect(tmp_path: Path) -> None:
    analysis = load_result(ROOT / "docs" / "evidence" / "module-qwen3-4b-027c809-h200.tgz", is_linked=False)[0]
    write_tables(analysis, tmp_path)
    steps = list(csv.DictReader((tmp_path / "steps.csv").read_text().splitlines()))
    series = [trial.get_series("step_time_s") for trial in analysis.trials]
    number = sum(value is not None for item in series if item is not None for value in item.values)
    assert sum(bool(row["step_time_s"]) for row in steps) == number > 0
    effects = {row["metric"]: row for row in csv.DictReader((tmp_path / "effects.csv").read_text().splitlines())}
    assert float(effects["step_time_s"]["ratio"]) == analysis.effects[0].ratio


def test_a_table_of_no_tokens_is_left_out() -> None:
    """Random weights train on made rollouts, which hold no log-probs to compare with."""
    analysis, context = load_result(EVIDENCE / "glm4-9b-random-one-h200.tgz", is_linked=False)
    first, second = (str(block) for block in make_agreement(make_view(analysis, context)).blocks)
    assert "No token was compared." in first
    assert "baseline: the batch has no log-probs of the rollout" in second
    analysis, context = load_result(EVIDENCE / "qwen3-4b-random-live-h200.tgz", is_linked=False)
    assert "1,176,105" in str(make_agreement(make_view(analysis, context)).blocks[1])


def test_tokens_without_a_finite_log_prob_are_shown() -> None:
    analysis, context = load_result(EVIDENCE / "glm4-9b-random-one-h200.tgz", is_linked=False)
    found = tuple(replace(item, num_not_finite=9216, reason="") for item in analysis.agreement)
    view = make_view(replace(analysis, agreement=found), context)
    assert "9,216" in str(make_agreement(view).blocks[1])
