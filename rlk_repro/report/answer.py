"""State a run's result in one sentence, its basis, and the command to run next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from statistics import NormalDist
from typing import Final

from rlk_repro.analysis.memory import MemoryWord, judge_memory
from rlk_repro.analysis.verdict import TOO_NOISY, is_mean_elsewhere
from rlk_repro.base.errors import shorten
from rlk_repro.base.findings import Level
from rlk_repro.base.resources import data_dir, list_names, run_folders
from rlk_repro.base.units import (
    MINUS,
    count,
    find_decimals,
    format_change,
    format_interval,
    format_number,
    name_some,
)
from rlk_repro.division import divide, find_least_microbatch
from rlk_repro.operators import RL_KERNEL, TITLES
from rlk_repro.report.blocks import Tone
from rlk_repro.report.checks import describe_agreement
from rlk_repro.report.operators import describe_speedups
from rlk_repro.report.setting import FROZEN, ONE_GPU
from rlk_repro.report.view import View
from rlk_repro.rundir.agreement import AGREEMENT_WORDS, choose_word
from rlk_repro.rundir.manifest import OTHER_RUNS
from rlk_repro.rundir.microbatch import LARGEST_MICROBATCH, describe_microbatches
from rlk_repro.rundir.results import (
    LESS_MEMORY,
    Analysis,
    Effect,
    GateStatus,
    ProofStatus,
    VerdictWord,
)
from rlk_repro.spec.values import BASELINE
from rlk_repro.spec.vime import VimeWorkload
from rlk_repro.statistics.crossover import MIN_SESSIONS
from rlk_repro.statistics.power import MIN_PAIRS
from rlk_repro.statistics.stats import MEAN_STEP_TIME, STEP_TIME, t_quantile
from rlk_repro.workloads import find_words

VERDICT_TONES: Final = {
    VerdictWord.FASTER: Tone.GOOD,
    VerdictWord.SLOWER: Tone.BAD,
    VerdictWord.EQUIVALENT: Tone.PLAIN,
    VerdictWord.INCONCLUSIVE: Tone.OPEN,
    VerdictWord.NOT_COMPARABLE: Tone.BAD,
    VerdictWord.NO_COMPARISON: Tone.PLAIN,
}
DECIDED: Final = frozenset({VerdictWord.FASTER, VerdictWord.SLOWER, VerdictWord.EQUIVALENT})
MEMORY: Final = {
    MemoryWord.SMALLER: ", and less memory",
    MemoryWord.LARGER: ", and more memory",
    MemoryWord.SAME: ", and the same memory",
    MemoryWord.INCONCLUSIVE: "",
}
OPERATORS_MEASURED: Final = "operators measured"
FULL_MEMORY: Final = f"The GPU's memory was full: {LESS_MEMORY} help."
TWICE: Final = 2.0
BESIDE: Final = "host.runs_beside"
SUSPECTS: Final = {
    OTHER_RUNS: "another run on this machine",
    BESIDE: "a run beside it",
    "host.trainer_processes": "processes of another trainer",
    "host.load_average": "a busy host",
    "host.governor": "a CPU governor that saves power",
    "host.numa_balancing": "automatic NUMA balancing",
    "gpu.devices": "GPUs with problems",
    "gpu": "GPUs in use by other processes",
}
"""Possible causes of an inconclusive verdict; the report names a cause if a finding's `where` starts with its key."""
MAX_FOUND: Final = 80
POWER_QUANTILE: Final = NormalDist().inv_cdf(0.9)
MAX_PAIRS: Final = 64
"""The largest number of pairs or sessions that a run may plan."""
MAX_FLAGS_LEN: Final = 400


def describe_baseline(view: View) -> str:
    setting = dict(view.context.setting)
    if BASELINE in setting:
        return setting[BASELINE]
    entropy = setting.get("entropy metric", "")
    trainer = find_words(view.analysis.workload).baseline_trainer
    if trainer and entropy:
        changes = [] if entropy.startswith("computed") else ["entropy metric removed"]
        changes += ["garbage collection frozen"] if FROZEN[0] in setting else []
        return f"{trainer} with its {' and '.join(changes)}" if changes else trainer
    return "baseline"


def describe_machines(view: View) -> str:
    """Return how many devices were measured, like ``1 NVIDIA H200``; empty if the plan is unknown."""
    plan, gpu = view.context.plan, view.analysis.facts.get("GPU", "")
    if plan is None or not plan.num_gpus:
        return "" if plan is None else count(plan.layout.num_nodes, "machine")
    used = {gpu for allocation, _ in view.allocations for gpu in allocation.gpus}
    if len(view.allocations) > 1 and not used:
        return f"{gpu or view.analysis.hardware} in {len(view.allocations)} allocations"
    return f"{len(used) or plan.num_gpus} {gpu or view.analysis.hardware}"


