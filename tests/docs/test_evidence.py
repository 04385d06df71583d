"""The evidence page says what its bundles hold."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import shlex
import statistics
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.analysis.allocations import Allocation, list_allocations
from rlk_repro.base.files import sha256_file
from rlk_repro.base.units import GIB
from rlk_repro.bundle.seal import open_bundle
from rlk_repro.logs.ops import read_ops
from rlk_repro.plan import Plan
from rlk_repro.replay.compare import compare_analyses, diff_bundles
from rlk_repro.replay.difference import find_difference
from rlk_repro.replay.recorded import load_result
from rlk_repro.report.labels import headline_value
from rlk_repro.report.setting import describe_setting
from rlk_repro.rundir.manifest import load_manifests
from rlk_repro.rundir.results import Analysis, GateStatus, ProofStatus
from rlk_repro.spec.load import load_run
from rlk_repro.statistics.stats import t_interval
from rlk_repro.workloads.vime.memory import estimate_memory
from tests import ROOT
from tests.docs.test_docs import make_anchor

FOLDER = ROOT / "docs" / "evidence"
PAGE = (FOLDER / "README.md").read_text()
BUNDLES = sorted(FOLDER.glob("*.tgz"))
FIVE = "A step of training at Qwen3-4B's sizes"
TWO_GPUS = "Qwen3-4B's sizes over two GPUs"
EXPERTS = "Four layers of Qwen3-30B-A3B with R3"
ENTROPY = "A step with vime's entropy metric"
NARROW = (FIVE, ENTROPY)  # results whose interval is narrow enough to exclude what the parts save
LIVE = "vime end to end"
MEMORY = "The largest microbatch"
COLLECTING = "The step with vime's garbage collection"
REAL_SIZES = (FIVE, TWO_GPUS, EXPERTS, ENTROPY, COLLECTING, LIVE)
VIME = {
    FIVE: "qwen3-4b-random-five-h200.tgz",
    TWO_GPUS: "qwen3-4b-random-tp2-h100.tgz",
    EXPERTS: "qwen3-30b-a3b-random-4l-sixteen-h200.tgz",
    ENTROPY: "qwen3-4b-random-entropy-h200.tgz",
    COLLECTING: "qwen3-4b-random-h200.tgz",
    LIVE: "qwen3-4b-random-live-h200.tgz",
}
EARLIER_EXPERTS = ("qwen3-30b-a3b-random-4l-six-h200.tgz", "qwen3-30b-a3b-random-4l-h200.tgz")
PARTS = ("module_log_probs_no_grad_s", "module_grpo_loss_forward_s", "module_grpo_loss_backward_s")
ROWS = {
    "step": ("step_time_s", 1, "s"),
    "rollout, by vLLM": ("rollout_time_s", 1, "s"),
    "training, all of it": ("train_time_s", 1000, "ms"),
    "old-policy and reference pass: log-probs, no gradient": ("module_log_probs_no_grad_s", 1000, "ms"),
    "log-probs, forward": ("module_log_probs_forward_s", 1000, "ms"),
    "log-probs, backward": ("module_log_probs_backward_s", 1000, "ms"),
    "GRPO loss, forward": ("module_grpo_loss_forward_s", 1000, "ms"),
    "GRPO loss, backward": ("module_grpo_loss_backward_s", 1000, "ms"),
    "peak memory of the passes without gradient": ("peak_memory_in_forward_only_bytes", 2**-30, "GiB"),
    "peak memory of the step": ("peak_memory_bytes", 2**-30, "GiB"),
}
REPAIRED = (
    "vime",
    "operators",
    "module-qwen3-4b-tp2",
    "qwen3-4b-random-gc",
    "qwen3-4b-random-e",
    "qwen3-4b-random-f",
    "qwen3-4b-random-live",
    "qwen3-4b-random-tp2",
    "qwen3-30b",
    "qwen3-4b-agreement",
    "qwen3-4b-memory",
)
AGREEMENT = (
    "vime-agreement-h200.tgz",
    "vime-agreement-r3-h200.tgz",
    "vime-agreement-r3-off-h200.tgz",
    "qwen3-4b-agreement-h200.tgz",
    "vime-agreement-tp2-h100.tgz",
)
MODULE = {
    "With the entropy": "module-qwen3-4b-sessions-entropy-h200.tgz",
    "RL-Kernel alone": "module-qwen3-4b-sessions-h200.tgz",
    "The same on another machine": "module-qwen3-4b-replay-h200.tgz",
    "In pairs of processes": "module-qwen3-4b-pairs-h200.tgz",
}


@functools.cache
def analyse(name: str) -> Analysis:
    return load_result(FOLDER / name, is_linked=False)[0]


@pytest.mark.parametrize("bundle", BUNDLES, ids=lambda path: path.name)
def test_every_bundle_is_named_with_its_id_its_gpu_and_the_commits_that_it_records(bundle: Path) -> None:
    with open_bundle(bundle) as run_dir:
        bundle_id = sha256_file(run_dir.checksums)
        (manifest,) = load_manifests(run_dir)
    code: Any = manifest.sections["code"]
    gpu: Any = manifest.sections["gpu"]
    assert f"`{bundle.name}`, id `{bundle_id[:12]}…`" in " ".join(PAGE.split())
    assert f"`{gpu['devices'][0]['uuid'][:13]}…`" in PAGE
    ours = code["rlk_repro"]
    assert f"`{(ours['commit'] if isinstance(ours['commit'], str) else ours['package_tree'])[:12]}`" in PAGE
    assert f"`{code['rl_kernel']['commit'][:12]}`" in PAGE
    assert code["rl_kernel"]["repairs"] == (["cccl3-functionals"] if bundle.name.startswith(REPAIRED) else [])
    assert not isinstance(code["vime"]["commit"], str)


@pytest.mark.parametrize(("title", "name"), MODULE.items())
def test_the_commands_and_numbers_of_a_module_run_are_its_own(title: str, name: str) -> None:
    section = find_section(title)
    analysis = analyse(name)
    with open_bundle(FOLDER / name) as run_dir:
        plan = Plan.load(run_dir.plan)
    (command,) = re.findall(r"^rlk-repro submit --run module-.*$", section, flags=re.MULTILINE)
    changed = dict(describe_setting(plan))["overrides"]
    assert all(source.split()[0] in command for source in plan.sources.values() if source.startswith("--"))
    # version 0.2.0 did not record the flag that chose the default design
    is_unrecorded = not plan.is_crossover and "measure.design" not in plan.sources
    assert len(re.findall(r" --", command)) == 3 + changed.count(" = ") + is_unrecorded  # run, hardware, wait
    for metric, text in (("actor_train_time_s", "GRPO loss"), ("ref_log_probs_time_s", "reference pass")):
        row = next(line for line in section.splitlines() if line.startswith(f"| {text}"))
        ms = [float(found) for found in re.findall(r"([\d.]+) ms", row)]
        assert ms == pytest.approx(
            [1000 * find_mean(analysis, metric, kind) for kind in ("baseline", "enabled")], rel=0.005
        )
        assert float(row.split("|")[4]) == pytest.approx(ms[0] / ms[1], abs=0.06)
    joules = [float(found) for found in re.findall(r"([\d.]+) J ", section)]
    assert joules == pytest.approx(
        [find_mean(analysis, "energy_j", variant) for variant in ("baseline", "enabled")], rel=0.005
    )


@pytest.mark.parametrize("bundle", BUNDLES, ids=lambda path: path.name)
def test_the_first_table_has_a_row_for_each_bundle(bundle: Path) -> None:
    """Step time with its interval, number of pairs or sessions, energy and verdict, as the logs give them."""
    (row,) = (line for line in PAGE.splitlines() if f"]({bundle.name}) |" in line)
    _, _, step, ratio, n, energy, verdict, link, _ = (cell.strip() for cell in row.split("|"))
    analysis = analyse(bundle.name)
    with open_bundle(bundle) as run_dir:
        assert link.startswith(f"[`{sha256_file(run_dir.checksums)[:12]}`]")
    assert verdict == analysis.verdict.word.value
    if not analysis.effects or analysis.effects[0].low is None:
        assert ratio.startswith("none: ")
        return
    effect = analysis.effects[0]
    assert ratio == f"{effect.ratio:.4f} ({effect.low:.4f} to {effect.high:.4f})"
    assert n == f"{effect.n} {analysis.unit}s"
    assert ("loss functions alone" in step) is (analysis.workload == "module")
    if analysis.effect("energy_j") is None:
        assert energy == "not measured"
    else:
        joules = [find_mean(analysis, "energy_j", variant) for variant in ("baseline", "enabled")]
        assert energy == " → ".join(f"{float(f'{value:.3g}'):g} J" for value in joules)


def test_the_module_run_on_another_machine_differs_by_what_the_page_says() -> None:
    first, second = (analyse(MODULE[title]) for title in ("RL-Kernel alone", "The same on another machine"))
    comparison = compare_analyses(first, second)
    section = " ".join(find_section("The same on another machine").split())
    assert f"The level is *{comparison.level.value}*" in section
    found = re.search(r"difference (\S+ %), 95 % interval (\S+ to \S+ %)", comparison.headline)
    assert found is not None
    assert f"{found[1]} (95 % interval {found[2]})" in section


@pytest.mark.parametrize(("title", "name"), MODULE.items())
def test_the_verdict_of_a_module_run_is_its_own(title: str, name: str) -> None:
    section = " ".join(find_section(title).split())
    effect = analyse(name).effects[0]
    assert f"*{analyse(name).verdict.word.value}*" in section
    assert f"{effect.ratio:.4f}, 95 % interval {effect.low:.4f} to {effect.high:.4f}" in section


def test_shadow_steps_of_the_module_run_found_what_the_page_says() -> None:
    shadows = analyse(MODULE["RL-Kernel alone"]).shadows
    section = find_section("RL-Kernel alone")
    assert not any(item.error for item in shadows)
    assert f"at most {max(item.log_prob_max or 1 for item in shadows):.1e}".replace("e-0", "e-") in section
    for case in ("as trained", "peaked"):
        share = max(item.gradient_share or 1 for item in shadows if item.case == case)
        assert f"{share:.1e}".replace("e-0", "e-") in section


@pytest.mark.parametrize(("title", "name"), VIME.items())
def test_the_numbers_and_the_verdict_of_a_run_of_vime_are_its_own(title: str, name: str) -> None:
    section = find_section(title)
    analysis = analyse(name)
    assert f"*{analysis.verdict.word.value}*" in section
    primary = analysis.effects[0]
    interval = f"{primary.ratio:.3f}, (95 % interval )?{primary.low:.3f} to {primary.high:.3f}"
    assert re.search(interval, " ".join(section.split()))
    rows = [line.split("|") for line in section.splitlines() if re.match(r"\| .* (s|ms|GiB) \|", line)]
    assert len(rows) >= 3
    for _, what, baseline, enabled, quotient, _ in rows:
        metric, factor, unit = ROWS[what.split("(")[0].strip()]
        means = [factor * find_mean(analysis, metric, variant) for variant in ("baseline", "enabled")]
        for text, mean in zip((baseline, enabled), means, strict=True):
            assert text.split()[1] == unit
            assert float(text.split()[0]) == pytest.approx(mean, rel=0.005)
        assert quotient.strip() in ("see the interval", f"{means[0] / means[1]:.1f}")
    assert {trial.variant: trial.proof for trial in analysis.trials} == {
        "baseline": ProofStatus.NOT_REQUESTED,
        "enabled": ProofStatus.PROVED,
    }


@pytest.mark.parametrize("title", REAL_SIZES)
def test_the_parts_of_a_step_at_real_sizes_save_what_the_page_says(title: str) -> None:
    """What the parts save lies in the interval of the step, except in two narrow ones, and the page gives both."""
    section = " ".join(find_section(title).split())
    analysis = analyse(VIME[title])
    saved_ms = {
        part: find_saving(analysis, metric)
        for part, metric in zip(("passes", "forward", "backward"), PARTS, strict=True)
    }
    told = "save {passes:.0f} ms, the GRPO loss {forward:.0f} ms forward and {backward:.0f} ms"
    assert told.format(**saved_ms) in section
    step_s = find_mean(analysis, "step_time_s", "baseline")
    share = sum(saved_ms.values()) / 1000 / step_s
    assert f"{sum(saved_ms.values()):.0f} ms of a step of {step_s:.2f} s, or {share:.1%}".replace("%", " %") in section
    step, low, high = find_interval(analysis, "step_time_s")
    assert (low < 100 * share < high) is (title not in NARROW)
    if title in NARROW or "The whole step saves" in section:
        assert f"The whole step saves {find_saving(analysis, 'step_time_s'):.0f} ms" in section
    if title == ENTROPY:
        assert f"more exactly {100 * share:.2f} %, lies just above the interval" in section
    assert f"{step:.2f} % less time ({low:.2f} to {high:.2f} %)" in section
    assert re.search(f"[Hh]alf width (of )?{(high - low) / 2:.2f} %", section)


def test_the_narrow_result_saves_less_than_its_parts_and_the_page_says_where_not() -> None:
    section = " ".join(find_section(FIVE).split())
    analysis = analyse(VIME[FIVE])
    for metric, told in (
        ("module_optimizer_s", "the optimizer ({:.0f} ms in both variants)"),
        ("train_wait_time_s", "waiting ({:.0f} and {:.0f} ms)"),
    ):
        means = [1000 * find_mean(analysis, metric, variant) for variant in ("baseline", "enabled")]
        assert told.format(*means) in section
        assert abs(means[0] - means[1]) < 1.5
    alone = analyse(MODULE["RL-Kernel alone"])
    assert f"([RL-Kernel alone](#rl-kernel-alone)) saves {find_saving(alone, 'step_time_s'):.0f} ms" in section


def test_the_earlier_run_on_another_gpu_agrees_as_the_page_says() -> None:
    section = " ".join(find_section(FIVE).split())
    later, earlier = analyse(VIME[FIVE]), analyse("qwen3-4b-random-gc-freeze-h200.tgz")
    primary = earlier.effects[0]
    less, low, high = find_interval(earlier, "step_time_s")
    assert primary.n == 4
    assert f"the ratio is {primary.ratio:.3f} ({primary.low:.3f} to {primary.high:.3f})" in section
    assert f"{less:.2f} % less time ({low:.2f} to {high:.2f} %), a half width of {(high - low) / 2:.2f} %" in section
    parts = ("module_log_probs_no_grad_s", "module_grpo_loss_forward_s", "module_grpo_loss_backward_s")
    saved_ms = sum(find_saving(earlier, metric) for metric in parts)
    assert f"Its parts save {saved_ms:.0f} ms as well" in section
    step_ms = 1000 * find_mean(earlier, "step_time_s", "baseline")
    assert low < find_interval(later, "step_time_s")[0] < 100 * saved_ms / step_ms < high


def test_shadow_steps_at_real_sizes_found_what_the_page_says() -> None:
    shadows = analyse(VIME[FIVE]).shadows
    section = " ".join(find_section(FIVE).split())
    assert not any(item.error for item in shadows)
    for largest in (max(item.log_prob_max or 1 for item in shadows), max(item.gradient_share or 1 for item in shadows)):
        assert f"differ by at most {largest:.1e}".replace("e-0", "e-") in section


@pytest.mark.parametrize("title", [title for title in REAL_SIZES if title != COLLECTING])
def test_a_step_at_real_sizes_spreads_and_needs_energy_as_the_page_says(title: str) -> None:
    section = " ".join(find_section(title).split())
    analysis = analyse(VIME[title])
    primary = analysis.effects[0]
    assert f"sessions' effects spread by {100 * (primary.sd_log or 0):.2f} %" in section
    spreads = list_spreads(analysis)
    assert f"blocks of a session by {min(spreads):.2f} to {max(spreads):.2f} %" in section
    less = "{:.2f} % ({:.2f} to {:.2f} %)".format(*find_interval(analysis, "energy_j"))
    joules = [find_mean(analysis, "energy_j", variant) for variant in ("baseline", "enabled")]
    assert f"falls by {less}, from {joules[0]:.0f} to {joules[1]:.0f} J" in section


@pytest.mark.parametrize("title", [COLLECTING, LIVE])
def test_training_alone_takes_as_much_less_time_as_the_page_says(title: str) -> None:
    train = "{:.2f} % less time ({:.2f} to {:.2f} %)".format(*find_interval(analyse(VIME[title]), "train_time_s"))
    assert f"Training alone takes {train}" in " ".join(find_section(title).split())


@pytest.mark.parametrize("title", REAL_SIZES)
def test_the_estimate_of_a_full_microbatch_is_close_to_the_measured_peak(title: str) -> None:
    with open_bundle(FOLDER / VIME[title]) as run_dir:
        estimate = estimate_memory(Plan.load(run_dir.plan))
    peak_gib = find_mean(analyse(VIME[title]), "peak_memory_bytes", "baseline") / GIB
    assert estimate.training_gib == pytest.approx(peak_gib, rel=0.02)


def test_the_gpu_is_as_busy_and_as_short_of_power_as_the_page_says() -> None:
    """Over the samples of telemetry in which a session holds more than 60 GB of the GPU."""
    samples = {title: list_samples(VIME[title]) for title in (FIVE, TWO_GPUS, EXPERTS)}
    busy = {title: statistics.mean(gpu["utilization_percent"] for gpu in found) for title, found in samples.items()}
    told = f"the GPU was busy for {busy[EXPERTS]:.0f} % of the time, against {busy[FIVE]:.0f} % at Qwen3-4B's sizes"
    assert told in " ".join(find_section(EXPERTS).split())
    told = f"the first GPU was busy for {busy[TWO_GPUS]:.0f} % of the time"
    assert told in " ".join(find_section(TWO_GPUS).split())
    capped = statistics.mean("sw_power_cap" in gpu["throttle_reasons"] for gpu in samples[FIVE])
    assert f"power limit in {100 * capped:.0f} % of the samples" in " ".join(find_section(FIVE).split())


@pytest.mark.parametrize(("title", "name"), VIME.items())
def test_the_command_of_a_run_of_vime_asks_for_what_ran(title: str, name: str) -> None:
    with open_bundle(FOLDER / name) as run_dir:
        plan = Plan.load(run_dir.plan)
    (command,) = re.findall(r"^rlk-repro submit .*$", find_section(title), flags=re.MULTILINE)
    assert f" --run {plan.run.run} --hardware {plan.hardware.hardware} " in command
    wanted = list_overrides(plan)
    shipped = load_run(plan.run.run).model
    if shipped.measure.sessions != plan.run.measure.sessions:
        wanted["measure.sessions"] = str(plan.run.measure.sessions)  # the run got a fifth session later
    if shipped.gc_freeze and not plan.run.gc_freeze:
        wanted["gc_freeze"] = "false"  # the run got this key later
    assert list_set_flags(command) == wanted


def test_over_two_gpus_both_ranks_called_rl_kernel_and_nothing_fell_back() -> None:
    name = VIME[TWO_GPUS]
    sessions = [trial for trial in analyse(name).trials if trial.variant == "enabled"]
    assert len(sessions) == 4
    with open_bundle(FOLDER / name) as run_dir:
        assert Plan.load(run_dir.plan).run.layouts["h100"].tensor_parallel == 2
        for session in sessions:
            first, second = read_ops(run_dir.trial(session.folder)).ranks
            assert first.decisions == second.decisions
            assert {item.implementation for item in first.decisions} == {"FusedLogpGenericOp", "TritonRatioKLOp"}
            calls = [{step: found.calls for step, (_, found) in rank.steps.items()} for rank in (first, second)]
            assert calls[0] == calls[1]
            assert len(calls[0]) == 56
    decisions = [found for session in sessions for found in session.decisions]
    assert {found.op for found in decisions} == {"logp", "ratio_kl"}
    assert all(found.is_rl_kernel and found.calls and not found.fallbacks for found in decisions)


def test_the_commands_of_agreement_runs_ask_for_what_ran() -> None:
    commands = re.findall(r"^rlk-repro submit .*$", find_section("Whether vime's engines agree"), flags=re.MULTILINE)
    for command, name in zip(commands, AGREEMENT, strict=True):
        with open_bundle(FOLDER / name) as run_dir:
            plan = Plan.load(run_dir.plan)
        assert command.startswith(f"rlk-repro submit {plan.run.run} --hardware {plan.hardware.hardware} ")
        changed = dict(describe_setting(plan))["overrides"]
        ran = {
            path: "null" if value == "none" else value for path, value in re.findall(r"([\w.]+) = (\S+) \(", changed)
        }
        assert list_set_flags(command) == ran


def test_the_table_of_agreement_runs_holds_what_their_checks_found() -> None:
    section = find_section("Whether vime's engines agree")
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for cells in (line.split("|") for line in section.splitlines() if line.startswith("| "))
    }
    compared = {
        "input tokens": ("inputs", "rollout", "training"),
        "tensors": ("weights", "rollout", "training"),
        "choices of experts": ("routing", "training", "rollout, prompts"),
        "outputs of layers": ("layers", "training", "rollout, prompts"),
        "log-probs, training against vLLM's generation": ("log-probs", "training", "rollout, generated"),
        "log-probs, vLLM's generation": ("log-probs", "rollout, generated", "rollout, prompts"),
        "log-probs of training, samples": ("invariance", "training", "alone"),
        "tokens whose": ("invariance", "rollout, generated", "prefix cache"),
        "log-probs, training of the baseline": ("log-probs", "training, baseline", "training, enabled"),
    }
    for column, name in enumerate(AGREEMENT):
        checks = analyse(name).checks
        words = [check.word.value for check in checks]
        counts = ", ".join(str(words.count(word)) for word in ("pass", "fail", "not measured"))
        assert rows["number of checks within the contract, outside the contract, not measured"][column] == counts
        for start, wanted in compared.items():
            (cell,) = (cells[column] for row, cells in rows.items() if row.startswith(start))
            found = [
                check
                for check in checks
                if (check.kind, check.first, check.second) == wanted
                and check.step == 0
                and check.variant in ("baseline", "both")
                and check.num
            ]
            if cell in ("no experts", "not measured", "other tokens"):
                assert not found
                continue
            (check,) = found
            if " of " in cell:
                assert cell == f"{check.num_unequal:,} of {check.num:,}"
            else:
                figures = [float(figure) for figure in re.findall(r"[\d.]+(?:e-\d+)?", cell)]
                assert figures == pytest.approx(
                    [value for value in (check.largest, check.mean) if value is not None][: len(figures)], rel=0.01
                )


def test_the_readme_gives_the_saving_of_each_bundle_whose_section_it_links() -> None:
    bundles = {make_anchor(title): name for title, name in (VIME | MODULE).items()}
    lines = (ROOT / "README.md").read_text().splitlines()
    found = [(line, anchor) for line in lines for anchor in re.findall(r"evidence/README\.md#([\w-]+)", line)]
    told = [(line, bundles[anchor]) for line, anchor in found if anchor in bundles]
    assert len(told) == 7
    for line, name in told:
        less, low, high = find_interval(analyse(name), "step_time_s")
        assert f"{less:.2f} %" in line
        assert f"{low:.2f} to {high:.2f} %)" in line


def test_the_readme_rounds_the_largest_differences_of_log_probs_up() -> None:
    (line,) = (line for line in (ROOT / "README.md").read_text().splitlines() if "no log-prob of training" in line)
    told = re.search(r"by more than (\S+)\. .* by up to (\S+) with routing replay, and by up to (\S+) without it", line)
    assert told is not None
    largest = [
        max(
            check.largest or 0
            for name in names
            for check in analyse(name).checks
            if (check.kind, check.first, check.second) == ("log-probs", first, second)
        )
        for names, first, second in (
            (AGREEMENT, "training, baseline", "training, enabled"),
            (AGREEMENT[1:2], "training", "rollout, generated"),
            (AGREEMENT[2:3], "training", "rollout, generated"),
        )
    ]
    for text, value in zip(told.groups(), largest, strict=True):
        assert value <= float(text) <= 1.02 * value


@pytest.mark.parametrize(
    ("first", "second", "title"), [(AGREEMENT[0], AGREEMENT[4], "TP 1 and TP 2 agree"), (*AGREEMENT[1:3], "R3 changes")]
)
def test_differences_of_training_between_bundles_are_those_that_diff_prints(
    first: str, second: str, title: str
) -> None:
    found = re.search(rf"^- \*\*{title}.*?up to\s+([\d.]+)(?: \(mean ([\d.]+)\))?", PAGE, re.MULTILINE | re.DOTALL)
    comparison = diff_bundles(FOLDER / first, FOLDER / second).comparison
    assert found is not None
    assert comparison is not None
    (line,) = (line for line in comparison.details if line.startswith("engines: 00-p1-baseline, step 0"))
    printed = re.search(r"mean ([\d.]+), largest ([\d.]+) ", line)
    assert printed is not None
    assert float(found[1]) == float(printed[2])
    assert found[2] is None or float(found[2]) == pytest.approx(float(printed[1]), rel=0.01)
    assert line.endswith(": within the contract" if "agree" in title else ": outside the contract")


def test_generation_is_as_steady_as_the_page_says() -> None:
    analysis = analyse(VIME[LIVE])
    _, low, high = find_interval(analysis, "rollout_time_s")
    assert low < 0 < high
    told = f"the interval of the ratio of its times has a half width of {(high - low) / 2:.1f} % and contains 1"
    assert told in " ".join(find_section(LIVE).split())
    assert find_mean(analysis, "rollout_time_s", "baseline") > find_mean(analysis, "step_time_s", "baseline") / 2


def test_a_change_of_the_rollout_slows_a_step_and_not_the_gain_as_the_page_says() -> None:
    section = " ".join(find_section(EXPERTS).split())
    steps = find_changed_and_same("step_time_s")
    more_s = {variant: changed - same for variant, (changed, same) in steps.items()}
    told = "takes {baseline:.2f} s more in baseline and {enabled:.2f} s more with RL-Kernel than the next step"
    assert told.format(**more_s) in section
    passes = find_changed_and_same("ref_log_probs_time_s")
    assert all(changed - same > more_s[variant] for variant, (changed, same) in passes.items())
    changed, same = (
        100 * (1 - enabled / baseline) for baseline, enabled in zip(steps["baseline"], steps["enabled"], strict=True)
    )
    saved = [1000 * (baseline - enabled) for baseline, enabled in zip(steps["baseline"], steps["enabled"], strict=True)]
    told = (
        f"saves {saved[0]:.0f} ms and {changed:.1f} % of a step after a change, and {saved[1]:.0f} ms and {same:.1f} %"
    )
    assert told in section


def test_the_machines_of_the_experts_run_differ_as_the_page_says() -> None:
    section = " ".join(find_section(EXPERTS).split())
    machines = list_machines()
    assert ", ".join(f"`{gpu[:12]}-…`" for item, _ in machines for gpu in item.gpus) in PAGE
    told = (
        "takes {:.2f} % less time on the first H200 ({} sessions, {:.2f} s in baseline), "
        "{:.2f} % on the second ({} sessions, {:.2f} s) and {:.2f} % on the third ({} sessions, {:.2f} s)"
    )
    effects = list_effects("step_time_s")
    values = [
        (to_less(effects[number]), len(item.pairs), find_mean(analysis, "step_time_s", "baseline"))
        for number, (item, analysis) in enumerate(machines)
    ]
    assert told.format(*itertools.chain(*values)) in section
    saved = [sum(find_saving(analysis, metric) for metric in PARTS) for _, analysis in machines]
    assert "on each H200 ({:.0f}, {:.0f} and {:.0f} ms)".format(*saved) in section
    assert "give {:.2f} % less time with an interval of {:.2f} to {:.2f} %".format(*count_once(effects[:3])) in section


def test_the_five_machines_with_experts_give_what_the_page_says() -> None:
    section = " ".join(find_section(EXPERTS).split())
    effects = list_effects("step_time_s")
    step, low, high = count_once(effects)
    told = f"give {step:.2f} % less time ({low:.2f} to {high:.2f} %, a half width of {(high - low) / 2:.2f} %)"
    assert told in section
    assert f"six sessions with {to_less(effects[3]):.2f} %" in section
    assert f"four sessions with {to_less(effects[4]):.2f} %" in section
    assert (
        f"over five H200, each counted once, {step:.2f} % ({low:.2f} to {high:.2f} %)"
        in (ROOT / "README.md").read_text()
    )
    told = "The five H200, each counted once, give {:.2f} % ({:.2f} to {:.2f} %)"
    assert told.format(*count_once(list_effects("energy_j"))) in section


def test_the_parts_of_the_step_with_experts_save_more_than_the_step_as_the_page_says() -> None:
    analysis = analyse(VIME[EXPERTS])
    more = [
        sum(find_saving(part, metric) for metric in PARTS) - find_saving(part, "step_time_s")
        for pair in analysis.pairs
        for part in [select(analysis, {pair.pair})]
    ]
    found = t_interval(more, 0.95)
    assert found is not None
    told = f"the difference is {found.estimate:.0f} ms ({found.low:.1f} to {found.high:.1f} ms)"
    assert told in " ".join(find_section(EXPERTS).split())


def test_the_first_block_with_experts_is_not_balanced_as_the_page_says() -> None:
    section = " ".join(find_section(EXPERTS).split())
    blocks = analyse(VIME[EXPERTS]).blocks
    first = {
        order: to_less(
            statistics.mean(item.log_ratio or 0 for item in blocks if (item.number, item.order) == (0, order))
        )
        for order in ("ABBA", "BAAB")
    }
    told = "takes {ABBA:.2f} % less time where baseline comes first and {BAAB:.2f} % where RL-Kernel comes first"
    assert told.format(**first) in section
    rest = [
        statistics.mean(item.log_ratio or 0 for item in items if item.number)
        for _, items in itertools.groupby(blocks, key=lambda item: item.session)
    ]
    assert "takes {:.2f} % less time ({:.2f} to {:.2f} %)".format(*count_once(rest)) in section
    passes = find_changed_and_same("ref_log_probs_time_s", steps=range(6, 8))
    assert all(abs(changed - same) < 0.015 for changed, same in passes.values())


def select(analysis: Analysis, pairs: Collection[str]) -> Analysis:
    """The part of an analysis with these pairs' trials."""
    return replace(
        analysis,
        trials=tuple(trial for trial in analysis.trials if trial.pair in pairs),
        pairs=tuple(pair for pair in analysis.pairs if pair.pair in pairs),
    )


