"""Find the code that a vime run names: Python functions, flags that lead to code, and a model's own code.

Code is foreign if neither this package nor a source that the stack pins holds it.  A replay runs foreign code only if
its user trusts it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

from rlk_repro.base.errors import SpecError
from rlk_repro.base.resources import list_names, run_folders
from rlk_repro.division import vime_of
from rlk_repro.plan import Plan
from rlk_repro.rundir.differences import split_arguments
from rlk_repro.spec import HubSource, VimeWorkload
from rlk_repro.spec.layers import is_layer_pattern
from rlk_repro.spec.load import load_run
from rlk_repro.spec.values import BASELINE, ENABLED
from rlk_repro.spec.vime import LAYER_PATTERN
from rlk_repro.workloads.api import Brought, Code
from rlk_repro.workloads.arguments import spell_flags
from rlk_repro.workloads.vime.contract import Contract, load_contract

KNOWN_PACKAGES: Final = frozenset({"rlk_repro", "vime", "vime_plugins", "megatron"})
CODE_SWITCHES: Final = frozenset(
    {"--trust-remote-code", "--vllm-trust-request-chat-template"}
    | {"--run-workload-inspector-server", "--langrl-external-server"}
)
"""Flags without a value; with such a flag, files outside the plan decide which code runs."""
_WORD: Final = r"[a-z0-9_+-]{1,40}"
_SIZE: Final = r"\d{1,15}(\.\d{1,9})?[kKmMgGtT]?"
PLAIN_TEXTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("--cp-comm-type", "--offload-modules", "--recompute-modules"), _WORD),
    "--vllm-attention-backend": r"[A-Z0-9_]{1,40}",
    "--vllm-optimization-level": "O?[0-3]",
    "--vllm-quantization": _WORD,
    **dict.fromkeys(("--vllm-max-model-len", "--vllm-max-num-batched-tokens"), _SIZE),
    "--vllm-kv-cache-memory-bytes": _SIZE,
}
"""Flags whose value is a plain word or size, never code or a file, each with a pattern for its values."""
LAYER_PATTERNS: Final = frozenset(
    {f"--{LAYER_PATTERN}", "--linear-attention-freq", "--no-rope-freq", "--window-attn-skip-freq"}
)
"""Megatron-LM evaluates these values as Python, so each must be a pattern of the model's layers."""
_FUNCTIONS: Final = re.compile(
    r"--(custom-(?!config).*-path|.*-(filter|process|postprocess|function)-path|data-source-path|spec)"
)
"""Flags whose value names what vime or Megatron-LM imports: a path, or a module with a function."""
_DOTTED: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def find_brought(plan: Plan) -> Brought:
    workload = vime_of(plan)
    env = workload.placements[plan.hardware.hardware].env
    code = (*_find_model_code(workload), *_list_flags(plan))
    return Brought(sources=dict(_list_sources(workload, plan.run.lane)), env=env, code=code)


def _list_sources(workload: VimeWorkload, lane: str) -> Iterator[tuple[str, str]]:
    model, data = workload.model.source, workload.data.source
    yield "model", describe_source(model.model_dump(mode="json"), "weights")
    yield "data", describe_source(data.model_dump(mode="json"), "prompts")
    if lane != "live":
        stored, seed = workload.rollouts, workload.rollouts_seed
        own = "made by the run itself" if seed is None else f"random tokens of seed {seed}"
        yield "rollouts", own if stored is None else f"{stored.name}, {stored.digest}"


def describe_source(source: Mapping[str, Any], what: str) -> str:
    if source["kind"] == "package":
        return f"{source['file']} of the package {source['name']} {source['version']}"
    if source["kind"] != "hub":
        return f"{what} made by this tool, seed {source['seed']}"
    revision = source["revision"]
    file = f", {source['file']}" if "file" in source else ""
    return f"{source['repository']}{file} at {revision[:12] if revision else 'no pinned revision'}"


def _find_model_code(workload: VimeWorkload) -> Iterator[Code]:
    """vime may run a model's own Python files when it loads the model."""
    source = workload.model.source
    if isinstance(source, HubSource):
        value = f"{source.repository} at {source.revision or 'any commit'}"
        yield Code(where="model", value=value, is_known=source in _list_shipped_models())


@cache
def _list_shipped_models() -> frozenset[HubSource]:
    runs = (load_run(name).model for name in list_names(run_folders()))
    found = (run.workload.model.source for run in runs if isinstance(run.workload, VimeWorkload))
    return frozenset(source for source in found if isinstance(source, HubSource))


def _list_flags(plan: Plan) -> Iterator[Code]:
    """As in vime, a value that begins with two dashes counts as a flag."""
    data, num_layers = vime_of(plan).data, vime_of(plan).model.size("num-layers")
    words = spell_written(plan)
    if data.custom_rm_path is not None:
        words += ["--custom-rm-path", data.custom_rm_path]
    switch = plan.run.switch
    if switch is not None:
        for flags in map(switch.flags_of, (BASELINE, ENABLED)):
            words += spell_flags({flag: value for flag, value in flags.items() if value is not False})
    contract = _find_contract(plan)
    for flag, values in split_arguments(words):
        if contract is None or not _is_data(contract, flag, values, num_layers):
            yield Code(where=flag, value=" ".join(values), is_known=_is_known(flag, values))


def spell_written(plan: Plan) -> list[str]:
    """Return the flags that the run's author wrote for the model and for this hardware."""
    workload = vime_of(plan)
    return spell_flags({**workload.model.arguments, **workload.arguments_on(plan.hardware.hardware)})


def _find_contract(plan: Plan) -> Contract | None:
    try:
        return load_contract(plan.stack.pins["vime"].commit)
    except (KeyError, SpecError):  # ``find_problems`` refuses the plan if the flags of its vime commit are unknown
        return None


def _is_data(contract: Contract, flag: str, values: Sequence[str], num_layers: int) -> bool:
    """Decide by the flag, never by the look of its value: ``1`` is a file's name, and an address is only digits."""
    definitions = contract.by_flag.get(flag, ())
    if not definitions or flag in CODE_SWITCHES:
        return False
    if flag in LAYER_PATTERNS:
        return all(is_layer_pattern(value, num_layers) for value in values)
    if flag in PLAIN_TEXTS:
        return all(re.fullmatch(PLAIN_TEXTS[flag], value) for value in values)
    return all(
        item.choices is not None or item.kind in {"int", "float", "bool"} or not item.takes_value
        for item in definitions
    )  # fmt: skip


def _is_known(flag: str, values: Sequence[str]) -> bool:
    dotted = [value for value in values if not value.isidentifier()]
    are_known = all(_DOTTED.fullmatch(value) and value.partition(".")[0] in KNOWN_PACKAGES for value in dotted)
    return bool(dotted) and are_known and _FUNCTIONS.fullmatch(flag) is not None