def is_decided(analysis: Analysis) -> bool:
    return analysis.verdict.word in DECIDED


def describe_word(analysis: Analysis) -> str:
    if analysis.microbatches:
        return LARGEST_MICROBATCH
    if analysis.operators:
        return OPERATORS_MEASURED
    return AGREEMENT_WORDS[choose_word(analysis.checks)] if analysis.checks else analysis.verdict.word.value


def describe_words(analysis: Analysis) -> str:
    """Return the verdict's word; where speed and memory are both decided, return both, like ``faster, same memory``."""
    word, memory = describe_word(analysis), judge_memory(analysis).word
    return f"{word}, {memory}" if word in DECIDED and memory is not MemoryWord.INCONCLUSIVE else word


def describe_answer(view: View) -> str:
    """Return a line like ``Result: on 1 NVIDIA H200, with RL-Kernel a step takes 4.37 % less time than in vime …``."""
    analysis = view.analysis
    word, effect = analysis.verdict.word, analysis.effect(view.primary)
    if analysis.checks:
        return f"Result: {describe_agreement(view)}."
    if analysis.microbatches:
        return f"Result: {describe_microbatches(analysis.microbatches)}."
    if word is VerdictWord.NO_COMPARISON:
        return f"Result: {describe_speedups(analysis.operators)}."
    if effect is None or effect.ratio is None:
        full = f" {FULL_MEMORY}" if _had_full_memory(analysis) else ""
        what = "no times were" if any(pair.is_counted for pair in analysis.pairs) else "nothing was"
        return f"Result: {what} compared. {_first(analysis)}{full}"
    what, subject = find_words(analysis.workload).takes, analysis.switch or "RL-Kernel"
    if word is VerdictWord.NOT_COMPARABLE:
        return f"Result: with {subject}, enabled is not comparable with baseline: {_find_reason(analysis)}."
    if view.context.own_work:
        subject += " and rlk-repro's own pass over the logits"
    machines = describe_machines(view)
    where = f"Result: on {machines}, " if machines else "Result: "
    share = format_number(100 * analysis.verdict.smallest_effect, 3)
    if word is VerdictWord.INCONCLUSIVE:
        side = _find_side(analysis, effect)
        same = f"or the same within {share} %: the run was too noisy to tell which"
        found = f"no answer yet. {_first(analysis)}"
        if side:
            found = f"with {subject} {what} {side} time{_than(view)}, {same}."
        ends = format_interval(effect.low, effect.high).replace(" to ", " and ")
        return f"{where}{found}{'' if ends == 'n/a' else f' The change lies between {ends}.'}"
    same = f"the same time within {share} %: " if word is VerdictWord.EQUIVALENT else ""
    rest = f"{MEMORY[judge_memory(analysis).word]}.{_name_slow_steps(analysis, effect)}"
    return f"{where}with {subject} {what} {same}{_size(view, effect)}{rest}"


def _name_slow_steps(analysis: Analysis, effect: Effect) -> str:
    by_mean = analysis.effect(MEAN_STEP_TIME)
    if by_mean is None or by_mean.ratio is None:
        return ""
    if not is_mean_elsewhere(analysis.verdict.word, effect, by_mean, analysis.verdict.smallest_effect):
        return ""
    return f" Mean step times, which count rare slow steps, differ by {format_change(by_mean.ratio)}."


def _first(analysis: Analysis) -> str:
    reason = _find_reason(analysis)
    return f"{reason[:1].upper()}{reason[1:]}."


def _find_reason(analysis: Analysis) -> str:
    text = analysis.verdict.headline.removeprefix("exploratory: ")
    for known in (f"with {analysis.switch}, ", f"{analysis.verdict.word}: "):
        text = text.removeprefix(known)
    return text.split("; ")[0]


def _find_side(analysis: Analysis, effect: Effect) -> str:
    """Return ``less`` or ``more`` if only noise prevents a verdict, and the interval excludes the other word."""
    if f": {TOO_NOISY} " not in analysis.verdict.headline or effect.low is None or effect.high is None:
        return ""
    factor = 1 + analysis.verdict.smallest_effect
    if effect.high < factor:
        return "less"
    return "more" if effect.low > 1 / factor else ""


