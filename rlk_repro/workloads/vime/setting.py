"""Describe what distinguishes one run of vime from another for a reader of its report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlk_repro.base.units import count, format_count


def describe(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what distinguishes this run from another, from the plan's record of the workload."""
    model, data, grpo = settings["model"], settings["data"], settings["grpo"]
    yield "model", f"{model['title']}: {_describe_source(model['source'], 'weights')}"
    reward = data["rm_type"] or data["custom_rm_path"]
    yield "data", f"{_describe_source(data['source'], 'prompts')}; reward {reward}"
    replayed = ", expert routing replayed (R3)" if grpo["use_rollout_routing_replay"] else ""
    yield (
        "rollouts",
        f"{format_count(grpo['rollout_batch_size'])} prompts × {grpo['n_samples_per_prompt']} samples, at most "
        f"{count(grpo['rollout_max_response_len'], 'token')} long{replayed}",
    )
    if settings["what_for"] != "timing":
        yield "meant for", settings["what_for"]


def _describe_source(source: Mapping[str, Any], what: str) -> str:
    if source["kind"] != "hub":
        return f"{what} made by this tool, seed {source['seed']}"
    revision = source["revision"]
    file = f", {source['file']}" if "file" in source else ""
    return f"{source['repository']}{file} at {revision[:12] if revision else 'no pinned revision'}"
