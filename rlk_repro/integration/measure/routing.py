"""Record which experts a model's routers choose for selected tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from rlk_repro.integration.measure.engines import CallRows, list_points

logger = logging.getLogger(__name__)


class RouteCapture:
    """Keeps the experts of selected tokens, which `CallRows` locates, in each layer that has a router."""

    def __init__(self, calls: Sequence[Sequence[tuple[int, int]]], lengths: Sequence[int] = ()) -> None:
        self._rows, self._fault = CallRows(calls, lengths), ""
        self._kept: dict[str, list[list[list[int]]]] = {}

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for point, module in list_points(model) if self._rows.order else ():
                if point.endswith(" mlp"):
                    stack.callback(self._follow(point.removesuffix(" mlp"), module))
            yield

    @property
    def found(self) -> dict[str, list[list[int]]]:
        """Per layer (key ``layer 0``), each selected token's sorted expert ids; empty if the model has no routers."""
        tokens = {layer: [token for call in calls for token in call] for layer, calls in self._kept.items()}
        return {layer: [experts[place] for place in self._rows.order] for layer, experts in tokens.items()}

    def find_fault(self) -> str:
        counts, num_calls = {len(calls) for calls in self._kept.values()}, len(self._rows.rows)
        if not self._fault and counts - {num_calls}:
            return f"a router was called {min(counts)} times, not once for each of {num_calls} calls of the model"
        return self._fault

    def _follow(self, layer: str, mlp: Any) -> Callable[[], object]:
        module = getattr(mlp, "router", None)
        if isinstance(module, torch.nn.Module):
            self._kept[layer] = []
            return module.register_forward_hook(lambda _module, _given, output: self._keep(layer, output)).remove
        # vLLM calls a function with the chosen experts; vLLM's own routing replay may have set that function
        router: Any = getattr(getattr(mlp, "experts", None), "router", None)
        if not hasattr(router, "set_capture_fn"):
            return lambda: None
        self._kept[layer] = []
        earlier = router.capture_fn
        router.set_capture_fn(partial(self._keep_and_pass_on, layer, earlier))
        return partial(router.set_capture_fn, earlier)

    def _keep_and_pass_on(self, layer: str, earlier: Callable[[torch.Tensor], None] | None, ids: torch.Tensor) -> None:
        if earlier is not None:
            earlier(ids)
        self._keep(layer, ids)

    def _keep(self, layer: str, chosen: Any) -> None:
        calls = self._kept[layer]
        try:
            calls.append(self._read(len(calls), chosen))
        except Exception as error:
            # an error in a hook would end the training or vLLM's engine
            logger.warning("rlk-repro: the experts of a layer are not recorded", exc_info=True)
            self._fault = self._fault or f"the router of {layer} could not be read: {type(error).__name__}"

    def _read(self, call: int, output: Any) -> list[list[int]]:
        if call >= len(self._rows.rows):
            return []
        # Megatron-LM gives probabilities and a map [rows, experts]; vLLM gives the ids [rows, chosen experts]
        chosen: torch.Tensor = output[1] if isinstance(output, tuple) else output
        if fault := self._rows.find_fault(call, len(chosen), "a router"):
            self._fault = self._fault or fault
            return []
        picked = self._rows.pick(call, chosen.detach()).cpu()
        if picked.dtype == torch.bool:
            return [row.nonzero().flatten().tolist() for row in picked]
        return [sorted(row) for row in picked.tolist()]