@functools.cache
def list_machines() -> list[tuple[Allocation, Analysis]]:
    """The allocations of the run with experts, each with its part of the analysis."""
    analysis = analyse(VIME[EXPERTS])
    with open_bundle(FOLDER / VIME[EXPERTS]) as run_dir:
        found = list_allocations(Plan.load(run_dir.plan), run_dir, [pair.pair for pair in analysis.pairs])
    return [(item, select(analysis, item.pairs)) for item in found]


def list_effects(metric: str) -> list[float]:
    """The mean log ratio of each H200 on which the model with experts ran; the two earlier runs come last."""
    analyses = [analysis for _, analysis in list_machines()] + [analyse(name) for name in EARLIER_EXPERTS]
    return [
        statistics.mean(found.log_ratio or 0 for pair in analysis.pairs if (found := pair.metric(metric)))
        for analysis in analyses
    ]


def count_once(effects: list[float]) -> tuple[float, float, float]:
    """How many percent less the effects give, with Student's 95 % interval."""
    found = t_interval(effects, 0.95)
    assert found is not None
    return to_less(found.estimate), to_less(found.high), to_less(found.low)


def to_less(log_ratio: float) -> float:
    return 100 - 100 * math.exp(log_ratio)


def find_changed_and_same(metric: str, steps: range | None = None) -> dict[str, tuple[float, float]]:
    """Mean seconds of each variant in scored steps whose rollout is not that of the step before, and is that one."""
    analysis = analyse(VIME[EXPERTS])
    with open_bundle(FOLDER / VIME[EXPERTS]) as run_dir:
        events = [json.loads(line) for line in run_dir.agent_log.read_text().splitlines()]
    files = {event["trial"]: event["files"] for event in events if event["event"] == "rollouts"}
    start = analysis.num_warmup_steps
    end = start + 4 * len(analysis.blocks) // len(analysis.pairs)
    found: dict[str, tuple[list[float], list[float]]] = {"baseline": ([], []), "enabled": ([], [])}
    for trial in analysis.trials:
        (series,) = (series for series in trial.series if series.metric == metric)
        used = files[trial.folder]
        for step in steps or range(start, end):
            value = series.values[step]
            if value is not None:
                found[trial.variant][used[step] == used[step - 1]].append(value)
    return {variant: (statistics.mean(first), statistics.mean(second)) for variant, (first, second) in found.items()}


