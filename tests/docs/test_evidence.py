"""The main figures of the evidence page are those sealed in its bundles; ``make evidence`` analyses them again."""

from __future__ import annotations

import csv
import functools
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.analysis.analyse import analyse
from rlk_repro.analysis.sessions import _COUNTS
from rlk_repro.base.files import MAX_ANALYSIS_BYTES, load_json, sha256_file
from rlk_repro.bundle.verify import open_verified
from rlk_repro.plan import Plan
from rlk_repro.prediction import load_measured, predict
from rlk_repro.replay.combine import combine
from rlk_repro.report import Context
from rlk_repro.report.answer import describe_words, suggest_next
from rlk_repro.report.labels import headline_value
from rlk_repro.report.markdown import render_summary
from rlk_repro.report.results import list_saved
from rlk_repro.report.stack import plot_parts
from rlk_repro.report.view import View
from rlk_repro.rundir.manifest import Manifest, load_manifests
from rlk_repro.rundir.results import Analysis, TrialStatus
from rlk_repro.schedule import make_schedule
from rlk_repro.statistics.crossover import block_effect, hodges_lehmann, trimmed_interval
from rlk_repro.statistics.stats import paired_effect, t_interval, t_quantile
from rlk_repro.submit.authored import find_rewritten
from rlk_repro.submit.finishing import report_context
from rlk_repro.workloads.vime.memory import estimate_memory
from tests import ROOT

FOLDER = ROOT / "docs" / "evidence"
PAGE = (FOLDER / "README.md").read_text()
ONLY_IN_THE_TABLE = {
    *("module-qwen3-4b-pairs-h200", "module-qwen3-4b-replay-h200", "module-qwen3-4b-tp2-h200"),
    *("qwen3-30b-a3b-random-4l-h200", "qwen3-30b-a3b-random-4l-six-h200"),
}
BUNDLES = sorted(FOLDER.glob("*.tgz"))
with (FOLDER / "all-runs.csv").open() as table:
    RUNS = list(csv.DictReader(table))


@functools.cache
def load(name: str) -> tuple[Analysis, Context, Manifest]:
    bundle = FOLDER / f"{name}.tgz"
    with open_verified(bundle) as (run_dir, _):
        assert find_rewritten(Plan.load(run_dir.plan), run_dir) == []
        context = report_context(run_dir, bundle, is_linked=False)
        (manifest,) = load_manifests(run_dir)
        sealed = Analysis.from_json(load_json(run_dir.analysis, max_bytes=MAX_ANALYSIS_BYTES))
        return sealed, replace(context, bundle_id=sha256_file(run_dir.checksums)), manifest


def read_sealed(name: str) -> Analysis:
    return load(name)[0]


def mean(analysis: Analysis, metric: str, variant: str) -> float:
    """The mean of one variant over the trials that count."""
    values = []
    for trial in analysis.trials:
        summary = trial.summary(metric)
        if trial.variant == variant and trial.status is TrialStatus.OK and summary is not None:
            values.append(headline_value(metric, summary))
    return sum(values) / len(values)


def less(analysis: Analysis, metric: str = "step_time_s") -> str:
    """How much less time or energy the enabled variant takes, as the page writes it: ``2.92 % … (2.86 to 2.97 %)``."""
    effect = analysis.effect(metric)
    assert effect is not None
    saved = [100 - 100 * value for value in (effect.ratio, effect.high, effect.low) if value is not None]
    return "{:.2f} % less time ({:.2f} to {:.2f} %)".format(*saved)


def write_shadows(names: list[str]) -> tuple[str, str]:
    """The largest differences of log-probs and of gradients at the logits, as on the page."""
    shadows = [item for name in names for item in read_sealed(name).shadows]
    log_probs, gradients = (
        f"{max(getattr(item, key) for item in shadows):.1e}".replace("e-0", "e-")
        for key in ("log_prob_max", "gradient_share")
    )
    return log_probs, gradients