def _size(view: View, effect: Effect) -> str:
    assert effect.ratio is not None
    is_less = effect.ratio < 1
    word, sign = ("less", -1) if is_less else ("more", 1)
    interval = f"{format_number(100 * effect.confidence, 3)} % interval {_show_ends(effect, sign)}"
    if wider := view.widen(effect):
        interval += f"; the noise of its blocks alone gives {_show_ends(wider, sign)}"
    if (by_allocation := view.by_allocation) is not None:
        interval += f"; counting each of {by_allocation.n} allocations once, {_show_ends(by_allocation, sign)}"
    times = f", {1 / effect.ratio:.2f} times as fast" if effect.ratio < 1 / TWICE else ""
    values = _apply(view, effect.metric, effect.ratio)
    size = f"{100 * abs(effect.ratio - 1):.{find_decimals(effect.low, effect.high)}f} %"
    return f"{size} {word} time{_than(view)}{times}{values} ({interval})"


def _than(view: View) -> str:
    baseline = describe_baseline(view)
    return "" if baseline == BASELINE else f" than in {baseline}"


def _show_ends(effect: Effect, sign: int) -> str:
    ends = (effect.ratio if end is None else end for end in (effect.low, effect.high))
    changes = sorted(100 * sign * ((end or 1.0) - 1) for end in ends)
    decimals = find_decimals(effect.low, effect.high)
    return f"{' to '.join(f'{change:z.{decimals}f}' for change in changes)} %".replace("-", MINUS)


def _apply(view: View, metric: str, ratio: float) -> str:
    """Return ``, A → B UNIT``: A is the baseline's mean; B = A × ``ratio`` is less noisy than enabled's own mean."""
    mean = view.mean(metric, BASELINE)
    if mean is None:
        return ""
    return f", {view.metric(metric).format(mean)} → {view.metric(metric).show(mean * ratio)}"


def describe_ground(view: View) -> str:
    """Return the number of pairs or sessions and the hardware, like ``4 sessions on NVIDIA H200, driver 580.159.04``.

    If a trial uses several GPUs, the layout follows the name of the GPU. Several allocations follow at the end.
    """
    analysis = view.analysis
    gpu, driver = (analysis.facts.get(name, "") for name in ("GPU", "driver"))
    layout = dict(view.context.setting).get("layout", ONE_GPU)
    if gpu and not layout.startswith(ONE_GPU):
        gpu += f" ({layout})"
    machines = describe_machines(view)
    if gpu and machines:
        gpu = gpu.replace(analysis.facts["GPU"], machines, 1)
    elif machines:
        gpu = f"{machines} ({analysis.hardware})"
    place = ", ".join(filter(None, (gpu, driver and f"driver {driver}"))) or analysis.hardware
    if len(view.allocations) > 1:
        place += f", in {count(len(view.allocations), 'allocation')}"
    elif view.is_comparison and machines:
        place += "; other machines were not measured"
    number = f"{count(analysis.verdict.num_pairs, analysis.unit)} on " if analysis.verdict.num_pairs else ""
    return f"{number}{place}"


def suggest_next(view: View, bundle: str) -> str:
    """Return the command to run next, such as a larger run that would decide, or a check of the bundle."""
    analysis, word, bundle = view.analysis, view.analysis.verdict.word, shlex.quote(bundle)
    smaller = _propose_smaller(view) if _had_full_memory(analysis) else ""
    if smaller or not view.context.is_sealed:
        recorded = "# what is recorded; only a sealed run can be checked or replayed"
        return smaller or f"rlk-repro inspect {bundle}  {recorded}"
    if analysis.checks:
        return f"rlk-repro agreement {bundle}"
    if did_not_run(analysis) and analysis.serving == TITLES[RL_KERNEL]:
        if any(trial.proof is ProofStatus.NATIVE for trial in analysis.trials):
            return f"rlk-repro report {bundle} --summary  # RL-Kernel is installed, but its kernels run only on a GPU"
        if analysis.run == "demo" and (data_dir("jobs").parent / "Makefile").is_file():
            return "make demo-rl-kernel  # builds RL-Kernel for this machine and runs with it"
        return "rlk-repro doctor  # whether RL-Kernel is installed on this machine"
    if word is VerdictWord.NOT_COMPARABLE:
        return f"rlk-repro report {bundle} --summary  # the gates that failed, with their figures"
    if word is VerdictWord.INCONCLUSIVE and (proposed := _propose(view, bundle)):
        return proposed
    return f"rlk-repro replay {bundle} --analyze-only"


