"""``docs/runs/<run>.md``: what somebody needs to run a shipped run again, all of it taken from the run and its plans.

A fact that is missing belongs into the run or its stack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.findings import Finding
from rlk_repro.base.resources import list_names, run_folders
from rlk_repro.operators import OPERATORS
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import HubData, HubSource, VimeWorkload
from rlk_repro.submit.show import plan_summary
from rlk_repro.workloads import WORKLOADS
from rlk_repro.workloads.differences import Difference, list_differences
from rlk_repro.workloads.environment import DECLARED
from rlk_repro.workloads.vime.contract import split_arguments
from tests import ROOT
from tests.support.run_plans import CPU, layouts, make_run_plan

FOLDER: Final = ROOT / "docs" / "runs"
INDEX: Final = "README.md"
PLACE: Final = RunDir(Path("/runs/run/id"))
SHOWN: Final = {str(PLACE.root): "{run_dir}", str(PLACE.root.parent.parent): "{runs}"}
Row = Sequence[object]
Plans = Mapping[str, Plan]


def write_pages() -> None:
    """Every page; those of runs that are gone go too."""
    FOLDER.mkdir(exist_ok=True)
    pages = render_pages()
    for path in FOLDER.glob("*.md"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        (FOLDER / name).write_text(text)


def render_pages() -> dict[str, str]:
    """By file name, the index too."""
    found = {run: {hardware: make_run_plan(run, hardware) for hardware in layouts(run)} for run in list_runs()}
    return {f"{run}.md": _render(plans) for run, plans in found.items()} | {INDEX: _render_index(found)}


def list_runs() -> list[str]:
    return list_names(run_folders())


def _render_index(found: Mapping[str, Plans]) -> str:
    rows = [
        (f"[{run}]({run}.md)", _first(plans).run.workload.kind, _first(plans).run.lane, ", ".join(plans))
        for run, plans in found.items()
    ]
    note = "This table lists the run definitions in `jobs/`; `make goldens` writes the page of each run."
    text = "\n".join(["# Shipped runs", "", note, "", *_table(INDEX_HEAD, rows)])
    return f"{text}\n"


INDEX_HEAD: Final = ("run", "workload", "lane", "hardware")


def _render(plans: Plans) -> str:
    run = _first(plans).run
    lines = [f"# {run.run}", "", run.purpose.strip(), ""]
    lines += [f"Source: [`jobs/{run.run}.yaml`](../../jobs/{run.run}.yaml), rendered by `make goldens`.", ""]
    for title, section in SECTIONS:
        if body := list(section(plans)):
            lines += [f"## {title}", "", *body, ""]
    return "\n".join(lines).rstrip() + "\n"


def _first(plans: Plans) -> Plan:
    return next(iter(plans.values()))


def _table(head: Sequence[str], rows: Iterable[Row]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |" for row in rows)


def _bullets(items: Iterable[str]) -> Iterator[str]:
    yield from (f"- {item}" for item in items)


def _command(plans: Plans) -> Iterator[str]:
    hardware = "h200" if "h200" in plans else next(iter(plans))
    plan = plans[hardware]
    where = "" if hardware == CPU else f"--cluster slurm --profile {plan.profile.profile} "
    submit = f"rlk-repro submit {where}--run {plan.run.run} --hardware {hardware}"
    yield "```sh"
    if isinstance(plan.run.workload, VimeWorkload):
        yield f"rlk-repro prepare {plan.run.run} {where}--hardware {hardware} --dry-run"
    yield f"{submit} --dry-run"
    if hardware == CPU:
        yield submit
    yield "```"
    if hardware != CPU:
        yield ""
        yield "A dry run starts nothing. To start this run on your cluster, leave out `--dry-run` and name your own"
        yield "profile, which `rlk-repro profile init` writes."
        missing = plan.stack.unpublished.get(plan.hardware.image_platform)
        if missing is not None:
            yield f"This run needs a container image; `{missing.build}` builds the image."
        yield "On Kubernetes, use `--cluster k8s` in place of `--cluster slurm`; the other flags do not change."


def _hardware(plans: Plans) -> Iterator[str]:
    head = ("hardware", "nodes x GPUs", "TP PP CP EP", "trials x steps", "hours", "GPU-hours")
    yield from _table(head, (_hardware_row(name, plan) for name, plan in plans.items()))
    yield ""
    run = _first(plans).run
    key = "session" if run.measure.design == "crossover" and run.expected_session_minutes else "trial"
    yield f"The hours are estimates from the run's file (`expected_{key}_minutes`). These estimates leave out the"
    yield "time in the queue, `prepare`, preflight and the run that stores rollouts."
    if isinstance(_first(plans).run.workload, VimeWorkload):
        yield "[Runs of vime](../vime-workload.md#runs) names the source of these estimates."


def _hardware_row(name: str, plan: Plan) -> Row:
    layout, minutes = plan.layout, plan.expected_minutes()
    sizes = (layout.tensor_parallel, layout.pipeline_parallel, layout.context_parallel, layout.expert_parallel)
    hours = ("–", "–") if minutes is None else (f"{minutes / 60:.2f}", f"{minutes / 60 * plan.num_gpus:.2f}")
    trials = f"{len(plan.trials)}{' sessions' if plan.is_crossover else ''} x {plan.num_steps}"
    return (name, f"{layout.num_nodes} x {layout.gpus_per_node}", " ".join(map(str, sizes)), trials, *hours)


def _operators(plans: Plans) -> Iterator[str]:
    """What the layouts allow of what the run asks for."""
    if not _first(plans).has_enabled:
        yield "This run has no trainer: its trials measure operators alone, outside of training."
        return
    mode = _first(plans).run.rl_kernel.mode
    yield f"RL-Kernel's mode in this run is `{mode}`. The table says which operators the run requests and"
    yield "which operators each layout allows. [Routes](../integration/design.md#routes) describes each operator."
    yield ""
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, plan in plans.items():
        for op, reason in _find_all_refusals(plan).items():
            asked = "yes" if op in plan.ops else "no"
            state = f"not eligible: `{op}` {reason}" if reason else "eligible"
            found.setdefault((op, asked, state), []).append(name)
    rows = [(f"`{row[0]}`", *row[1:], _where(names, plans)) for row, names in sorted(found.items())]
    yield from _table(("operator", "requested", "in this layout", "hardware"), rows)


def _find_all_refusals(plan: Plan) -> dict[str, str]:
    """Of all operators there are, whether the run asks for them or not."""
    rl_kernel = plan.run.rl_kernel.model_copy(update={"ops": tuple(OPERATORS), "ops_on": {}})
    run = plan.run.model_copy(update={"rl_kernel": rl_kernel})
    return dataclasses.replace(plan, run=run).explain_operators()


def _variants(plans: Plans) -> Iterator[str]:
    found: dict[Difference, list[str]] = {}
    for name, plan in plans.items():
        for item in list_differences(plan):
            found.setdefault(item, []).append(name)
    if not found:
        return
    yield "Both variants have the same arguments. The environments of the two variants differ in these variables:"
    yield ""
    rows = [
        (f"`{item.name}`", f"`{item.baseline}`", f"`{item.enabled}`", item.kind.value, _where(names, plans))
        for item, names in found.items()
    ]
    yield from _table(("variable", "baseline", "enabled", "what", "hardware"), rows)


def _where(names: Sequence[str], plans: Mapping[str, object]) -> str:
    return "all" if len(names) == len(plans) else ", ".join(names)


def _stack(plans: Plans) -> Iterator[str]:
    stack = _first(plans).stack
    name = stack.stack
    yield f"This run uses the stack [`{name}`](../../manifests/stacks/{name}.yaml). {stack.purpose.strip()}"
    if stack.pins:
        yield ""
        rows = [(name, pin.repository, f"`{pin.commit}`") for name, pin in stack.pins.items()]
        yield from _table(("source", "repository", "commit"), rows)


def _inputs(plans: Plans) -> Iterator[str]:
    workload = _first(plans).run.workload
    if not isinstance(workload, VimeWorkload):
        return
    sources = (("model", workload.model.source), ("data", workload.data.source))
    rows = [(what, *_describe_source(source)) for what, source in sources]
    yield from _table(("what", "from", "revision"), rows)
    yield ""
    recipe = f" The model's arguments come from vime's `{workload.model.recipe}`." if workload.model.recipe else ""
    yield f"Reports call the model *{workload.model.title}*.{recipe}"
    plan = _first(plans)
    if workload.rollouts_seed is not None and plan.run.lane != "live":
        yield f"`prepare` makes the rollouts: random tokens of full length from seed {workload.rollouts_seed}."
    elif workload.rollouts is None and plan.run.lane != "live":
        unit = "session" if plan.is_crossover else "trial"
        yield f"No rollouts are shipped: vime generates and stores rollouts before the first {unit}, and every {unit}"
        yield "trains on these stored rollouts."


def _describe_source(source: Any) -> tuple[str, str]:
    if isinstance(source, HubSource | HubData):
        file = f", `{source.file}`" if isinstance(source, HubData) else ""
        return f"hub, `{source.repository}`{file}", f"`{source.revision}`" if source.revision else "**not pinned**"
    if source.kind == "package":
        return f"`{source.file}` of the package `{source.name}` {source.version}", f"`{source.digest}`"
    return f"made by `prepare` ({source.kind})", f"seed {source.seed}"


def _settings(plans: Plans) -> Iterator[str]:
    """GRPO settings of vime; of the other workloads, all of their settings."""
    workload = _first(plans).run.workload
    values = workload.model_dump(mode="json")
    shown = values["grpo"] if isinstance(workload, VimeWorkload) else values
    yield from _table(("setting", "value"), ((f"`{path}`", f"`{_show(value)}`") for path, value in _flatten(shown)))


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(item, f"{prefix}.{key}" if prefix else key)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from _flatten(item, f"{prefix}.{number}")
    elif value not in (None, []):
        yield prefix, value


def _show(value: Any) -> str:
    """As the run's file would have it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _arguments(plans: Plans) -> Iterator[str]:
    """The whole command line of vime's ``train.py`` in the first trial, flag by flag."""
    if isinstance(_first(plans).run.workload, VimeWorkload):
        found = {name: dict(split_arguments(_argv(plan))) for name, plan in plans.items()}
        yield "The table lists the arguments of the first trial. `{run_dir}` is the run directory, and `{runs}` is"
        yield "the folder of all run directories."
        yield ""
        yield from _table(("flag", "value", "hardware"), _merge(found))


