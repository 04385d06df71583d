"""Describe the settings in which runs with the same name may differ: command-line overrides, workload, loss, layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from rlk_repro.base.units import count
from rlk_repro.operators import COMPILED_LOGP, HAS_BATCH_INVARIANT_LOGP, TITLES, TRAINER, Platform
from rlk_repro.plan import PROFILE, Plan
from rlk_repro.spec.values import BASELINE, Model
from rlk_repro.spec.vime import VimeWorkload
from rlk_repro.spec.workloads import ModuleWorkload
from rlk_repro.workloads import WORKLOADS, find_words

Workload = Mapping[str, Any]

ONE_GPU: Final = "1 node, 1 GPU a node"
AS_WRITTEN: Final = "none: all values are those of the run definition"
MOMENTS: Final = "rlk-repro's own pass over the logits (torch.compile on a GPU, rlk_repro/integration/route/moments.py)"
OWN_ENTROPY: Final = (
    "A part of this change is not {name}'s, which has no operator for the entropy metric: it comes from "
    f"{MOMENTS}, which computes that metric{{normaliser}}. "
    "To measure {name} alone, use --set entropy_metric=false."
)
OLD_NORMALISER: Final = " and, with an RL-Kernel that lacks batch_invariant_logp, the normaliser of the log-probs"
OWN_NORMALISER: Final = (
    "A part of this change is not RL-Kernel's: it comes from "
    f"{MOMENTS}, which computes the normaliser of log-probs that need a gradient."
)
FROZEN: Final = (
    "Python's garbage collector",
    "objects are frozen after the warm-up in both variants (gc.freeze), so that the trainer's garbage collection after "
    "every step takes milliseconds. Without gc.freeze a step is longer, so the same gain is a smaller share of a step",
)
NO_COLLECTION: Final = "The run shows nothing about the time of Python's garbage collection after every step"
NO_ENTROPY: Final = "The run shows nothing about vime with its entropy metric"
NO_R3: Final = "The run shows nothing about routing replay"
AND: Final = ", and nothing about"
_WITH_OWN_PASS: Final = frozenset({"ratio_kl", COMPILED_LOGP})


def describe_setting(plan: Plan) -> tuple[tuple[str, str], ...]:
    workload = plan.experiment["run"]["workload"]
    facts = [("run", plan.run.run), ("overrides", ", ".join(_list_changes(plan)) or AS_WRITTEN)]
    facts += WORKLOADS[workload["kind"]].describe(MappingProxyType(workload))
    if plan.run.workload.has_variants:
        if workload.get("grpo"):
            facts.append(("loss", _describe_loss(workload["grpo"], find_words(workload["kind"]).updates_per)))
        if baseline := plan.run.rl_kernel.find_commit(BASELINE):
            facts.append((BASELINE, f"RL-Kernel {baseline[:12]}"))
        elif (other := plan.run.rl_kernel.baseline_implementation) != TRAINER:
            removed = "" if plan.run.entropy_metric else " and its entropy metric removed"
            facts.append((BASELINE, f"{plan.run.workload.trainer} with {TITLES[other]}{removed}"))
        where = "computed" if plan.run.entropy_metric else "left out"
        facts.append(("entropy metric", f"{where}, in both variants"))
        if plan.run.gc_freeze:
            facts.append(FROZEN)
    facts.append(("layout", _describe_layout(plan)))
    if plan.profile.gpus:
        numbers = ", ".join(map(str, plan.profile.gpus))
        facts.append(("GPUs", f"GPU {numbers} of the machine; its other GPUs may have served other runs at that time"))
    return tuple(facts)


def find_own_work(plan: Plan) -> tuple[str, ...]:
    if not plan.routed or _WITH_OWN_PASS.isdisjoint(plan.ops):
        return ()
    pin = plan.stack.pins.get("rl_kernel")
    has_newer = pin is not None and HAS_BATCH_INVARIANT_LOGP.get(pin.commit, False)
    if plan.run.entropy_metric:
        is_without = COMPILED_LOGP in plan.ops or has_newer
        name = TITLES[plan.run.rl_kernel.implementation]
        return (OWN_ENTROPY.format(name=name, normaliser="" if is_without else OLD_NORMALISER),)
    is_without_logp = plan.hardware.platform == Platform.ROCM.value and "ratio_kl" in plan.ops and not has_newer
    return (OWN_NORMALISER,) if is_without_logp else ()


def find_limits(plan: Plan) -> tuple[str, ...]:
    """Return what a result does not show: the author's own words, and what follows from the settings.

    Run files of earlier versions say the latter themselves; where a flag contradicts such a sentence, it is left out up
    to what else it says.
    """
    run, workload = plan.run, plan.run.workload
    without_entropy = isinstance(workload, ModuleWorkload | VimeWorkload) and not run.entropy_metric
    has_r3 = isinstance(workload, VimeWorkload) and workload.grpo.use_rollout_routing_replay
    rows = (
        (run.gc_freeze, NO_COLLECTION, ", because both variants run without this collection"),
        (without_entropy, NO_ENTROPY, ", because neither variant computes this metric"),
        (has_r3, NO_R3, " (R3), which both variants use, or about kernels of experts and routers"),
    )
    own = list(run.may_not_claim)
    for holds, start, rest in rows:
        is_said = any(text.startswith(start) for text in own)
        if holds and not is_said:
            own.append(start + rest)
        elif is_said and not holds:
            own = [_leave_out(text) if text.startswith(start) else text for text in own]
    return tuple(filter(None, own))


def _leave_out(text: str) -> str:
    """Return what a sentence says after its first part, or an empty text."""
    _, _, more = text.partition(AND)
    return f"The run shows nothing about{more}" if more else ""


def _list_changes(plan: Plan) -> Iterator[str]:
    """Yield each value that a flag changed, like ``entropy_metric = false (--set)``."""
    for path, source in sorted(plan.sources.items()):
        if source.startswith("--"):
            owner = plan.profile if path.startswith(PROFILE) else plan.run
            value = _find(owner, path.removeprefix(PROFILE))
            yield f"{path} = {_show(value)} ({source.split()[0]})"


def _find(value: Any, path: str) -> Any:
    for part in path.split("."):
        # The path may come from a stranger's plan: it must reach only values of the run, not attributes like __class__.
        fields = dict(value) if isinstance(value, Model) else value
        if isinstance(fields, Mapping):
            value = fields.get(part)
        elif isinstance(fields, list | tuple) and part.isdecimal() and int(part) < len(fields):
            value = fields[int(part)]
        else:
            return None
    return value


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_show, value))}]"
    return "none" if value is None else str(value)


def _describe_loss(grpo: Workload, unit: str) -> str:
    kl = f"KL loss {grpo['kl_loss_type']} × {grpo['kl_loss_coef']:g}" if grpo["use_kl_loss"] else "no KL loss"
    parts = [
        grpo.get("advantage_estimator", "grpo"),
        f"clip {grpo['eps_clip']:g} and {grpo['eps_clip_high']:g}",
        kl,
        f"temperature {grpo['rollout_temperature']:g}",
        f"{count(grpo['num_steps_per_rollout'], 'optimizer step')} a {unit}",
    ]
    return ", ".join(parts)


def _describe_layout(plan: Plan) -> str:
    layout = plan.layout
    sizes = {
        "TP": layout.tensor_parallel,
        "PP": layout.pipeline_parallel,
        "CP": layout.context_parallel,
        "EP": layout.expert_parallel,
    }
    where = f"{count(layout.gpus_per_node, 'GPU')} a node" if layout.gpus_per_node else "no GPU"
    shown = "".join(f", {name} {size}" for name, size in sizes.items() if size > 1 or name == "TP")
    return f"{count(layout.num_nodes, 'node')}, {where}{shown}"