def list_noise(analysis: Analysis) -> list[list[float]]:
    """Differences of control blocks, and of first steps: estimate, low and high, in %."""
    blocks = [block for block in analysis.blocks if block.is_control]
    control = [block.log_ratio for block in blocks if block.log_ratio is not None]
    interval, carried = trimmed_interval(control, 0.95), analysis.effect("carry_over_step_time_s")
    assert interval and carried  # noqa: PT018
    ratios = [math.exp(end) for end in (interval.estimate, interval.low, interval.high)]
    ends = (ratios, [carried.ratio, carried.low, carried.high])
    return [[100 * end - 100 for end in found if end is not None] for found in ends]


@pytest.mark.parametrize("bundle", BUNDLES, ids=lambda path: path.name)
def test_a_bundle_has_its_row_its_origin_and_a_summary_that_fits_a_pull_request(bundle: Path) -> None:
    (row,) = (line for line in PAGE.splitlines() if f"]({bundle.name}) |" in line)
    _, _, _, ratio, n, energy, verdict, link, _ = (cell.strip() for cell in row.split("|"))
    analysis, context, manifest = load(bundle.stem)
    bundle_id = context.bundle_id[:12]
    (listed,) = (run for run in RUNS if run["id"] == bundle_id)
    assert (listed["file"], listed["verdict"], listed["shipped"]) == (bundle.name, verdict, "yes")
    assert link.startswith(f"[`{bundle_id}`]")
    assert verdict == analysis.verdict.word.value
    if analysis.effects and analysis.effects[0].low is not None:
        effect = analysis.effects[0]
        assert ratio == f"{effect.ratio:.4f} ({effect.low:.4f} to {effect.high:.4f})"
        assert n == f"{effect.n} {analysis.unit}s" == listed["n"]
        assert f"{listed['less time']} less time ({listed['95 % interval']})" == less(analysis)
        assert bundle.stem in ONLY_IN_THE_TABLE or less(analysis) in " ".join(PAGE.split())
    else:
        assert ratio.startswith("none: ")
    spent = analysis.effect("energy_j")
    if spent is not None and spent.ratio is not None:
        joules = [mean(analysis, "energy_j", variant) for variant in ("baseline", "enabled")]
        assert energy == " → ".join(f"{float(f'{value:.3g}'):g} J" for value in joules)
    code: Any = manifest.sections["code"]
    gpu: Any = manifest.sections["gpu"]
    ours = code["rlk_repro"]
    commit = ours["commit"] if isinstance(ours["commit"], str) else ours["package_tree"]
    for words in (gpu["devices"][0]["uuid"][:13], commit[:12], code["rl_kernel"]["commit"][:12]):
        assert f"`{words}" in PAGE
    summary = render_summary(analysis, context)
    assert len(summary.splitlines()) <= 60
    assert len(summary) < 65_536
    assert summary.startswith(f"### {analysis.run}: {describe_words(analysis)}")
    assert f"(id {bundle_id})" in summary


def test_every_run_of_the_table_is_there_or_says_why_not() -> None:
    files = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.tgz")}
    assert {run["file"] for run in RUNS if run["shipped"] == "yes" and run["id"]} == files
    assert [run["file"] for run in RUNS if not run["why"] and run["shipped"] != "yes"] == []