def test_the_record_of_tokens_costs_what_its_page_says() -> None:
    section = " ".join(find_section(LIVE).split())
    with open_bundle(FOLDER / VIME[LIVE]) as run_dir:
        means = [
            1000 * statistics.mean([step["agreement"]["seconds"] for step in steps if "agreement" in step][1:])
            for ops in sorted(run_dir.root.glob("trials/*/ops/0.jsonl"))
            for steps in [[json.loads(line) for line in ops.read_text().splitlines()]]
        ]
    assert f"{min(means):.1f} to {max(means):.1f} ms in a step" in section
    share = statistics.mean(means) / 1000 / find_mean(analyse(VIME[LIVE]), "step_time_s", "baseline")
    assert f"{share:.2%} of a step.".replace("%", " %", 1) in section


def test_the_largest_microbatches_are_those_of_their_bundle() -> None:
    section = " ".join(find_section(MEMORY).split())
    name = "qwen3-4b-memory-h200.tgz"
    analysis = analyse(name)
    baseline, enabled = analysis.microbatches
    assert f"{baseline.largest:,} tokens in baseline and {enabled.largest:,} tokens with RL-Kernel" in section
    growth = baseline.trained[-1].tokens - baseline.trained[-2].tokens
    assert (baseline.refused, enabled.refused) == (
        baseline.trained[-1].tokens + growth,
        enabled.trained[-1].tokens + growth,
    )
    assert f"in steps of {growth:,} tokens" in section
    assert f"({enabled.trained[-1].tokens / baseline.trained[-1].tokens - 1:.1%})".replace("%", " %") in section
    common = len(baseline.trained)
    for first, second in zip(baseline.trained, enabled.trained[:common], strict=True):
        assert first.tokens == second.tokens
        assert first.peak_bytes == pytest.approx(second.peak_bytes, rel=1e-4)
    for row, metric in (
        ("passes without gradient", "peak_memory_in_forward_only_bytes"),
        ("the whole step", "peak_memory_bytes"),
    ):
        values = [
            (series.values[common - 1] or 0) / GIB
            for trial in analysis.trials
            for series in trial.series
            if series.metric == metric
        ]
        assert "| {} | {:.1f} GiB | {:.1f} GiB |".format(row, *values) in section
    with open_bundle(FOLDER / name) as run_dir:
        logs = [run_dir.trial(trial.folder).stdout.read_text() for trial in analysis.trials]
    for log, function in zip(logs, ("in vocab_parallel_softmax", "ratio_kl.py"), strict=True):
        sizes = (
            r"Tried to allocate ([\d.]+) GiB\..*of which ([\d.]+) GiB is free.* and ([\d.]+) GiB is reserved by PyTorch"
        )
        found = re.search(rf"torch\.OutOfMemoryError: CUDA out of memory\. {sizes}", log)
        assert found is not None
        wanted, free, cached = map(float, found.groups())
        assert f"{wanted:.1f} GiB)" in section
        assert free + cached > wanted
        assert function in log
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"that trains has {enabled.largest:,} instead of {baseline.largest:,} tokens" in readme


