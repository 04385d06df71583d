"""Six ways in which training and rollout come apart, each in two strengths, planted into the reference trainer.

A defect changes the trainer's own engine or the weight sync.  What records the engines imports its functions by name,
so that rollout and reference stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from rlk_repro.refengine import task, trainer
from rlk_repro.refengine.data import Microbatch, TrainData, make_microbatches, make_train_data
from rlk_repro.refengine.model import PackedLayout, Transformer, make_model
from rlk_repro.refengine.rollout import RolloutEngine

Plant = Callable[[pytest.MonkeyPatch, bool], None]

LAYER = 1
"""The layer that is computed otherwise."""


class LeftPadded(PackedLayout):
    """Pads in front of some samples, as if attention looked backwards."""

    def __init__(self, layout: PackedLayout, samples: Sequence[int]) -> None:
        vars(self).update(vars(layout))
        self.longest = layout.longest + 1
        shift = torch.zeros(layout.num_samples, dtype=torch.long)
        shift[list(samples)] = 1
        self.slots = layout.samples * self.longest + layout.positions + shift[layout.samples]


def pad_on_the_left(patch: pytest.MonkeyPatch, is_strong: bool) -> None:
    def make(data: TrainData, *sizes: int) -> list[list[Microbatch]]:
        steps = make_microbatches(data, *sizes)
        return [
            [_pad(item) if is_strong or number == step == 0 else item for number, item in enumerate(items)]
            for step, items in enumerate(steps)
        ]

    def _pad(item: Microbatch) -> Microbatch:
        samples = range(item.layout.num_samples) if is_strong else [2]
        return dataclasses.replace(item, layout=LeftPadded(item.layout, samples))

    patch.setattr(trainer, "make_microbatches", make)


def _change_data(patch: pytest.MonkeyPatch, change: Callable[[TrainData], None]) -> None:
    def make(*args: Any) -> TrainData:
        data = make_train_data(*args)
        change(data)
        return data

    patch.setattr(trainer, "make_train_data", make)


def shift_masks(patch: pytest.MonkeyPatch, is_strong: bool) -> None:
    def change(data: TrainData) -> None:
        for number, mask in enumerate(data.loss_masks):
            if is_strong or number == 3:
                mask[0] = 0

    _change_data(patch, change)


def end_with_padding(patch: pytest.MonkeyPatch, is_strong: bool) -> None:
    def change(data: TrainData) -> None:
        ended = [tokens for tokens in data.tokens if tokens[-1] == task.END_ID]
        assert ended
        for tokens in ended if is_strong else ended[-1:]:
            tokens[-1] = task.PAD_ID

    _change_data(patch, change)


def skip_a_weight(patch: pytest.MonkeyPatch, is_strong: bool) -> None:
    skipped = "embedding" if is_strong else f"blocks.{LAYER}.attention_norm.weight"
    load = RolloutEngine.load_weights

    def load_others(engine: RolloutEngine, source: Transformer) -> None:
        kept = dict(engine.model.named_parameters())[skipped]
        before = kept.clone()
        load(engine, source)
        if getattr(engine, "was_synced", False):
            kept.copy_(before)
        engine.was_synced = True  # type: ignore[attr-defined]

    patch.setattr(RolloutEngine, "load_weights", load_others)


def _change_training_model(patch: pytest.MonkeyPatch, change: Callable[[Any], None]) -> None:
    """The first model that the trainer makes is the policy."""
    made: list[Transformer] = []

    def make(*args: Any) -> Transformer:
        made.append(make_model(*args))
        if len(made) == 1:
            change(made[0].blocks[LAYER])
        return made[-1]

    patch.setattr(trainer, "make_model", make)


def narrow_a_layer(patch: pytest.MonkeyPatch, is_strong: bool) -> None:
    def change(block: Any) -> None:
        module = block.attention if is_strong else block.ffn.down
        whole = module.forward
        module.forward = lambda x, *rest: whole(x.bfloat16(), *rest).to(x.dtype)

    _change_training_model(patch, change)


def split_sums_by_batch(patch: pytest.MonkeyPatch, is_strong: bool) -> None:
    """Many rows are multiplied in two halves, whose sums are rounded before they are added."""
    narrow = torch.bfloat16 if is_strong else torch.float16

    def change(block: Any) -> None:
        down = block.ffn.down
        whole = down.forward

        def multiply(x: torch.Tensor) -> Any:
            if len(x) <= 12:
                return whole(x)
            half = x.size(-1) // 2
            parts = (x[:, :half] @ down.weight[:, :half].T, x[:, half:] @ down.weight[:, half:].T)
            halves = [part.to(narrow).to(x.dtype) for part in parts]
            return halves[0] + halves[1]

        down.forward = multiply

    _change_training_model(patch, change)


DEFECTS: dict[str, tuple[Plant, str, tuple[str, str]]] = {
    "padding side": (pad_on_the_left, "inputs", ("padding in front of sample 2", "padding in front of sample 0")),
    "mask": (
        shift_masks,
        "inputs",
        ("loss_mask of sample 3, position 0: rollout 1 against training 0", "loss_mask of sample 0, position 0"),
    ),
    "special token": (end_with_padding, "inputs", ("rollout 1 (end) against training 0 (padding)",) * 2),
    "unsynced weight": (
        skip_a_weight,
        "weights",
        (f"blocks.{LAYER}.attention_norm.weight is not equal", "embedding is not equal"),
    ),
    "bfloat16 layer": (
        narrow_a_layer,
        "layers",
        (f"first outside at layer {LAYER} mlp", f"first outside at layer {LAYER} attention"),
    ),
    "batch-dependent sum": (split_sums_by_batch, "layers", (f"first outside at layer {LAYER} mlp",) * 2),
}
"""For each defect: how it is planted, the kind of the first failed check, and what that says, weak and strong."""