def test_the_rewards_of_a_real_model_are_those_of_its_six_pairs() -> None:
    gates = combine([FOLDER / f"{name}.tgz" for name in LEARNS]).gates
    assert [gate.status.value for gate in gates] == ["passed"] * 5
    section = PAGE.split("## A real model that learns\n")[1].split("\n## ")[0]
    labels = ("reward", "train/rollout", "peak memory", "response length")
    for label, gate in zip(labels, gates, strict=False):
        places = 4 if label == "reward" else 3
        found, low, high = (f"{end:.{places}f}" for end in (gate.estimate, gate.low, gate.high))
        (row,) = (line for line in section.splitlines() if line.startswith(f"| {label}"))
        assert row.endswith(f"| {found} ({low} to {high}) | {gate.margin:g} |")
    for variant in ("baseline", "enabled"):
        first = last = 0.0
        for name in LEARNS:
            (trial,) = (item for item in read_sealed(name).trials if item.variant == variant)
            series = trial.get_series("raw_reward")
            values = [value or 0.0 for value in series.values] if series else []
            first += sum(values[:10]) / 60
            last += sum(values[-10:]) / 60
        assert f"from {first:.3f} to {last:.3f}" in section


def test_times_beside_other_runs_stand_without_their_change() -> None:
    for name, is_counted in ((LEARNS[0], False), (UNMODIFIED, True)):
        view = View(*load(name)[:2])
        figure = plot_parts(view)
        assert (">change<" in figure.svg) is is_counted
        assert ("these times do not count" in figure.caption) is not is_counted
        proposed = suggest_next(view, "b.tgz")
        assert proposed.startswith("rlk-repro combine b.tgz  # ") is not is_counted


# The columns vime, torch.compile, RL-Kernel 202f0e3 and RL-Kernel 027c809 of the page's table.
ARMS = (("027c809", "baseline"), ("compile", "enabled"), ("202f0e3", "enabled"), ("027c809", "enabled"))


@pytest.mark.parametrize(
    ("label", "metric"),
    [
        ("step", "step_time_s"),
        ("old-policy pass, no gradient", "log_probs_time_s"),
        ("reference pass, no gradient", "ref_log_probs_time_s"),
        ("GRPO loss, forward and backward", "actor_train_time_s"),
        ("log-probs in the loss, forward", "module_log_probs_forward_s"),
        ("log-probs in the loss, backward", "module_log_probs_backward_s"),
        ("peak memory, passes without gradient", "peak_memory_in_forward_only_bytes"),
        ("peak memory of the step", "peak_memory_bytes"),
    ],
)
def test_the_parts_of_vime_torch_compile_and_both_commits(label: str, metric: str) -> None:
    section = PAGE.split("## RL-Kernel's newer commit, and torch.compile")[1].split("\n## ")[0]
    (row,) = (line for line in section.splitlines() if line.startswith(f"| {label} |"))
    cells = []
    for name, variant in ARMS:
        value = mean(read_sealed(f"module-qwen3-4b-{name}-h200"), metric, variant)
        cells.append(f"{value / 2**30:.1f} GiB" if metric.endswith("_bytes") else f"{value * 1000:.2f} ms")
    assert [cell.strip() for cell in row.split("|")[2:-1]] == cells


STEPS = [f"qwen3-4b-random-027c809{part}-h200" for part in ("", "-second", "-third", "-fourth", "-fifth", "-sixth")]
AGAINST = ["qwen3-4b-against-compile-h200", "qwen3-4b-random-against-compile-h200"]
COMPILED = "qwen3-4b-random-compile-h200"
UNMODIFIED = "qwen3-4b-random-unmodified-alone-h200"
GLM = "glm4-9b-random-h200"
GLM_ONE = "glm4-9b-random-one-h200"
FULL = "qwen3-30b-a3b-16l-full-h200"
TWELVE = "qwen3-30b-a3b-random-12l-h200"
LEARNS = [f"smollm2-135m-{seed}-h200" for seed in range(1234, 1240)]
FOUR_LAYERS = "qwen3-30b-a3b-random-4l-sixteen-h200"
OTHER_STEPS = ("qwen3-4b-random-live-h200", "qwen3-4b-random-tp2-h100")
LOSS = ("module_grpo_loss_forward_s", "module_grpo_loss_backward_s")


