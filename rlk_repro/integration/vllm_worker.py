"""Watch the layers of vLLM's model by an extension of vLLM's workers, which ``--vllm-worker-extension-cls`` names.

vLLM adds the methods of ``LayerWatch`` to its workers.  Its server calls them by ``/collective_rpc``.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

from rlk_repro.integration.measure.engines import LayerCapture, describe_points


class LayerWatch:
    """Keeps the outputs of vLLM's layers; the prefix of the names separates them from vLLM's own."""

    get_model: Any

    def rlk_repro_watch(self, calls: str) -> None:
        """Keep the layer outputs of chosen tokens; ``calls`` is a JSON list for `LayerCapture`."""
        self.rlk_repro_capture, self.rlk_repro_hooks = LayerCapture(json.loads(calls)), ExitStack()
        self.rlk_repro_hooks.enter_context(self.rlk_repro_capture.watching(self.get_model()))

    def rlk_repro_found(self) -> dict[str, Any]:
        """Stop keeping outputs, and return those of each point as plain numbers."""
        self.rlk_repro_hooks.close()
        points = describe_points(self.rlk_repro_capture.found)
        # vLLM computes logits outside the model's forward, which returns hidden states
        points.pop("logits", None)
        return points
