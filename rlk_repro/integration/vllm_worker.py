"""Extend vLLM's workers, through ``--vllm-worker-extension-cls``, to record layer outputs and to hash weights.

A request to vLLM's server at ``/collective_rpc`` calls a method of ``LayerWatch`` in each worker.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import torch

from rlk_repro.integration.measure.engines import LayerCapture, describe_points, hash_tensor
from rlk_repro.integration.measure.routing import RouteCapture

logger = logging.getLogger(__name__)

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


class LayerWatch:
    """Keeps the outputs of vLLM's layers; its attributes have a prefix because they are added to vLLM's worker."""

    get_model: Any
    parallel_config: Any
    rlk_repro_capture: LayerCapture | None = None
    rlk_repro_routes: RouteCapture | None = None
    rlk_repro_hooks: ExitStack | None = None

    def rlk_repro_watch(self, wanted: str) -> None:
        """Keep the layer outputs of chosen tokens; ``wanted`` is JSON: ``calls`` and ``lengths`` for `CallRows`."""
        self.rlk_repro_close()
        given, model = json.loads(wanted), self.get_model()
        self.rlk_repro_capture, self.rlk_repro_routes = LayerCapture(**given), RouteCapture(**given)
        self.rlk_repro_hooks = ExitStack()
        self.rlk_repro_hooks.enter_context(self.rlk_repro_capture.watching(model))
        self.rlk_repro_hooks.enter_context(self.rlk_repro_routes.watching(model))

    def rlk_repro_found(self) -> dict[str, Any]:
        """Stop recording, and return the layer outputs (``points``) and the chosen experts (``routing``), or the
        ``reason`` why neither could be recorded; ``routing_reason`` says why only the experts could not be recorded.
        """
        self.rlk_repro_close()
        capture, self.rlk_repro_capture = self.rlk_repro_capture, None
        if capture is None:
            return {"reason": "vLLM's worker kept no layer outputs"}
        if fault := capture.find_fault():
            return {"reason": fault}
        points = describe_points(capture.found)
        # vLLM computes logits outside the model's forward, which returns hidden states
        points.pop("logits", None)
        routing = {} if self.rlk_repro_routes is None else _describe_routes(self.rlk_repro_routes)
        return {"points": {point: _hide_infinite(**numbers) for point, numbers in points.items()}, **routing}

    def rlk_repro_weights(self, dtype: str) -> dict[str, Any]:
        """Return hashes of all weights after their conversion to ``dtype``, or the ``reason`` why they are missing."""
        num_workers = self.parallel_config.world_size_across_dp
        if num_workers > 1:
            return {"reason": f"each of the {num_workers} workers of vLLM has a part of the weights"}
        try:
            return hash_weights(self.get_model(), dtype)
        except UnknownLayoutError as error:
            return {"reason": str(error)[:200]}
        except Exception as error:
            # an error in a worker may end vLLM's engine
            logger.warning("rlk-repro: the weights of vLLM are not hashed", exc_info=True)
            return {"reason": f"vLLM's worker could not hash its weights: {type(error).__name__}"}

    def rlk_repro_close(self) -> None:
        if self.rlk_repro_hooks is not None:
            self.rlk_repro_hooks.close()


def _describe_routes(routes: RouteCapture) -> dict[str, Any]:
    if fault := routes.find_fault():
        return {"routing_reason": fault}
    return {"routing": routes.found} if routes.found else {}


def _hide_infinite(values: Iterable[Iterable[float]], norms: Iterable[float]) -> dict[str, Any]:
    """Replace numbers that are not finite by None, because vLLM's server cannot send them."""
    return {"values": [_list_finite(row) for row in values], "norms": _list_finite(norms)}


def _list_finite(row: Iterable[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in row]


class UnknownLayoutError(Exception):
    """vLLM keeps a parameter in an unknown layout, so its hash would have no meaning."""


def hash_weights(model: Any, dtype: str) -> dict[str, Any]:
    """Return ``tensors`` (name, hash in ``dtype``, shape) and ``shared``, which maps a tensor's second name to its
    first.

    Names are those of the checkpoint, under which vime sends weights; vLLM fuses tensors into larger parameters.

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