@pytest.mark.parametrize(
    ("label", "metrics", "decimals"),
    [
        ("log-probs, no gradient", ["module_log_probs_no_grad_s"], (1, 2, 2, 2, 2)),
        ("GRPO loss with its log-probs, forward and backward", LOSS, (1, 1, 1, 1, 1)),
        ("peak memory of the step", ["peak_memory_bytes"], (1, 1, 1, 1, 1)),
    ],
)
def test_the_functions_within_whole_steps(label: str, metrics: list[str], decimals: tuple[int, ...]) -> None:
    """Each machine counts once."""
    table = PAGE.split("| within a whole step, on H200;")[1]
    row = next(line for line in table.splitlines() if line.startswith(f"| {label} |"))
    cells = []
    columns = [(names, variant) for names in (STEPS, AGAINST) for variant in ("baseline", "enabled")]
    columns.insert(2, ([COMPILED], "enabled"))
    for (names, variant), places in zip(columns, decimals, strict=True):
        values = [sum(mean(read_sealed(name), metric, variant) for metric in metrics) for name in names]
        value = sum(values) / len(values)
        cells.append(f"{value / 2**30:.1f} GiB" if "memory" in label else f"{1000 * value:.{places}f} ms")
    assert [cell.strip() for cell in row.split("|")[2:-1]] == cells


def test_what_the_functions_save_within_whole_steps() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    of_six = combine([FOLDER / f"{name}.tgz" for name in STEPS]).functions_saved_s
    # list_saved gives nothing for variants that are not comparable, here because of memory
    comparable = replace(read_sealed(COMPILED), verdict=read_sealed(UNMODIFIED).verdict)
    others = (UNMODIFIED, TWELVE, GLM_ONE, GLM)
    of_one, of_compiled, of_unmodified, of_twelve, of_glm_one, of_glm = (
        t_interval(list_saved(analysis), 0.95)
        for analysis in (read_sealed(AGAINST[1]), comparable, *map(read_sealed, others))
    )
    for found, words in (
        (of_six, "take {} less ({})**, 3.5 % of"),
        (of_one, "take {} less of a step ({}), 0.4 %, on this H200"),
        (of_compiled, "saves {} ({}), seven eighths of RL-Kernel's 85.5 ms;"),
        (of_unmodified, "take {} less ({})**, 3.3 % of a step"),
        (of_twelve, "take {} less ({})**, 5.5 % of a step; 211.0 ms were predicted before the run"),
        (of_glm_one, "| log-probs and GRPO loss take less | {} ({}), 1.5 % |"),
        (of_glm, ", 1.5 % | {} ({}), 1.5 % |"),
    ):
        assert found is not None
        size, ends = f"{1000 * found.estimate:.1f} ms", f"{1000 * found.low:.1f} to {1000 * found.high:.1f} ms"
        assert words.format(size, ends) in PAGE
        assert size in readme or found is of_unmodified
    assert "0.72 %, −0.90 to 2.31 %" in readme
    assert less(read_sealed(AGAINST[1])) == "0.72 % less time (-0.90 to 2.31 %)"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (STEPS, "differ by at most {}, and gradients at the logits by at most {} of the largest gradient."),
        ([FULL], "In the shadow steps log-probs differ by at most {}, and gradients at the logits by at most {}"),
        (
            [TWELVE],
            "and in shadow steps log-probs by at most {}, and gradients at the logits by at most {} of the",
        ),
        (
            [f"module-qwen3-4b-{name}-h200" for name in ("027c809", "027c809-second", "027c809-third", "compile")],
            "differ by at most {}, and gradients by {} of the largest; torch.compile differs from vime by as much.",
        ),
    ],
)
def test_how_far_shadow_steps_differ(names: list[str], words: str) -> None:
    assert words.format(*write_shadows(names)) in " ".join(PAGE.split())


WHOLE_STEPS = [STEPS[0], GLM_ONE, GLM, UNMODIFIED, FULL, TWELVE, FOUR_LAYERS, *OTHER_STEPS]


