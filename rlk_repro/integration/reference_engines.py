"""Record what each engine of the reference trainer computes for the same tokens, before the training on a rollout.

The engines are the training model, the rollout model (it gets the samples as prompts), and a float64 copy of the policy
as reference.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

import torch

from rlk_repro.integration.measure.engines import (
    MAX_SAMPLES,
    MAX_STEPS,
    EngineRecord,
    capture_layers,
    choose_tokens,
)
from rlk_repro.refengine import task
from rlk_repro.refengine.data import Microbatch, Sample, TrainData, make_microbatches, make_train_data
from rlk_repro.refengine.model import Transformer, widen
from rlk_repro.refengine.trainer import Trainer
from rlk_repro.rundir.agreement import ALONE, AS_RUN, GENERATED, PROMPTS, REFERENCE, ROLLOUT, TRAINING

SPECIAL: Final = {"padding": task.PAD_ID, "end": task.END_ID}
LACKING: Final = {
    "recomputed": "the reference trainer keeps all activations",
    "tensor parallel 2": "the reference trainer is one process",
}
PADDING: Final = 8
"""Number of tokens by which an added sample exceeds the longest sample, so that all other samples get padding."""

Steps = Sequence[Sequence[Microbatch]]
Pass = Callable[[Trainer, Transformer, TrainData, Steps], list[torch.Tensor]]


class ReferenceEngines:
    """Wraps functions of the trainer, and records each rollout once: in the first pass with the policy's weights."""

    def __init__(self, record: EngineRecord) -> None:
        self._record = record
        self._rollout: tuple[int, Sequence[Sample]] | None = None

    def follow_train(self, train: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(train)
        def note_and_train(trainer: Trainer, rollout_id: int, samples: Sequence[Sample]) -> None:
            self._rollout = (rollout_id, samples[:MAX_SAMPLES]) if rollout_id < MAX_STEPS else None
            train(trainer, rollout_id, samples)

        return note_and_train

    def follow_pass(self, compute: Pass) -> Pass:
        @functools.wraps(compute)
        def compute_and_record(
            trainer: Trainer, model: Transformer, data: TrainData, steps: Steps
        ) -> list[torch.Tensor]:
            if self._rollout is None or model is not trainer.model:
                return compute(trainer, model, data, steps)
            (number, samples), self._rollout = self._rollout, None
            step = _Step(self._record, trainer, number, samples)
            log_probs = step.record_pass(AS_RUN, model, data, steps, functools.partial(compute, trainer))
            step.record_others(data, steps, functools.partial(compute, trainer))
            return log_probs

        return compute_and_record


class _Step:
    """Layers are recorded for the first rollout only."""

    def __init__(self, record: EngineRecord, trainer: Trainer, number: int, samples: Sequence[Sample]) -> None:
        self._record, self._trainer, self._number, self._samples = record, trainer, number, samples
        self._dtype = trainer.args.dtype
        lengths = [(len(sample.tokens), sample.response_length) for sample in samples]
        self._chosen = [] if number else choose_tokens(lengths)

    def record_pass(
        self, case: str, model: Transformer, data: TrainData, steps: Steps, compute: Callable[..., list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """If the last sample of ``data`` was added only for padding, it is not recorded."""
        calls = [microbatch.indices for microbatch in chain.from_iterable(steps)]
        capture = capture_layers(case, self._chosen, calls, data.total_lengths)
        with capture.watching(model):
            log_probs = compute(model, data, steps)
        own = log_probs[: len(self._samples)]
        self._record.write_pass(self._number, TRAINING, case, self._dtype, own, capture)
        return log_probs

    def record_others(self, data: TrainData, steps: Steps, compute: Callable[..., list[torch.Tensor]]) -> None:
        record, number, trainer = self._record, self._number, self._trainer
        rollout = [{"tokens": item.tokens, "loss_mask": item.loss_mask, "padding": 0} for item in self._samples]
        record.write_inputs(number, ROLLOUT, rollout, SPECIAL)
        record.write_inputs(number, TRAINING, list(_list_packed(data, steps))[: len(rollout)], SPECIAL)
        generated = [torch.tensor(item.rollout_log_probs) for item in self._samples if item.rollout_log_probs]
        if len(generated) == len(rollout):
            record.write_log_probs(number, GENERATED, AS_RUN, self._dtype, generated)
        self._record_rollout_engine()
        self._score(REFERENCE, AS_RUN, _widen_model(trainer.model), "float64")
        self._record_cases(data, compute)

    def _record_rollout_engine(self) -> None:
        record, number, trainer = self._record, self._number, self._trainer
        if trainer.args.debug_train_only:
            reason = "stored rollouts: no rollout engine runs"
            record.skip(number, "weights", ROLLOUT, AS_RUN, reason)
            record.write_weights(number, TRAINING, trainer.model.named_parameters())
            record.skip(number, "log_probs", PROMPTS, AS_RUN, reason)
            return
        engine = trainer.engine.model
        own = dict(engine.named_parameters())
        converted = ((name, value.to(own[name].dtype)) for name, value in trainer.model.named_parameters())
        record.write_weights(number, TRAINING, converted)
        record.write_weights(number, ROLLOUT, own.items())
        self._score(PROMPTS, AS_RUN, engine, self._dtype)
        self._score(PROMPTS, ALONE, engine, self._dtype)
        record.skip(number, "log_probs", PROMPTS, "prefix cache", "the reference trainer has no prefix cache")

    @torch.no_grad()
    def _score(self, engine: str, case: str, model: Transformer, dtype: str) -> None:
        """Plain torch computes the log-probs, because the trainer's functions may be replaced."""
        data = make_train_data(self._samples, len(self._samples), self._trainer.device)
        size = len(self._samples)
        steps = make_microbatches(data, size, 1 if case else size)
        calls = [microbatch.indices for microbatch in chain.from_iterable(steps)]
        capture = capture_layers(case, self._chosen, calls, data.total_lengths)
        rows: list[torch.Tensor] = []
        with capture.watching(model):
            for microbatch in chain.from_iterable(steps):
                layout = microbatch.layout
                logits = model(microbatch.tokens, layout.positions, layout.attend)
                rows += self._select(logits, data, microbatch)
        self._record.write_pass(self._number, engine, case, dtype, rows, capture)

    def _select(self, logits: torch.Tensor, data: TrainData, microbatch: Microbatch) -> Iterator[torch.Tensor]:
        log_probs = widen(logits / self._trainer.args.rollout_temperature).log_softmax(dim=-1)
        parts = torch.split(log_probs, [data.total_lengths[index] for index in microbatch.indices])
        for part, index in zip(parts, microbatch.indices, strict=True):
            length = data.response_lengths[index]
            yield part[-length - 1 : -1].gather(-1, data.tokens[index][-length:, None]).squeeze(-1)

    def _record_cases(self, data: TrainData, compute: Callable[..., list[torch.Tensor]]) -> None:
        size, model = len(self._samples), self._trainer.model
        own = take_samples(data, range(size))
        self.record_pass(ALONE, model, own, make_microbatches(own, size, 1), compute)
        self.record_pass("packed", model, own, make_microbatches(own, size, size), compute)
        longest = max(range(size), key=own.total_lengths.__getitem__)
        padded = take_samples(data, [*range(size), longest])
        longer = padded.tokens[-1]
        padded.tokens[-1] = torch.cat([longer, longer.new_full((PADDING,), task.END_ID)])
        padded.total_lengths[-1] += PADDING
        self.record_pass("padded", model, padded, make_microbatches(padded, size + 1, size + 1), compute)
        order = range(size - 1, -1, -1)
        turned = take_samples(data, order)
        log_probs = compute(model, turned, make_microbatches(turned, size, size))
        self._record.write_log_probs(self._number, TRAINING, "reordered", self._dtype, [log_probs[n] for n in order])
        for case, reason in LACKING.items():
            self._record.skip(self._number, "log_probs", TRAINING, case, reason)


def _widen_model(model: Transformer) -> Transformer:
    config = model.config.model_copy(update={"dtype": "float64"})
    wide = Transformer(config).to(device=model.embedding.device, dtype=torch.float64)
    wide.load_state_dict(model.state_dict())
    return wide


def _list_packed(data: TrainData, steps: Steps) -> Iterator[dict[str, Any]]:
    for microbatch in chain.from_iterable(steps):
        layout = microbatch.layout
        for place, index in enumerate(microbatch.indices):
            rows = layout.samples == place
            yield {
                "tokens": microbatch.tokens[rows].tolist(),
                "loss_mask": data.loss_masks[index].tolist(),
                "padding": int(layout.slots[rows][0]) - place * layout.longest,
            }


def take_samples(data: TrainData, indices: Sequence[int]) -> TrainData:
    """Return the samples at ``indices``, as far as a pass without gradient reads them."""
    lists: dict[str, Any] = {}
    for name in ("tokens", "total_lengths", "response_lengths", "loss_masks"):
        lists[name] = [getattr(data, name)[index] for index in indices]
    sums = data.rollout_mask_sums[list(indices)]
    return dataclasses.replace(data, rollout_mask_sums=sums, rollout_log_probs=None, **lists)
