"""Record what vime's engines compute for the same tokens, in the pass without gradient before a rollout's training.

An engine is one implementation of the model.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from rlk_repro.integration.measure.engines import (
    LAYER_CASES,
    MAX_SAMPLES,
    MAX_STEPS,
    EngineRecord,
    LayerCapture,
    choose_tokens,
    locate_tokens,
)
from rlk_repro.integration.measure.routing import RouteCapture
from rlk_repro.integration.vime_rollout import RolloutServer, describe_failure, find_dtype
from rlk_repro.integration.vime_weights import WeightSync
from rlk_repro.rundir.agreement import ALONE, AS_RUN, GENERATED, PREFIX_CACHE, PROMPTS, REFERENCE, ROLLOUT, TRAINING

logger = logging.getLogger(__name__)

LACKING: Final = (
    ("log_probs", REFERENCE, AS_RUN, "no float32 copy of the model is made"),
    ("log_probs", TRAINING, "recomputed", "a pass without gradient recomputes nothing"),
    ("log_probs", TRAINING, "tensor parallel 2", "one parallel layout per run; compare bundles with rlk-repro diff"),
)
OWN: Final = "own routing"
STAGE: Final = "ROUTING_REPLAY_STAGE"
"""The variable by which vime tells its routers to record or to replay experts; ``fallthrough`` does neither."""

Pass = Callable[..., dict[str, list[torch.Tensor]]]


class VimeEngines:
    """Wraps functions of vime's actor, and records each rollout once: in the pass with the policy's weights."""

    def __init__(self, record: EngineRecord) -> None:
        self._record, self.server = record, RolloutServer()
        self.weights = WeightSync(self.server)
        self._numbers = itertools.count()
        self._rollout: tuple[int, Mapping[str, Any], Sequence[torch.Tensor] | None] | None = None

    def follow_begin(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(begin)
        def note_and_begin(rollout_data: Mapping[str, Any], *rest: Any) -> Any:
            number = next(self._numbers)
            # vime removes the rollout's experts from its data before the first pass
            experts = rollout_data.get("rollout_routed_experts")
            self._rollout = (number, rollout_data, experts) if number < MAX_STEPS else None
            return begin(rollout_data, *rest)

        return note_and_begin

    def follow_pass(self, forward_only: Pass) -> Pass:
        @functools.wraps(forward_only)
        def compute_and_record(
            f: Any, args: Namespace, model: Any, data_iterator: Any, num_microbatches: Any, store_prefix: str = "",
            use_rollout_top_p_replay: bool = False,
        ) -> dict[str, list[torch.Tensor]]:  # fmt: skip
            more = {"store_prefix": store_prefix, "use_rollout_top_p_replay": use_rollout_top_p_replay}
            compute = functools.partial(forward_only, f, **more)
            if store_prefix or self._rollout is None:
                return compute(args, model, data_iterator, num_microbatches)
            (number, data, experts), self._rollout = self._rollout, None
            self.weights.write(self._record, number)
            step = _Step(self._record, self.server, args, model, number, data, experts)
            return step.record(compute, data_iterator, num_microbatches)

        return compute_and_record


class _Step:
    """Layers are recorded for the first rollout only."""

    def __init__(
        self, record: EngineRecord, server: RolloutServer, args: Namespace, model: Any, number: int,
        data: Mapping[str, Any], experts: Sequence[torch.Tensor] | None,
    ) -> None:  # fmt: skip
        self._record, self._server, self._experts = record, server, experts
        self._args, self._model, self._number, self._data = args, model, number, data
        self._dtype = find_dtype(args)
        self._size = min(MAX_SAMPLES, len(data["tokens"]))
        lengths = list(zip(data["total_lengths"], data["response_lengths"], strict=True))[: self._size]
        self._chosen = [] if number or args.sequence_parallel else choose_tokens(lengths)
        self._has_experts = bool(getattr(args, "num_experts", None)) and not number
        self._is_replayed = bool(getattr(args, "use_rollout_routing_replay", False))

    def record(
        self, compute: Pass, iterators: Sequence[Any], num_microbatches: Sequence[int]
    ) -> dict[str, list[torch.Tensor]]:
        if self._args.context_parallel_size > 1 or self._args.pipeline_model_parallel_size > 1:
            self._record.skip(self._number, "log_probs", TRAINING, AS_RUN, "a rank lacks some tokens or some layers")
            return compute(self._args, self._model, iterators, num_microbatches)
        packed: dict[int, dict[str, Any]] = {}
        result = self._pass(AS_RUN, compute, self._args, iterators, num_microbatches, packed)
        data, size = self._data, self._size
        tokens = [list(map(int, ids)) for ids in data["tokens"][:size]]
        masks = zip(tokens, data["loss_masks"][:size], strict=True)
        rollout = [{"tokens": ids, "loss_mask": list(map(int, mask)), "padding": 0} for ids, mask in masks]
        self._record.write_inputs(self._number, ROLLOUT, rollout)
        self._record.write_inputs(self._number, TRAINING, [packed[index] for index in sorted(packed)])
        if data.get("rollout_log_probs"):
            self._record.write_log_probs(
                self._number, GENERATED, AS_RUN, self._dtype, data["rollout_log_probs"][: self._size]
            )
        if self._has_experts:
            self._record_generated_routing()
        self._record_prompts(list(zip(tokens, data["response_lengths"], strict=False)))
        try:
            self._record_cases(compute, iterators, num_microbatches)
        except Exception as error:
            logger.warning("rlk-repro: cannot record training passes over differently packed samples", exc_info=True)
            reason = f"a pass over differently packed samples failed: {type(error).__name__}"
            self._record.skip(self._number, "log_probs", TRAINING, "other packings", reason)
        for what, engine, case, reason in LACKING:
            self._record.skip(self._number, what, engine, case, reason)
        return result

    def _record_prompts(self, samples: Sequence[tuple[list[int], int]]) -> None:
        alone = [[index] for index in range(self._size)]
        chosen = locate_tokens(self._chosen, alone, self._data["total_lengths"])
        ask = functools.partial(self._server.record, chosen=chosen)
        self._ask(ask, samples, PROMPTS, AS_RUN)
        self._ask(self._server.record_prefixes, samples, GENERATED, PREFIX_CACHE)

    def _ask(self, ask: Callable[..., None], samples: Sequence[Any], engine: str, case: str) -> None:
        reason = self._server.find_refusal(self._args)
        try:
            if not reason:
                ask(self._record, self._number, self._dtype, samples)
        except Exception as error:
            reason = describe_failure(error)
            logger.warning("rlk-repro: no record of the log-probs of engine %s, case %s", engine, case, exc_info=True)
        if reason:
            self._record.skip(self._number, "log_probs", engine, case, reason)
        if reason and engine == PROMPTS and self._has_experts:
            self._record.skip(self._number, "routing", engine, case, reason)

    def _record_generated_routing(self) -> None:
        reason = "vLLM returns the experts chosen in generation only with routing replay (R3)"
        if self._args.sequence_parallel:
            reason = "with sequence parallelism a rank has only a part of the tokens"
        elif self._experts is not None:
            try:
                # vime stores each sample's experts as [rows, layers, experts of a token]
                rows = [torch.as_tensor(self._experts[sample])[row].tolist() for sample, row in self._chosen]
                layers = enumerate(zip(*rows, strict=True))
                experts = {f"layer {number}": list(map(sorted, tokens)) for number, tokens in layers}
                self._record.write_routing(self._number, GENERATED, AS_RUN, self._dtype, self._chosen, experts)
                return
            except Exception as error:
                logger.warning("rlk-repro: the rollout's experts are not recorded", exc_info=True)
                reason = f"the rollout's experts could not be read: {type(error).__name__}"
        self._record.skip(self._number, "routing", GENERATED, AS_RUN, reason)

    def _record_cases(self, compute: Pass, iterators: Sequence[Any], num_microbatches: Sequence[int]) -> None:
        make_iterator = type(iterators[0])
        if getattr(self._args, "expert_model_parallel_size", 1) > 1:
            # ranks that exchange tokens must all run the same number of passes
            self._record.skip(self._number, "log_probs", TRAINING, ALONE, "expert parallel ranks exchange tokens")
            return
        if self._is_replayed:
            self._record.skip(self._number, "log_probs", TRAINING, ALONE, "the training replays the rollout's experts")
            if self._chosen:
                again = [make_iterator(self._data, one.micro_batch_indices) for one in iterators]
                self._pass(OWN, compute, self._args, again, num_microbatches, {})
            return
        samples, padding = list(range(self._size)), self._args.data_pad_size_multiplier
        alone = [[index] for index in samples]
        cases = {
            ALONE: (alone, padding),
            "padded": (alone, 2 * padding),
            "reordered": ([samples[at : at + 2][::-1] for at in range(0, self._size, 2)], padding),
        }
        for case, (indices, multiplier) in cases.items():
            # with a dynamic batch size vime returns results in the order of the samples
            args = Namespace(
                **vars(self._args) | {"use_dynamic_batch_size": True, "data_pad_size_multiplier": multiplier}
            )
            others = [make_iterator(self._data, indices) for _ in iterators]
            self._pass(case, compute, args, others, [len(indices)], {})

    def _pass(
        self, case: str, compute: Pass, args: Namespace, iterators: Sequence[Any], num_microbatches: Sequence[int],
        packed: dict[int, dict[str, Any]],
    ) -> dict[str, list[torch.Tensor]]:  # fmt: skip
        calls = iterators[0].micro_batch_indices
        core = self._model[0]
        while hasattr(core, "module"):
            core = core.module
        located = locate_tokens(self._chosen, calls, self._data["total_lengths"])
        capture = LayerCapture(located if case in LAYER_CASES else [])
        routes = RouteCapture(located if case in {*LAYER_CASES, OWN} else [])
        note = functools.partial(self._note_packed, iter(calls), packed)
        handle = core.register_forward_pre_hook(note, with_kwargs=True)
        try:
            with capture.watching(core), routes.watching(core), _free_routing(self._args, is_free=case != AS_RUN):
                result = compute(args, self._model, iterators, num_microbatches)
        finally:
            handle.remove()
        if case != OWN:
            log_probs = result["log_probs"][: self._size]
            self._record.write_pass(self._number, TRAINING, case, self._dtype, log_probs, capture)
        self._record_routes(case, routes)
        return result

    def _record_routes(self, case: str, routes: RouteCapture) -> None:
        if fault := routes.find_fault():
            self._record.skip(self._number, "routing", TRAINING, case, fault)
        elif routes.found:
            self._record.write_routing(
                self._number, TRAINING, case, self._dtype, self._chosen, routes.found,
                is_replayed=self._is_replayed and case == AS_RUN,
            )  # fmt: skip

    def _note_packed(
        self, calls: Iterator[Sequence[int]], packed: dict[int, dict[str, Any]], _module: Any, _args: Any,
        given: Mapping[str, Any],
    ) -> None:  # fmt: skip
        starts = given["packed_seq_params"].cu_seqlens_q.tolist()
        tokens, masks = given["input_ids"].flatten().tolist(), given["loss_mask"].flatten().tolist()
        for place, index in enumerate(next(calls)):
            first, end = starts[place], starts[place + 1]
            if index < self._size:
                # a token's mask is in the row that predicts the token, one row earlier
                mask = masks[end - 1 - self._data["response_lengths"][index] : end - 1]
                packed[index] = {"tokens": tokens[first:end], "loss_mask": list(map(int, mask)), "padding": 0}


@contextmanager
def _free_routing(args: Namespace, *, is_free: bool) -> Iterator[None]:
    if not is_free or not getattr(args, "use_routing_replay", False):
        yield
        return
    stage = os.environ.get(STAGE, "")
    os.environ[STAGE] = "fallthrough"
    try:
        yield
    finally:
        os.environ[STAGE] = stage