@pytest.mark.parametrize("name", WHOLE_STEPS)
def test_the_estimate_of_memory_is_near_what_pytorch_used_and_reserved(name: str) -> None:
    plan = load(name)[1].plan
    assert plan is not None
    estimate = estimate_memory(plan)
    with open_verified(FOLDER / f"{name}.tgz") as (run_dir, _):
        lines = "".join(path.read_text() for path in run_dir.root.glob("trials/*/ops/*.jsonl"))
    used, reserved = (
        max(map(int, re.findall(f'"peak_{what}_bytes":([0-9]+)', lines))) / 2**30 for what in ("allocated", "reserved")
    )
    assert used == pytest.approx(estimate.training_gib, rel=0.02)
    assert reserved == pytest.approx(estimate.reserved_gib, abs=4.0)


def write_step(name: str) -> dict[str, str]:
    """What a bundle shows of a whole step, as on the page."""
    analysis = read_sealed(name)
    (row,) = (found for found in load_measured() if found.name == f"{name}.tgz")
    saved, half = row.saved_ms, t_quantile(0.95, row.n - 1) * row.error_ms
    blocks: dict[str, list[float]] = {}
    for block in analysis.blocks:
        if block.log_ratio is not None and not block.is_control:
            blocks.setdefault(block.session, []).append(block.log_ratio)
    scatter = [100 * statistics.stdev(ratios) for ratios in blocks.values()]
    percent = "{:.1f} % ({:.1f} to {:.1f} %)"
    control, carried = (percent.format(*ends) for ends in list_noise(analysis))
    return {
        "step": f"{less(analysis)}, of {mean(analysis, 'step_time_s', 'baseline'):.2f} s",
        "saved": f"{saved:.0f} ms ({saved - half:.0f} to {saved + half:.0f} ms)",
        "energy": less(analysis, "energy_j").replace("less time ", ""),
        "joules": f", of {mean(analysis, 'energy_j', 'baseline'):.0f} J",
        "peak": f"{mean(analysis, 'peak_memory_bytes', 'enabled') / 2**30:.1f} GiB",
        "scatter": f"{min(scatter):.1f} to {max(scatter):.1f} %",
        "control": control,
        "carried": carried,
    }


@pytest.mark.parametrize(("column", "name"), [(1, GLM_ONE), (2, GLM)])
def test_a_step_at_the_sizes_of_glm(column: int, name: str) -> None:
    others, shown = load_measured(), write_step(name)
    (row,) = (found for found in others if found.name == f"{name}.tgz")
    others.remove(row)
    step = predict(row, others)
    predicted = f"{step.saved_ms:.1f} ms ({step.low_ms:.1f} to {step.high_ms:.1f} ms), afterwards"
    log_probs, gradients = write_shadows([name])
    table = {}
    for line in PAGE.split("\n## GLM-4-9B")[1].split("\n## ")[0].splitlines():
        if line.startswith("| "):
            table[line.split("|")[1].strip()] = line.split("|")[1 + column]
    for label, words in (
        ("a step takes", shown["step"]),
        ("in milliseconds", shown["saved"]),
        ("the same, as predicted", predicted if name == GLM else ", before it ran"),
        ("energy of a step", shown["energy"].replace(" % (", " % less (")),
        ("energy of a step", shown["joules"]),
        ("peak memory of both variants", shown["peak"]),
        ("blocks of a session scatter by", shown["scatter"]),
        ("control blocks, in which nothing changes, differ by", shown["control"]),
        ("first steps after a switch differ by", shown["carried"]),
        ("log-probs and gradients at the logits, in shadow steps", f"{log_probs}, and {gradients}"),
    ):
        assert words in table[label]


def test_a_step_of_twelve_layers() -> None:
    section, shown = PAGE.split("\n## Twelve layers")[1].split("\n## ")[0], write_step(TWELVE)
    for words in (
        shown["step"],
        f"The step saves {shown['saved']}",
        f"differ by {shown['control']}, perhaps by more than their margin of 4.1 %",
        f"First steps after a switch differ by {shown['carried']}",
        f"scatter by {shown['scatter']}",
        f"falls by {shown['energy']}",
        f"{shown['peak']} in both variants",
    ):
        assert words in section


