"""Compare the weights that vime sends to vLLM with the weights that vLLM has after the sync, by hashes of all tensors.

Both sides convert a tensor to the training's data type before they hash it.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlk_repro.integration.measure.engines import MAX_STEPS, EngineRecord, hash_tensor
from rlk_repro.integration.vime_rollout import RolloutServer, describe_failure, find_dtype
from rlk_repro.rundir.agreement import AS_RUN, ROLLOUT, TRAINING

logger = logging.getLogger(__name__)


class WeightSync:
    """Wraps methods of vime's updaters, and keeps the hashes of the last sync until the next step writes them."""

    def __init__(self, server: RolloutServer) -> None:
        self._server, self._numbers = server, itertools.count()
        self._dtype = torch.bfloat16
        self._forget("the trainer sent no weights before this step")

    def follow_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(update)
        def update_and_ask(updater: Any, *rest: Any, **named: Any) -> Any:
            self._forget("")
            self._guard(self._begin, updater)
            result = update(updater, *rest, **named)
            self._guard(self._finish)
            return result

        return update_and_ask

    def follow_send(self, send: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(send)
        def hash_and_send(updater: Any, tensors: Any, *rest: Any, **named: Any) -> Any:
            self._guard(self._hash, tensors)
            return send(updater, tensors, *rest, **named)

        return hash_and_send

    def write(self, record: EngineRecord, step: int) -> None:
        if self._found:
            # vLLM lists tensors in the order of layers, so the first unequal tensor is in the earliest unequal layer
            record.write_hashes(step, ROLLOUT, self._found, self._note)
        else:
            record.skip(step, "weights", ROLLOUT, AS_RUN, self._reason)
        if self._sent:
            record.write_hashes(step, TRAINING, [(name, digest) for name, (digest, _) in self._sent.items()])
        self._forget("the trainer sent no weights between this step and the step before")

    def _forget(self, reason: str) -> None:
        self._sent: dict[str, tuple[str, list[int]]] = {}
        self._found: list[tuple[str, str]] = []
        self._note, self._reason = "", reason

    def _guard(self, act: Callable[..., None], *given: Any) -> None:
        if self._reason:
            return
        try:
            act(*given)
        except Exception as error:
            is_answer = isinstance(error, OSError)
            self._reason = describe_failure(error) if is_answer else f"the comparison failed: {type(error).__name__}"
            logger.warning("rlk-repro: the weights after the sync are not compared", exc_info=True)

    def _begin(self, updater: Any) -> None:
        args = updater.args
        self._dtype = getattr(torch, find_dtype(args))
        refusals = {
            f"only the weights of the first {MAX_STEPS} steps are recorded": next(self._numbers) >= MAX_STEPS,
            "only the training's first process hashes weights": bool(args.rank),
            "each pipeline rank has only its own layers": args.pipeline_model_parallel_size > 1,
            "vime sends quantised weights": bool(updater.quantization_config),
            "vime also sends layers for multi-token prediction": bool(getattr(args, "mtp_num_layers", None)),
        }
        self._reason = next((reason for reason, applies in refusals.items() if applies), "")

    def _hash(self, tensors: Any) -> None:
        if not isinstance(tensors, Sequence):
            # an iterator that is read here would have no tensors left for vime
            self._reason = f"vime sends its tensors as {type(tensors).__name__}, expected a list"
            return
        for name, tensor in tensors:
            self._sent[name] = (hash_tensor(tensor.detach().to(self._dtype)), list(tensor.shape))

    def _finish(self) -> None:
        if not self._sent:
            self._reason = "vime sent no tensors by the methods that rlk-repro wraps"
            return
        answer = self._server.hash_weights(str(self._dtype).removeprefix("torch."))
        self._reason = answer.get("reason", "") or self._find_other_shape(answer["tensors"])
        if self._reason:
            return
        found = {name: digest for name, digest, _ in answer["tensors"]}
        # in vLLM a tied output layer is one parameter with two names; vime sends both only if vime has two tensors
        found |= {name: found[first] for name, first in answer["shared"].items() if name in self._sent}
        tied = [f"{name} is {first}" for name, first in answer["shared"].items() if name not in found]
        more = f", other tensors that vLLM keeps under two names: {len(tied) - 1}" if len(tied) > 1 else ""
        self._found, self._note = list(found.items()), f"{tied[0]}{more}"[:200] if tied else ""

    def _find_other_shape(self, tensors: Sequence[tuple[str, str, list[int]]]) -> str:
        for name, _, shape in tensors:
            if name in self._sent and self._sent[name][1] != list(shape):
                return f"vLLM keeps {name} in the shape {list(shape)}, but vime sends {self._sent[name][1]}"[:200]
        return ""
