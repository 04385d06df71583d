"""The answer in plain words, the memory verdict and the next command follow from the analysis."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlk_repro.analysis.memory import MemoryWord, judge_memory
from rlk_repro.base.findings import Finding, Level
from rlk_repro.report.answer import describe_answer, list_suspects, suggest_next
from rlk_repro.report.markdown import render_summary
from rlk_repro.report.surroundings import make_commands
from rlk_repro.report.view import Context, make_view
from rlk_repro.rundir.results import Analysis, GateStatus, PairStatus, ProofStatus, TrialStatus, VerdictWord
from tests.support.analysis_examples import small


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


def test_without_rl_kernel_memory_is_inconclusive() -> None:
    analysis = change(VerdictWord.INCONCLUSIVE, low=0.9, high=1.1)
    gates = tuple(
        replace(gate, status=GateStatus.UNDECIDED) if gate.name == "rl_kernel_active" else gate
        for gate in analysis.gates
    )
    found = judge_memory(replace(analysis, gates=gates))
    assert (found.word, "RL-Kernel is not proved to have run" in found.sentence) == (MemoryWord.INCONCLUSIVE, True)
    failed = judge_memory(change(VerdictWord.NOT_COMPARABLE, low=0.9, high=1.1))
    assert "the variants are not comparable" in failed.sentence


def test_memory_is_not_judged_where_a_gate_is_undecided_or_a_trial_ran_out_of_memory() -> None:
    analysis = change(VerdictWord.FASTER, low=0.95, high=0.96, memory=(1.0, 1.0))
    assert judge_memory(analysis).word is MemoryWord.SAME
    gates = tuple(
        replace(gate, status=GateStatus.UNDECIDED) if gate.name == "manifests" else gate for gate in analysis.gates
    )
    assert judge_memory(replace(analysis, gates=gates)).sentence.startswith("inconclusive: undecided gates: manifests;")
    trials = (replace(analysis.trials[0], status=TrialStatus.OUT_OF_MEMORY), *analysis.trials[1:])
    found = judge_memory(replace(analysis, trials=trials))
    assert found.sentence.startswith(f"inconclusive: {trials[0].name} ran out of memory;")


def test_a_proposed_run_has_the_pairs_that_a_verdict_needs() -> None:
    analysis = change(VerdictWord.INCONCLUSIVE, low=1.0, high=1.2)
    effects = tuple(replace(item, ratio=1.5, n=2, sd_log=0.05) for item in analysis.effects)
    assert " --pairs 6 " in suggest_next(make_view(replace(analysis, effects=effects)), "bundle.tgz")


def test_no_larger_run_is_proposed_where_the_speed_is_decided() -> None:
    analysis = change(VerdictWord.INCONCLUSIVE, low=0.90, high=0.92)
    effects = tuple(replace(item, sd_log=0.01) if item.metric == "step_time_s" else item for item in analysis.effects)
    view = make_view(replace(analysis, effects=effects))
    assert suggest_next(view, "b.tgz") == "rlk-repro replay b.tgz --analyze-only"


def test_where_rl_kernel_did_not_run_the_next_step_builds_it() -> None:
    analysis = change(VerdictWord.INCONCLUSIVE, low=0.9, high=1.1)
    trials = tuple(
        replace(trial, proof=ProofStatus.FALLBACK) if trial.variant == "enabled" else trial for trial in analysis.trials
    )
    assert suggest_next(make_view(replace(analysis, trials=trials)), "b.tgz").startswith("rlk-repro doctor ")
    demo = make_view(replace(analysis, trials=trials, run="demo"))
    assert suggest_next(demo, "b.tgz").startswith("make demo-rl-kernel ")
    on_a_cpu = [replace(trial, proof=ProofStatus.NATIVE) for trial in trials if trial.variant == "enabled"]
    native = suggest_next(make_view(replace(analysis, trials=(*trials, *on_a_cpu), run="demo")), "b.tgz")
    assert native.endswith("# RL-Kernel is installed, but its kernels run only on a GPU")
    faster = make_view(change(VerdictWord.FASTER, low=0.2, high=0.3))
    assert suggest_next(faster, "b.tgz") == "rlk-repro replay b.tgz --analyze-only"


@pytest.mark.parametrize("is_folder", [True, False])
def test_for_an_unsealed_run_no_command_is_advised_that_needs_a_seal(is_folder: bool) -> None:
    context = Context(bundle="x", is_sealed=False, is_folder=is_folder)
    view = make_view(change(VerdictWord.FASTER, low=0.2, high=0.3), context)
    commands = [suggest_next(view, "x"), *(command for command, _ in make_commands(view).lines)]
    assert [command.partition(" x")[0] for command in commands] == ["rlk-repro inspect", "rlk-repro report"]
    assert render_summary(view.analysis, context).rstrip().endswith("\nnot sealed")


def test_an_inconclusive_result_names_the_suspects_among_its_findings() -> None:
    analysis = change(VerdictWord.INCONCLUSIVE, low=0.9, high=1.1)
    findings = (
        Finding(Level.WARNING, "00-p1-baseline: host.other_runs", "no other run", "theirs"),
        Finding(Level.WARNING, "01-p1-enabled: host.other_runs", "no other run", "theirs"),
        Finding(Level.INFO, "host.governor", "performance", "powersave"),
        Finding(Level.WARNING, "host.load_average", "below 8", "40"),
        Finding(Level.WARNING, "nodes", "1", "2"),
    )
    trials = (replace(analysis.trials[0], throttled_fraction=0.2), *analysis.trials[1:])
    found = replace(analysis, findings=findings, trials=trials)
    assert list_suspects(make_view(found)) == (
        "another run on this machine (theirs); a busy host (40); GPUs slowed down by heat or power (1 trial)"
    )
    assert list_suspects(make_view(analysis)) == ""
    assert list_suspects(make_view(replace(found, verdict=change(VerdictWord.FASTER, low=0.5, high=0.6).verdict))) == ""