def _propose(view: View, bundle: str) -> str:
    """Return the command of a run that would decide, or of a replay where no flags plan that run."""
    analysis, flags = view.analysis, _find_short_flags(view)
    if view.has_shared_gpus:
        together = "and the bundles beside it: the rewards of all pairs are judged together"
        return f"rlk-repro combine {bundle}  # {together}"
    number = _count_deciding(analysis)
    if number is None:
        measured = [gate for gate in analysis.gates if gate.estimate is not None]
        undecided = [gate.name for gate in measured if gate.status is GateStatus.UNDECIDED]
        again = f"this run again; undecided so far: {name_some(undecided)}"
        return f"rlk-repro replay {bundle}  # {again}" if undecided else ""
    if flags is None:
        enough = count(number, analysis.unit)
        return f"rlk-repro replay {bundle}  # this run with its own settings; {enough} would decide"
    return _write_submit(analysis, number, flags, "a new run; this run stays as it is")


def _propose_smaller(view: View) -> str:
    """Return the command of this run with microbatches of half the size, if samples fit in them."""
    plan, flags, analysis = view.context.plan, _find_short_flags(view), view.analysis
    if plan is None or flags is None or not isinstance(plan.run.workload, VimeWorkload):
        return ""
    half = divide(plan).placement.max_tokens_per_gpu // 2
    if half < find_least_microbatch(plan):
        return ""
    setting = f"--set workload.placements.{plan.hardware.hardware}.max_tokens_per_gpu="
    kept = [flag for flag in flags if not flag.startswith(setting)]
    number = analysis.num_pairs_planned
    return _write_submit(analysis, number, [*kept, f"{setting}{half}"], "smaller microbatches")


def _find_short_flags(view: View) -> tuple[str, ...] | None:
    flags = view.context.flags
    return None if flags is None or sum(map(len, flags)) > MAX_FLAGS_LEN else flags


def _had_full_memory(analysis: Analysis) -> bool:
    """Tell whether full memory left nothing to compare; some runs are to fill the memory."""
    if analysis.microbatches or analysis.verdict.num_pairs:
        return False
    return any(pair.lacks_memory for pair in analysis.pairs)


def _write_submit(analysis: Analysis, number: int, flags: Sequence[str], comment: str) -> str:
    size = f"--{'sessions' if analysis.is_crossover else 'pairs'} {number}"
    run = analysis.run
    if run not in list_names(run_folders()):
        run, comment = f"{run}.yaml", f"{comment}; the bundle's run.yaml is this file"
    where = f"--cluster {analysis.cluster} --hardware {analysis.hardware} --stack {analysis.stack}"
    command = " ".join(("rlk-repro submit --run", run, where, size, *flags))
    return f"{command}  # {comment}"


def did_not_run(analysis: Analysis) -> bool:
    """Tell whether the run has no answer because an enabled trial ran without RL-Kernel's kernels."""
    enabled = [trial for trial in analysis.trials if trial.variant != BASELINE]
    is_idle = any(trial.proof in {ProofStatus.FALLBACK, ProofStatus.NATIVE} for trial in enabled)
    return is_idle and analysis.verdict.word not in DECIDED


def list_suspects(view: View) -> str:
    analysis = view.analysis
    if analysis.verdict.word is not VerdictWord.INCONCLUSIVE:
        return ""
    suspects: dict[str, str] = {}
    for item in (*analysis.findings, *view.context.findings):
        place = item.where.rpartition(": ")[2]
        known = next((why for part, why in SUSPECTS.items() if place.startswith(part)), None)
        if known is not None and (item.level is not Level.INFO or place == BESIDE):
            suspects.setdefault(known, shorten(item.found, MAX_FOUND))
    found = [f"{why} ({what})" for why, what in suspects.items()]
    slowed = {trial.folder for trial in analysis.trials if trial.throttled_fraction}
    if slowed:
        what = "session" if analysis.is_crossover else "trial"
        found.append(f"GPUs slowed down by heat or power ({count(len(slowed), what)})")
    return "; ".join(found)


def _count_deciding(analysis: Analysis) -> int | None:
    """Return how many pairs or sessions decide the verdict in about 9 of 10 runs with this effect and this spread.

    The result is None if no number up to MAX_PAIRS decides, or if the speed is decided and something else is not.
    """
    effect = analysis.effect(STEP_TIME)
    if effect is None or effect.ratio is None or not effect.sd_log:
        return None
    size = abs(math.log(effect.ratio))
    beyond, within = (math.log1p(end) for end in (analysis.verdict.threshold, analysis.verdict.smallest_effect))
    room = size - beyond if size > beyond else within - size
    least = MIN_SESSIONS if analysis.is_crossover else MIN_PAIRS
    for number in range(max(effect.n, least), MAX_PAIRS + 1):
        if (t_quantile(effect.confidence, number - 1) + POWER_QUANTILE) * effect.sd_log / math.sqrt(number) < room:
            return number if number > effect.n else None
    return None
