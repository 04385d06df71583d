"""Choose the variant of each rollout of a session (design ``crossover``) from the seed, always in the same way.

A block is four periods of one variant each, ABBA or BAAB.  Only the last rollout of a period is scored, because the
switch of variants may affect the rollouts before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rlk_repro.spec import Measure, Variant

ORDERS: Final = ("ABBA", "BAAB")
SHADOW: Final = "s"
LETTERS: Final[dict[str, Variant]] = {"b": "baseline", "e": "enabled", SHADOW: "baseline"}
_LABELS: Final = {"A": "b", "B": "e"}


@dataclass(frozen=True, kw_only=True)
class Block:
    """Four periods, labelled A or B; in a control block the baseline runs in all four."""

    order: str
    is_control: bool


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One rollout of a session; ``block`` (a number) and ``label`` (A or B) are empty outside blocks.

    ``stored`` is the number of the stored rollout to train on; None means one of those with the largest files.
    """

    letter: str
    is_scored: bool = False
    block: int | None = None
    label: str = ""
    stored: int | None = None

    @property
    def variant(self) -> Variant:
        return LETTERS[self.letter]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    num_warmup: int
    blocks: tuple[Block, ...]
    period_steps: int
    num_shadow: int

    @cached_property
    def rollouts(self) -> tuple[Rollout, ...]:
        warmup = [Rollout(letter="be"[number % 2]) for number in range(self.num_warmup)]
        return (*warmup, *self._list_scored(), *[Rollout(letter=SHADOW)] * self.num_shadow)

    @cached_property
    def steps_of_blocks(self) -> tuple[tuple[int, ...], ...]:
        steps: list[list[int]] = [[] for _ in self.blocks]
        for step, rollout in enumerate(self.rollouts):
            if rollout.block is not None:
                steps[rollout.block].append(step)
        return tuple(map(tuple, steps))

    def list_compared(self, faults: Collection[int]) -> list[int]:
        """Return the scored rollouts of all blocks, except control blocks and the blocks in ``faults``."""
        return [
            step
            for block, steps in enumerate(self.steps_of_blocks)
            if block not in faults and not self.blocks[block].is_control
            for step in steps
            if self.is_scored(step)
        ]

    def _list_scored(self) -> Iterator[Rollout]:
        for number, block in enumerate(self.blocks):
            for place, label in enumerate(block.order):
                half = 2 * number + place // 2
                for step in range(self.period_steps):
                    yield Rollout(
                        letter=_LABELS["A" if block.is_control else label],
                        is_scored=step == self.period_steps - 1,
                        block=number,
                        label=label,
                        stored=half * self.period_steps + step,
                    )

    def variant_of(self, rollout: int) -> Variant:
        return self.rollouts[rollout].variant

    def is_scored(self, rollout: int) -> bool:
        return self.rollouts[rollout].is_scored

    @property
    def text(self) -> str:
        """The schedule as text, one letter per rollout."""
        return "".join(rollout.letter for rollout in self.rollouts)


def make_schedule(measure: Measure, seed: int) -> Schedule:
    """Make the schedule of this seed's session; control blocks are spread evenly among the other blocks."""
    slots = [
        ((number + 0.5) / len(orders), is_control, order)
        for is_control, count in ((False, measure.blocks), (True, measure.control_blocks))
        for orders in [_draw_orders(seed, count, "control" if is_control else "block")]
        for number, order in enumerate(orders)
    ]
    blocks = tuple(Block(order=order, is_control=is_control) for _, is_control, order in sorted(slots))
    return Schedule(
        num_warmup=measure.warmup_steps,
        blocks=blocks,
        period_steps=measure.period_steps,
        num_shadow=measure.shadow_steps,
    )


def _draw_orders(seed: int, count: int, kind: str) -> list[str]:
    """Draw as many ABBA as BAAB blocks, or one more of either; each arrangement is equally likely."""
    digests = [hashlib.sha256(f"{seed} {kind} {number}".encode()).digest() for number in range(count + 1)]
    first = digests.pop()[0] % 2
    orders = [""] * count
    for place, number in enumerate(sorted(range(count), key=digests.__getitem__)):
        orders[number] = ORDERS[(place + first) % 2]
    return orders
