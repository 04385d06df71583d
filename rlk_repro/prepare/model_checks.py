"""Check that a model's folder is whole, and that it is the model that the run's arguments describe.

vime compares the configuration with the arguments too, but only when the first trial starts.  (vime's
``backends/megatron_utils/arguments.py``, function ``_hf_validate_args``.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.errors import BundleUnreadable, Problem, SpecError
from rlk_repro.spec.vime import VimeModel

CONFIGURATION: Final = "config.json"
_INDEX: Final = "*.safetensors.index.json"
# keys of a configuration, and the flag whose value they must have; vime compares those above the empty line
_FLAGS: Final = {
    "hidden_size": "hidden-size",
    "num_attention_heads": "num-attention-heads",
    "num_hidden_layers": "num-layers",
    "intermediate_size": "ffn-hidden-size",
    "moe_intermediate_size": "moe-ffn-hidden-size",
    "shared_expert_intermediate_size": "moe-shared-expert-intermediate-size",
    "rms_norm_eps": "norm-epsilon",
    "rope_theta": "rotary-base",

    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), "num-experts"),
    "num_experts_per_tok": "moe-router-topk",
    "num_key_value_heads": "num-query-groups",
    "head_dim": "kv-channels",
    "vocab_size": "vocab-size",
}  # fmt: skip
_DEFAULTS: Final[Mapping[str, float]] = {"rotary-base": 10_000, "norm-epsilon": 1e-5, "moe-router-topk": 2}
_FREE: Final = frozenset({"num-query-groups", "kv-channels", "vocab-size"})
"""Flags without which the trainer takes a value that follows from the model."""


def check_model(folder: Path, model: VimeModel, *, needs_template: bool) -> None:
    """Raise an error that names each absent shard and each value that differs; hashes are checked elsewhere.

    Raises:
        BundleUnreadable: the folder lacks files.
        SpecError: the configuration is that of another model.
    """
    broken = [*_find_broken(folder)]
    if broken:
        raise BundleUnreadable(*broken)
    config = _load(folder / CONFIGURATION)
    text = config.get("text_config")
    problems = [*_find_differences(text if isinstance(text, dict) else config, model)]
    if needs_template and not _may_have_template(folder):
        expected = "a model for chats, or workload.data.apply_chat_template: false"
        problems.append(Problem("chat template", "missing, but the run applies one", expected=expected))
    if problems:
        raise SpecError(*problems)


def _load(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BundleUnreadable(Problem(path.name, f"cannot be read ({error})")) from None
    if not isinstance(value, dict):
        raise BundleUnreadable(Problem(path.name, "is no JSON object"))
    return value


def _may_have_template(folder: Path) -> bool:
    tokenizer = folder / "tokenizer_config.json"
    has_file = (folder / "chat_template.jinja").is_file() or not tokenizer.is_file()
    return has_file or bool(_load(tokenizer).get("chat_template"))


def _find_broken(folder: Path) -> Iterator[Problem]:
    there = sorted(path.name for path in folder.glob("*.safetensors"))
    if not there:
        yield Problem("weights", "missing", expected="files *.safetensors")
    named: dict[str, str] = {}
    for index in sorted(folder.glob(_INDEX)):
        shards = _load(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            yield Problem(index.name, "names no shards", expected="weight_map: a shard for each tensor")
            continue
        named |= dict.fromkeys(map(str, shards.values()), index.name)
    for name in sorted(named.keys() - {*there}):
        yield Problem(name, f"missing, but {named[name]} names it", hint="fetch the whole model, and prepare again")


def _find_differences(config: Mapping[str, Any], model: VimeModel) -> Iterator[Problem]:
    arguments, rope = model.arguments, config.get("rope_parameters")
    found_all = dict(config)
    if isinstance(rope, dict) and "rope_theta" in rope:
        found_all |= rope
    told = {flag: (key, found_all[key]) for key, flag in _FLAGS.items() if found_all.get(key)}
    if not _has_dense_layers(told, arguments):
        told.pop("ffn-hidden-size", None)
    if model.num_experts and "num-experts" not in told:
        told["num-experts"] = ("num_experts", None)
    for flag, (key, found) in told.items():
        given = arguments.get(flag, _DEFAULTS.get(flag))
        if _as_number(found) != _as_number(given) and not (given is None and flag in _FREE):
            yield Problem(f"{CONFIGURATION}: {key}", f"differs from the run's {flag}: it is another model", got=found,
                          expected="none" if given is None else str(given))  # fmt: skip
    tied, untied = config.get("tie_word_embeddings"), bool(arguments.get("untie-embeddings-and-output-weights"))
    if tied is not None and tied == untied:
        what = "differs from the run's untie-embeddings-and-output-weights"
        yield Problem(f"{CONFIGURATION}: tie_word_embeddings", what, got=tied, expected=str(not untied).lower())


def _has_dense_layers(told: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Whether some layer has no experts; ``[0]*1+[1]*45`` begins with one such layer."""
    frequency = arguments.get("moe-layer-freq")
    has_experts = "num-experts" in told or "moe-ffn-hidden-size" in told
    return not has_experts or frequency is None or re.search(r"(?<!\d)0(?!\d)", str(frequency)) is not None


def _as_number(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError):
        return value