def test_the_replay_found_the_same_largest_microbatches() -> None:
    section = " ".join(find_section(MEMORY).split())
    recorded, replayed = FOLDER / "qwen3-4b-memory-h200.tgz", FOLDER / "qwen3-4b-memory-replay-h200.tgz"
    assert analyse(replayed.name).microbatches == analyse(recorded.name).microbatches
    baseline, enabled = analyse(replayed.name).microbatches
    assert f"{baseline.largest:,} tokens in baseline and {enabled.largest:,} with RL-Kernel, with the same" in section
    gpus = []
    for bundle in (recorded, replayed):
        with open_bundle(bundle) as run_dir:
            (manifest,) = load_manifests(run_dir)
        gpu: Any = manifest.sections["gpu"]
        gpus.append(gpu["devices"][0]["uuid"])
    assert len(set(gpus)) == len(gpus)
    comparison = diff_bundles(recorded, replayed).comparison
    assert comparison is not None
    assert f"The level is *{comparison.level} within {comparison.margin_pct:g} %*" in section


def list_set_flags(command: str) -> dict[str, str]:
    words = shlex.split(command.replace("--pairs ", "--set measure.pairs="))
    return dict(value.split("=", 1) for flag, value in itertools.pairwise(words) if flag == "--set")


def list_overrides(plan: Plan) -> dict[str, str]:
    found = re.findall(r"([\w.]+) = (\S+) \(--", dict(describe_setting(plan))["overrides"])
    return {path: "null" if value == "none" else value for path, value in found}


