"""Extend vLLM's workers, through ``--vllm-worker-extension-cls``, to record layer outputs and to hash weights.

A request to vLLM's server at ``/collective_rpc`` calls a method of ``LayerWatch`` in each worker.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from rlk_repro.integration.measure.engines import LayerCapture, describe_points
from rlk_repro.integration.measure.routing import RouteCapture
from rlk_repro.integration.vllm_weights import UnknownLayoutError, hash_weights

logger = logging.getLogger(__name__)


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
