"""Print a summary of the report on a terminal of 80 columns or more: what ran, the results, and the verdict last."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlk_repro.base.findings import Level, sort_findings
from rlk_repro.base.units import format_percent
from rlk_repro.report.answer import describe_answer, describe_ground, describe_word, list_suspects, suggest_next
from rlk_repro.report.basis import describe_headline, describe_interval, make_basis, make_identity
from rlk_repro.report.blocks import Tone
from rlk_repro.report.labels import NOT_RECORDED, clean
from rlk_repro.report.operators import (
    KIND_TONES,
    STATUS_TONES,
    TIMES,
    describe_case,
    describe_error,
    describe_floor_share,
    describe_median,
    describe_memory,
    describe_speedup,
    group_by_case,
)
from rlk_repro.report.sections import GATE_TONES, choose_tone, describe_floor, make_proof_cell
from rlk_repro.report.surroundings import describe_range, list_unrecorded, make_cautions, make_commands
from rlk_repro.report.view import Context, View, make_view
from rlk_repro.rundir.operator_results import OperatorResult
from rlk_repro.rundir.results import Analysis, TrialResult, TrialStatus, count_gates

STYLES: Final = {
    Tone.PLAIN: "",
    Tone.GOOD: "green",
    Tone.BAD: "bold red",
    Tone.OPEN: "yellow",
    Tone.FAINT: "dim",
}
WIDE: Final = 112
MAX_REASONS: Final = 6
MAX_CASES: Final = 24
SHOWN_METRICS: Final = frozenset(
    {
        *("step_time_s", "tokens_per_s", "rollout_time_s", "log_probs_time_s", "ref_log_probs_time_s"),
        *("actor_train_time_s", "weight_sync_time_s", "peak_memory_bytes", "raw_reward", "response_length_mean"),
        *("train_rollout_logprob_abs_diff", "peak_memory_in_forward_only_bytes"),
    }
)


def print_answer(
    analysis: Analysis,
    console: Console,
    context: Context | None = None,
    *,
    bundle: str = "",
    report: str = "",
    replay: str = "",
    next_command: str = "",
) -> None:
    """Print the answer, its basis, the path of the bundle, and one next command, as the last lines of a command.

    ``replay`` is the result of a replay; ``next_command`` replaces the command that the verdict suggests.
    """
    view = make_view(analysis, context)
    console.print()
    _print_word(analysis, console)
    place = bundle or view.context.bundle
    rows = (
        ("rests on", describe_ground(view)),
        ("gates", count_gates(analysis.gates) if analysis.gates else ""),
        ("replay", replay),
        ("bundle", bundle),
        ("report", report),
        ("suspects", list_suspects(view)),
        ("next", next_command or suggest_next(view, place.partition("  (")[0])),
    )
    for name, value in rows:
        if value:
            console.print(Text.assemble((f"{name:<10}", "dim"), clean(value)), soft_wrap=True)
    console.print(_text(describe_answer(view)))


def _print_word(analysis: Analysis, console: Console) -> None:
    console.print(_text(describe_word(analysis).upper(), f"bold {STYLES[choose_tone(analysis)]}".strip()))


def print_summary(analysis: Analysis, console: Console, context: Context | None = None) -> None:
    view = make_view(analysis, context)
    console.print(_text(f"{analysis.run}: {', '.join(f'{name} {value}' for name, value in make_identity(analysis))}"))
    _print_trials(view, console)
    if view.is_comparison:
        _print_metrics(view, console)
        _print_gates(view, console)
    elif not view.has_variants:
        _print_cells(view, console)
    _print_findings(view, console)
    _print_next(view, console)
    _print_verdict(view, console)


def _print_verdict(view: View, console: Console) -> None:
    analysis = view.analysis
    console.print()
    _print_word(analysis, console)
    console.print(_text(describe_headline(analysis)))
    for caution in make_cautions(view):
        console.print(_text(caution, "bold"))
    console.print()
    grid = _make_table()
    noise = (
        [("noise floor", describe_floor(analysis.noise_floor))]
        if view.is_comparison and not analysis.is_crossover
        else []
    )
    for name, value in (*make_basis(view), *noise):
        grid.add_row(_text(name, "dim"), _text(value))
    console.print(grid)
    reasons = analysis.verdict.reasons
    for reason in reasons[:MAX_REASONS]:
        console.print(_make_bullet(reason))
    if rest := reasons[MAX_REASONS:]:
        console.print(_text(f"and {len(rest)} more, in the report", "dim"))


def _print_metrics(view: View, console: Console) -> None:
    is_wide = console.width >= WIDE
    _print_heading(
        console, "Metrics", f"lowest .. highest trial; change: baseline to enabled, over scored {view.analysis.unit}s"
    )
    table = _make_table("metric", "baseline", "enabled", "change", numbers=("baseline", "enabled", "change"))
    if is_wide:
        table.add_column("interval", justify="right", no_wrap=True)
        table.add_column(f"{view.analysis.unit}s", justify="right", no_wrap=True)
    for metric in view.metrics:
        if metric in view.recorded and metric in SHOWN_METRICS:
            table.add_row(*map(_text, _metric_cells(view, metric, is_wide=is_wide)))
    console.print(table)
    if unrecorded := list_unrecorded(view):
        console.print(_text(unrecorded, "dim"))


def _metric_cells(view: View, metric: str, *, is_wide: bool) -> list[str]:
    effect = view.analysis.effect(metric)
    change = "" if effect is None or effect.ratio is None else format_percent(effect.ratio)
    ranges = [describe_range(view, metric, variant)[0].replace(" – ", "..") for variant in ("baseline", "enabled")]
    interval = (describe_interval(effect), str(effect.n)) if effect else ("", "")
    return [view.name_with_unit(metric), *ranges, change, *(interval if is_wide else ())]


def _print_gates(view: View, console: Console) -> None:
    _print_heading(console, "Gates", "if one failed, the run is not comparable; if one is undecided, inconclusive")
    table = _make_table("gate", "status", "what")
    for gate in view.analysis.gates:
        table.add_row(_text(gate.name), _text(gate.shown.word, STYLES[GATE_TONES[gate.shown]]), _text(gate.detail))
    console.print(table)


def _print_cells(view: View, console: Console) -> None:
    cases = group_by_case(view.analysis.operators)
    _print_heading(console, "Operators", f"median in ms with range over processes; {TIMES}: relative speed")
    numbers = ("median", TIMES, "error", *(("extra memory", "of floor") if console.width >= WIDE else ()))
    reasons: dict[str, list[str]] = {}
    for case, results in cases[:MAX_CASES]:
        console.print(_text(describe_case(case), "bold"))
        table = _make_table("implementation", "kind", *numbers, numbers=numbers)
        for result in results:
            table.add_row(*_operator_cells(result, is_wide=console.width >= WIDE))
            if result.reason:
                reasons.setdefault(f"{result.status}: {result.reason}", []).append(result.implementation)
        console.print(table)
    if rest := cases[MAX_CASES:]:
        console.print(_text(f"and {len(rest)} more cases, in the report", "dim"))
    for reason, names in reasons.items():
        console.print(_make_bullet(f"{', '.join(dict.fromkeys(names))}: {reason}"))


def _operator_cells(result: OperatorResult, *, is_wide: bool) -> list[Text]:
    texts = [describe_speedup(result), describe_error(result.error)]
    if is_wide:
        texts += [describe_memory(result), describe_floor_share(result)]
    return [
        _text(result.implementation),
        _text(result.kind.value, STYLES[KIND_TONES[result.kind]]),
        _text(describe_median(result).replace(" – ", ".."), STYLES[STATUS_TONES[result.status]]),
        *(_text(text.replace(" – ", "..")) for text in texts),
    ]


def _print_trials(view: View, console: Console) -> None:
    _print_heading(console, "Trials", f"in the order they ran; mean {view.name_with_unit(view.primary)}")
    table = _make_table("trial", "status", "steps", "mean", view.analysis.serving, numbers=("steps", "mean"))
    reasons: dict[str, list[str]] = {}
    for trial in view.analysis.trials:
        table.add_row(*_trial_cells(view, trial))
        for reason in filter(None, dict.fromkeys((trial.reason, trial.proof_reason))):
            reasons.setdefault(reason, []).append(trial.name)
    console.print(table)
    for reason, names in reasons.items():
        console.print(_make_bullet(f"{', '.join(names)}: {reason}"))


def _trial_cells(view: View, trial: TrialResult) -> list[Text]:
    summary, proof = trial.summary(view.primary), make_proof_cell(view, trial)
    return [
        _text(trial.name),
        _text(trial.status.value, STYLES[Tone.PLAIN if trial.status is TrialStatus.OK else Tone.BAD]),
        _text(f"{trial.num_steps_found}/{trial.num_steps_expected}"),
        _text(view.numbers.format(view.primary, summary.mean) if summary else NOT_RECORDED),
        _text(proof.text, STYLES[proof.tone]),
    ]


def _print_findings(view: View, console: Console) -> None:
    found = [item for item in (*view.analysis.findings, *view.context.findings) if item.level is not Level.INFO]
    if not found and not view.analysis.notes:
        return
    _print_heading(console, "Findings and notes")
    for item in (*map(str, sort_findings(found)), *view.analysis.notes):
        console.print(_make_bullet(item))


def _print_next(view: View, console: Console) -> None:
    _print_heading(console, "Next")
    for command, purpose in make_commands(view).lines:
        console.print(_text(f"  # {purpose}", "dim"))
        console.print(_text(f"  {command}"), soft_wrap=True)


def _print_heading(console: Console, title: str, remark: str = "") -> None:
    console.print()
    console.print(Text.assemble((title, "bold"), (f"  {remark}" if remark else "", "dim")))


def _make_table(*names: str, numbers: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=bool(names), header_style="dim")
    for name in names:
        table.add_column(name, justify="right" if name in numbers else "left", no_wrap=name in numbers, overflow="fold")
    return table


def _make_bullet(text: str) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row("-", _text(text))
    return grid


def _text(text: str, style: str = "") -> Text:
    """Return plain text: markup, control characters and escape sequences of the run have no effect."""
    return Text(clean(text), style=style, overflow="fold")