def find_section(title: str) -> str:
    return next(part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if part.startswith(title))


def find_mean(analysis: Analysis, metric: str, variant: str) -> float:
    found = [trial.summary(metric) for trial in analysis.trials if trial.variant == variant]
    values = [headline_value(metric, item) for item in found if item is not None]
    return sum(values) / len(values)


def list_spreads(analysis: Analysis) -> list[float]:
    """The standard deviation of the effects of each session's blocks, in percent."""
    return [
        100 * statistics.stdev([block.log_ratio or 0.0 for block in blocks])
        for _, blocks in itertools.groupby(
            (block for block in analysis.blocks if not block.is_control), key=lambda block: block.session
        )
    ]


def find_saving(analysis: Analysis, metric: str) -> float:
    """How many milliseconds less the enabled variant takes on average."""
    return 1000 * (find_mean(analysis, metric, "baseline") - find_mean(analysis, metric, "enabled"))


def list_samples(name: str) -> list[dict[str, Any]]:
    """Telemetry's samples of the first GPU while a session has its memory."""
    with open_bundle(FOLDER / name) as run_dir:
        (telemetry,) = run_dir.root.glob("nodes/*/telemetry.jsonl")
        gpus = [json.loads(line)["gpus"][0] for line in telemetry.read_text().splitlines()]
    return [gpu for gpu in gpus if gpu["memory_used_bytes"] > 60e9]


