"""What a plan asked for, in the few lines that tell one run from another: what flags changed, workload, loss, layout.

Also what of the enabled variant's work is rlk-repro's own and not RL-Kernel's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from rlk_repro.operators import Platform
from rlk_repro.plan import Plan
from rlk_repro.report.labels import format_count

Workload = Mapping[str, Any]
Facts = Iterator[tuple[str, str]]

AS_WRITTEN: Final = "none: all as the run definition has it"
MOMENTS: Final = "rlk-repro's own pass over the logits (torch.compile on a GPU, rlk_repro/integration/route/moments.py)"
OWN_ENTROPY: Final = (
    "Not all that enabled gains is RL-Kernel's: the entropy metric, and the normaliser of the log-probs beside it, "
    f"come from {MOMENTS}, since RL-Kernel has no such operator. The same run with --set entropy_metric=false compares "
    "RL-Kernel alone."
)
OWN_NORMALISER: Final = (
    f"Not all that enabled gains is RL-Kernel's: the normaliser of differentiated log-probs comes from {MOMENTS}."
)
_WITH_OWN_PASS: Final = frozenset({"ratio_kl", "vocab_parallel_logp"})


def describe_setting(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Name and value of what a reader needs to tell this run from another of the same name."""
    workload = plan.experiment["run"]["workload"]
    describe = _WORKLOADS.get(workload["kind"], _describe_nothing)
    facts = [("run", plan.run.run), ("overrides", ", ".join(_list_changes(plan)) or AS_WRITTEN)]
    facts += describe(MappingProxyType(workload))
    if plan.run.workload.has_variants:
        facts += (
            [("loss", _describe_loss(workload["grpo"], "step" if workload["kind"] == "module" else "rollout"))]
            if workload.get("grpo")
            else []
        )
        where = "computed" if plan.run.entropy_metric else "left out"
        facts.append(("entropy metric", f"{where}, in both variants"))
    return (*facts, ("layout", _describe_layout(plan)))


def find_own_work(plan: Plan) -> tuple[str, ...]:
    """What must be said where the enabled variant is faster by more than RL-Kernel."""
    if not plan.has_enabled or _WITH_OWN_PASS.isdisjoint(plan.ops):
        return ()
    if plan.run.entropy_metric:
        return (OWN_ENTROPY,)
    is_without_logp = plan.hardware.platform == Platform.ROCM.value and "ratio_kl" in plan.ops
    return (OWN_NORMALISER,) if is_without_logp else ()


def _list_changes(plan: Plan) -> Iterator[str]:
    """``entropy_metric = false (--set)``, by the path that the flag changed."""
    run = plan.experiment["run"]
    for path, source in sorted(plan.sources.items()):
        if source.startswith("--"):
            yield f"{path} = {_show(_find(run, path))} ({source.split()[0]})"


def _find(value: Any, path: str) -> Any:
    for part in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(_show, value))}]"
    return "none" if value is None else str(value)


def _describe_module(workload: Workload) -> Facts:
    batch = workload["batch"]
    yield (
        "batches",
        f"random: {format_count(batch['num_tokens'])} packed tokens of {batch['num_samples']} samples a microbatch, "
        f"fp32 logits, vocabulary {format_count(batch['vocab_size'])} ({workload['model']}); "
        f"{_count(batch['num_microbatches'], 'microbatch', 'microbatches')} an optimizer step",
    )
    lead_ms = workload["lead_ms"]
    lead = f"kept busy for {lead_ms:g} ms before each pass" if lead_ms else "idle before each pass"
    yield "device", f"{lead}, in both variants"


def _describe_reference(workload: Workload) -> Facts:
    model, grpo = workload["model"], workload["grpo"]
    yield (
        "model",
        f"reference trainer: {_count(model['num_layers'], 'layer')}, hidden {format_count(model['hidden_size'])}, "
        f"vocabulary {format_count(model['vocab_size'])}, {model['dtype']}",
    )
    yield (
        "rollouts",
        f"{format_count(grpo['rollout_batch_size'])} prompts × {grpo['n_samples_per_prompt']} samples, at most "
        f"{_count(grpo['rollout_max_response_len'], 'token')} long",
    )


def _describe_operators(workload: Workload) -> Facts:
    names = dict.fromkeys(grid["operator"] for grid in workload["grids"])
    calls = f"{workload['timed_calls']} timed calls after {workload['warmup_calls']}, per cell and sweep"
    chosen = ", ".join(workload["implementations"]) or "all implementations that serve them"
    yield "operators", f"{', '.join(names)}; {chosen}; {calls}"


def _describe_vime(workload: Workload) -> Facts:
    model, data, grpo = workload["model"], workload["data"], workload["grpo"]
    yield "model", f"{model['title']}: {_describe_source(model['source'], 'weights')}"
    reward = data["rm_type"] or data["custom_rm_path"]
    yield "data", f"{_describe_source(data['source'], 'prompts')}; reward {reward}"
    replayed = ", expert routing replayed (R3)" if grpo["use_rollout_routing_replay"] else ""
    yield (
        "rollouts",
        f"{format_count(grpo['rollout_batch_size'])} prompts × {grpo['n_samples_per_prompt']} samples, at most "
        f"{_count(grpo['rollout_max_response_len'], 'token')} long{replayed}",
    )
    if workload["what_for"] != "timing":
        yield "meant for", workload["what_for"]


def _describe_source(source: Workload, what: str) -> str:
    if source["kind"] != "hub":
        return f"{what} made by this tool, seed {source['seed']}"
    revision = source["revision"]
    file = f", {source['file']}" if "file" in source else ""
    return f"{source['repository']}{file} at {revision[:12] if revision else 'no pinned revision'}"


def _describe_nothing(_: Workload) -> Facts:
    yield from ()


_WORKLOADS: Final[Mapping[str, Callable[[Workload], Facts]]] = {
    "module": _describe_module,
    "reference": _describe_reference,
    "operators": _describe_operators,
    "vime": _describe_vime,
}


def _describe_loss(grpo: Workload, unit: str) -> str:
    kl = f"KL loss {grpo['kl_loss_type']} × {grpo['kl_loss_coef']:g}" if grpo["use_kl_loss"] else "no KL loss"
    parts = [
        grpo.get("advantage_estimator", "grpo"),
        f"clip {grpo['eps_clip']:g} and {grpo['eps_clip_high']:g}",
        kl,
        f"temperature {grpo['rollout_temperature']:g}",
        f"{_count(grpo['num_steps_per_rollout'], 'optimizer step')} a {unit}",
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
    where = f"{_count(layout.gpus_per_node, 'GPU')} a node" if layout.gpus_per_node else "no GPU"
    shown = "".join(f", {name} {size}" for name, size in sizes.items() if size > 1 or name == "TP")
    return f"{_count(layout.num_nodes, 'node')}, {where}{shown}"


def _count(number: int, noun: str, nouns: str = "") -> str:
    return f"{format_count(number)} {noun if number == 1 else nouns or noun + 's'}"