def _environment(plans: Plans) -> Iterator[str]:
    found = {name: {key: (value,) for key, value in _env(plan).items()} for name, plan in plans.items()}
    yield from _table(("variable", "value", "hardware"), _merge(found))


def _merge(found: Mapping[str, Mapping[str, Sequence[str]]]) -> Iterator[Row]:
    """A row per name where all hardware agrees, else one per value."""
    for name in sorted({name for values in found.values() for name in values}):
        by_value: dict[str, list[str]] = {}
        for hardware, values in found.items():
            if name in values:
                by_value.setdefault(" ".join(values[name]), []).append(hardware)
        for value, names in by_value.items():
            yield f"`{name}`", f"`{value}`" if value else "", _where(names, found)


def _argv(plan: Plan) -> list[str]:
    return [_hide(word) for word in _trainer(plan).argv[3:]]


def _env(plan: Plan) -> dict[str, str]:
    return {name: _hide(value) for name, value in _trainer(plan).env.items() if name not in DECLARED}


def _trainer(plan: Plan) -> Any:
    return WORKLOADS[plan.run.workload.kind].trainer_command(plan, plan.trials[0], PLACE)


def _hide(text: str) -> str:
    for path, name in SHOWN.items():
        text = text.replace(path, name)
    return text


def _expected(plans: Plans) -> Iterator[str]:
    plan = _first(plans)
    measure, summary = plan.run.measure, plan_summary(plan)
    lines = [
        f"The run has {measure.sessions} sessions. Each session has {measure.blocks} blocks and"
        f" {measure.control_blocks} control blocks, {_count(measure.warmup_steps, 'warm-up step')} and"
        f" {_count(measure.num_scored, 'scored step')}. The first session has the seed {measure.seed}."
        if plan.is_crossover
        else f"The run has {_count(summary['num_pairs'], 'pair')} and"
        f" {_count(summary['num_control_pairs'], 'control pair')}. Each trial has"
        f" {_count(measure.warmup_steps, 'warm-up step')} and {_count(measure.scored_steps, 'scored step')}."
        f" The first pair has the seed {measure.seed}."
    ]
    if summary["num_pairs"]:
        lines.append(_describe_power(plan, summary["smallest_visible_effect"]))
        margins = ", ".join(f"`{name}` {value:g}" for name, value in measure.margins.model_dump().items())
        lines.append(f"The [gates](../statistics.md#gates) use the margins {margins}.")
    if isinstance(plan.run.workload, VimeWorkload):
        lines.append(f"[metrics.md](../metrics.md) lists the metrics that the lane `{plan.run.lane}` records.")
    yield from _bullets(lines)


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def _describe_power(plan: Plan, effect: float | None) -> str:
    measure = plan.run.measure
    if plan.run.measure.pairs < 6:
        return "This run gives no verdict on speed, because such a verdict needs at least 6 pairs."
    if effect is None:
        return (
            "This run detects no change of step time reliably: its gates on rewards and lengths often stay undecided."
        )
    return (
        f"This run reliably detects a change of step time of {effect * 100:.1f} % if the effects of its pairs have"
        f" a standard deviation of {measure.expected_pair_sd_pct:g} %. The verdicts `faster` and `slower` need a change"
        f" of more than {measure.smallest_effect_pct:g} %."
    )