def test_what_the_steps_show_that_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(_COUNTS, "allocator_retries")
    with open_verified(FOLDER / f"{FULL}.tgz") as (run_dir, _):
        found = analyse(run_dir)
    control = [block.log_ratio for block in found.blocks if block.is_control and block.log_ratio]
    differ = f"differ by {100 * math.expm1(sum(control) / len(control)):.1f} % on average"
    assert len(control) == 6
    assert less(found) in " ".join(PAGE.split())
    assert differ in PAGE


def test_the_readme_repeats_figures_of_the_page() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    page = " ".join(PAGE.split())
    figures = re.findall(r"\d+\.\d\d % (?:less time )?\((\d+\.\d\d to \d+\.\d\d %)\)", readme)
    assert len(figures) >= 5
    assert [figure for figure in figures if figure not in page] == []


def test_what_else_the_runs_of_whole_steps_show() -> None:
    analysis, context, _ = load(UNMODIFIED)
    page = " ".join(PAGE.split())
    assert less(read_sealed("qwen3-4b-random-live-h200"), "train_time_s") in page
    training, energy = (less(analysis, metric).replace("less time ", "") for metric in ("train_time_s", "energy_j"))
    assert f"`train_time`, without any waiting, falls by {training}." in page
    assert f"The energy of a step falls by {energy}." in page
    control, carried = list_noise(analysis)
    assert "show {:.2f} % ({:.2f} to {:.2f} %).".format(*control) in page
    assert "takes {:.2f} % ({:.2f} to {:.2f} %) more with".format(*carried) in page
    plan = context.plan
    assert plan is not None
    counted = []  # each step with what it leaves to the next one
    for session in zip(analysis.trials[::2], analysis.trials[1::2], strict=True):
        schedule = make_schedule(plan.run.measure, session[0].seed)
        both = [{item.metric: item.values for item in trial.series} for trial in session]
        train, wait = (
            [one or other or 0 for one, other in zip(*(values[f"train_{name}s"] for values in both), strict=True)]
            for name in ("time_", "wait_time_")
        )
        effects = [
            block_effect(block.order, [train[step] + wait[step + 1] for step in steps]) or 0
            for block, steps in zip(schedule.blocks, schedule.steps_of_blocks, strict=True)
            if not block.is_control
        ]
        counted.append(hodges_lehmann(effects))
    effect = paired_effect("step_time_s", counted, role="primary", alpha=0.05)
    assert less(replace(analysis, effects=(effect,))) in page


@pytest.mark.parametrize("name", ["qwen3-4b-memory-h200", "qwen3-4b-memory-replay-h200"])
def test_the_largest_microbatches_are_those_of_both_bundles(name: str) -> None:
    baseline, enabled = read_sealed(name).microbatches
    assert f"{baseline.largest:,} tokens in baseline and {enabled.largest:,} " in PAGE
    assert (
        f"that trains has {enabled.largest:,} instead of {baseline.largest:,} tokens"
        in (ROOT / "README.md").read_text()
    )


def test_the_counts_of_agreement_checks_are_those_of_the_bundles() -> None:
    names = ["vime-agreement", "vime-agreement-r3", "vime-agreement-r3-off"]
    names = [*(f"{name}-h200" for name in names), "vime-agreement-tp2-h100"]
    words = [[check.word.value for check in read_sealed(name).checks] for name in names]
    counts = [", ".join(str(found.count(word)) for word in ("pass", "fail", "not measured")) for found in words]
    (row,) = (line for line in PAGE.splitlines() if line.startswith("| number of checks within the contract"))
    assert [cell.strip() for cell in row.split("|")[2:-1]] == counts