def find_interval(analysis: Analysis, metric: str) -> tuple[float, float, float]:
    """How many percent less time the enabled variant takes, with the ends of the 95 % interval."""
    effect = analysis.effect(metric)
    assert effect is not None
    less = [100 - 100 * value for value in (effect.ratio, effect.high, effect.low) if value is not None]
    return less[0], less[1], less[2]


def test_both_designs_give_one_answer_on_one_machine() -> None:
    sessions, pairs = (analyse(MODULE[title]) for title in ("The same on another machine", "In pairs of processes"))
    found = find_difference(sessions.effects[0], pairs.effects[0])
    assert found is not None
    assert abs(found.estimate) < 0.005
    words = re.fullmatch(r"difference (\S+ %), 95 % interval (.*)", str(found))
    assert words is not None
    section = " ".join(find_section("In pairs of processes").split())
    assert f"ratios differ by {words[1]} (95 % interval {words[2]})" in section


@pytest.mark.parametrize("name", ["module-smoke-h100.tgz", "smoke-h100.tgz"])
def test_runs_in_the_locked_environment_name_its_record_and_ran_rl_kernel(name: str) -> None:
    bundle = FOLDER / "environment" / name
    with open_bundle(bundle) as run_dir:
        assert f"`{name}`, id `{sha256_file(run_dir.checksums)[:12]}…`" in " ".join(PAGE.split())
        (manifest,) = load_manifests(run_dir)
        plan = Plan.load(run_dir.plan)
    container: Any = manifest.sections["container"]
    code: Any = manifest.sections["code"]
    assert plan.stack.stack == "2026-11"
    assert len(container["image_record_sha256"]) == 64
    assert {pin: code[pin]["commit"] for pin in plan.stack.pins if pin != "megatron_lm"} == {
        pin: found.commit for pin, found in plan.stack.pins.items() if pin != "megatron_lm"
    }
    analysis = load_result(bundle, is_linked=False)[0]
    assert {trial.proof for trial in analysis.trials if trial.variant == "enabled"} == {ProofStatus.PROVED}


def test_the_pilot_learned_what_the_page_says() -> None:
    record = json.loads((FOLDER / "smollm2-135m-pilot.json").read_text())
    section = find_section("A real model that learns")
    assert len(record["raw_reward"]) == len(record["step_time_s"]) == record["num_rollouts"] == 66
    first, last = (sum(part) / 10 for part in (record["raw_reward"][:10], record["raw_reward"][-10:]))
    assert f"from {first:.2f}" in section
    assert f"to {last:.2f} (last ten)" in section
    scored = record["step_time_s"][6:]
    assert f"{sum(scored) / len(scored):.1f} s on average" in section


def test_eight_gates_passed_and_two_do_not_apply() -> None:
    for name in MODULE.values():
        if analyse(name).unit == "pair":
            continue
        gates = analyse(name).gates
        assert [
            sum(gate.status is word for gate in gates) for word in (GateStatus.PASSED, GateStatus.NOT_APPLICABLE)
        ] == [8, 2]