def _may(plans: Plans) -> Iterator[str]:
    yield from _bullets(_first(plans).run.may_claim)


def _may_not(plans: Plans) -> Iterator[str]:
    yield from _bullets(_first(plans).run.may_not_claim)


def _limits(plans: Plans) -> Iterator[str]:
    """What is known to be missing, unpinned or uncertain, by the files of the run and its stack."""
    yield from _bullets(dict.fromkeys([*_image_limits(plans), *_plan_limits(plans), *_stack_limits(plans)]))


def _image_limits(plans: Plans) -> Iterator[str]:
    stack = _first(plans).stack
    found: dict[str, list[str]] = {}
    for name, plan in plans.items():
        missing = stack.unpublished.get(plan.hardware.image_platform)
        if missing is not None:
            why = f"because {missing.reason}. `{missing.build}` builds the image"
            found.setdefault(why, []).append(name)
    yield from (f"The image for {', '.join(names)} is not published, {why}." for why, names in found.items())


def _plan_limits(plans: Plans) -> Iterator[str]:
    warnings: dict[tuple[str, str, str], list[str]] = {}
    for name, plan in plans.items():
        for item in (Finding.from_json(value) for value in plan_summary(plan)["warnings"]):
            warnings.setdefault((item.where, item.found, item.expected), []).append(name)
    for (where, found, expected), names in warnings.items():
        yield f"On {_where(names, plans)} hardware, `{where}` is {found}. Set this key to {expected}."
    workload = _first(plans).run.workload
    offloads = (
        {name: item.offload for name, item in workload.placements.items()} if isinstance(workload, VimeWorkload) else {}
    )
    if not offloads.get("mi300x", True) and any(offloads.values()):
        yield "On mi300x this run switches `offload` off, because ROCm does not restore offloaded memory completely."


def _stack_limits(plans: Plans) -> Iterator[str]:
    stack = _first(plans).stack
    platforms = {plan.hardware.image_platform for plan in plans.values()}
    for name, item in stack.components.items():
        if item.confidence == "unverified" and (not item.platforms or platforms & set(item.platforms)):
            version = item.version or item.commit
            yield f"The stack marks its `{name}` {version} as unverified. What is known of {version}: {item.evidence}."
    if stack.moving:
        names = ", ".join(f"`{name}`" for name in stack.moving)
        yield f"A rebuilt image may hold other versions of these parts: {names}. The stack's key `moving` says why."


SECTIONS: Final[tuple[tuple[str, Callable[[Plans], Iterator[str]]], ...]] = (
    ("Command", _command),
    ("Hardware and cost", _hardware),
    ("Operators", _operators),
    ("What differs between the variants", _variants),
    ("Commits", _stack),
    ("Model and data", _inputs),
    ("What is expected", _expected),
    ("What this run shows", _may),
    ("What this run does not show", _may_not),
    ("What is known to be missing or to break", _limits),
    ("Settings", _settings),
    ("Arguments of train.py", _arguments),
    ("Environment of every trial", _environment),
)
