"""Hash the weights of vLLM's model, each under its name in the checkpoint: vime sends weights under these names.

vLLM fuses tensors of a checkpoint into larger parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from rlk_repro.integration.measure.engines import hash_tensor

FUSED: Final[Mapping[str, Sequence[str]]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
EXPERTS: Final[Mapping[str, Sequence[str]]] = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
RENAMES: Final = ("renamings", "regex", "substr", "prefix", "suffix")
PLAIN_METHODS: Final = frozenset(
    {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod", "NoneType"}
)
PLAIN_BACKENDS: Final = frozenset({"TRITON", "BATCHED_TRITON", ""})
"""vLLM's MoE backends that keep the weights in the checkpoint's order; other backends reorder them."""


class UnknownLayoutError(Exception):
    """vLLM keeps a parameter in an unknown layout, so its hash would have no meaning."""


def hash_weights(model: Any, dtype: str) -> dict[str, Any]:
    """Return ``tensors`` (name, hash in ``dtype``, shape) and ``shared``, which maps a tensor's second name to its
    first.

    Raises:
        UnknownLayoutError: a parameter is quantised, permuted or fused in an unknown way.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if any(getattr(mapper, f"orig_to_new_{part}", None) for part in RENAMES):
        raise UnknownLayoutError("vLLM renames the tensors of this model")
    tensors: list[list[Any]] = []
    shared: dict[str, str] = {}
    seen: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        pieces = list(_list_pieces(model, name, parameter.detach()))
        key = (parameter.data_ptr(), tuple(parameter.shape))
        if key in seen:
            shared.update(zip([piece for piece, _ in pieces], seen[key], strict=True))
            continue
        seen[key] = [piece for piece, _ in pieces]
        tensors += [[piece, hash_tensor(value.to(getattr(torch, dtype))), list(value.shape)] for piece, value in pieces]
    return {"tensors": tensors, "shared": shared}


def _list_pieces(model: Any, name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    path, _, kind = name.rpartition(".")
    owner, (parent, _, last) = model.get_submodule(path), path.rpartition(".")
    _check_layout(name, value, owner)
    if kind in EXPERTS:
        yield from _list_experts(name, value)
    elif last in (fused := {**FUSED, **getattr(model, "packed_modules_mapping", {})}):
        sizes, parts = list(getattr(owner, "output_sizes", ())), list(fused[last])
        if len(sizes) != len(parts) or sum(sizes) != len(value):
            raise UnknownLayoutError(f"{name} of vLLM has {len(value)} rows, its parts have {sizes}")
        for part, piece in zip(parts, torch.split(value, sizes), strict=True):
            yield f"{parent}.{part}.{kind}", piece
    elif hasattr(owner, "w13_weight"):
        raise UnknownLayoutError(f"{name} of vLLM is an unknown parameter of a layer with experts")
    else:
        # vLLM pads the rows of a vocabulary
        yield name, value[: getattr(owner, "org_vocab_size", None)] if value.dim() else value


def _list_experts(name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    path, _, kind = name.rpartition(".")
    path, parts = path.removesuffix(".routed_experts"), EXPERTS[kind]
    if value.dim() != 3 or value.shape[1] % len(parts):
        raise UnknownLayoutError(f"{name} of vLLM has the shape {tuple(value.shape)}")
    for number, expert in enumerate(value):
        for part, piece in zip(parts, expert.chunk(len(parts)), strict=True):
            yield f"{path}.{number}.{part}.weight", piece


def _check_layout(name: str, value: torch.Tensor, owner: Any) -> None:
    method = getattr(owner, "quant_method", None)
    backend = getattr(getattr(method, "unquantized_backend", None), "name", "")
    if type(method).__name__ not in PLAIN_METHODS or not value.is_floating_point() or value.itemsize < 2:
        raise UnknownLayoutError(f"{name} of vLLM is quantised: {type(method).__name__}, {value.dtype}")
    if backend not in PLAIN_BACKENDS:
        raise UnknownLayoutError(f"{name} of vLLM may be permuted for {backend}")
