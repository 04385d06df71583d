"""Record in this rank's ops file which implementation serves each operator, and how often each operator ran."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlk_repro.base.disk import open_stream
from rlk_repro.base.errors import CheckFailed, Problem, SpecError
from rlk_repro.base.files import dump_json_line
from rlk_repro.integration.route.api import NO_CALLS, Route
from rlk_repro.operators import ALL_OPERATORS, RL_KERNEL, Refusal
from rlk_repro.rundir.paths import ops_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The implementation that serves an operator; in a fallback, the trainer's module and an empty ``version``."""

    op: str
    implementation: str
    version: str
    reason: str
    is_rl_kernel: bool


class OpsWriter:
    """The ops file of one rank, created by this process: one JSON object per line, each flushed."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Raise SpecError if the file already exists: lines of two processes must not mix."""
        path = ops_file(folder, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._stream = open_stream(path, "xb")
        except FileExistsError:
            raise SpecError(
                Problem(
                    str(path),
                    "exists already, written by another process",
                    expected="a folder of its own for every trial",
                    hint="set RLK_REPRO_OPS_DIR to another folder, or move the old files away",
                )
            ) from None

    def write(self, event: str, **fields: Any) -> None:
        self._stream.write(f"{dump_json_line({'event': event, **fields})}\n".encode())
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


class Ledger:
    """Records each decision once, and counts calls per operator; the trainer's module ``own`` serves refused calls."""

    def __init__(self, writer: OpsWriter | None, *, ops: Sequence[str], own: str, is_fallback_allowed: bool) -> None:
        self.decisions: list[Decision] = []
        self._writer, self._own, self._is_fallback_allowed = writer, own, is_fallback_allowed
        self._step = {op: Counter(NO_CALLS) for op in ops}
        self._total = {op: Counter(NO_CALLS) for op in ops}
        self._num_steps = 0

    def write(self, event: str, **fields: Any) -> None:
        if self._writer is not None:
            self._writer.write(event, **fields)

    def decide(self, op: str, found: Route | Refusal) -> None:
        if isinstance(found, Route):
            decision = Decision(
                op=op,
                implementation=found.implementation,
                version=found.version,
                reason="",
                is_rl_kernel=ALL_OPERATORS[op].served_by == RL_KERNEL,
            )
        else:
            decision = Decision(op=op, implementation=self._own, version="", reason=str(found), is_rl_kernel=False)
        if decision in self.decisions:
            return
        self.decisions.append(decision)
        if isinstance(found, Route):
            logger.info("rlk-repro: %s: %s %s", op, decision.implementation, decision.version)
        else:
            logger.warning("rlk-repro: %s falls back to %s: %s", op, self._own, decision.reason)
        self.write("decision", **dataclasses.asdict(decision))

    def find_rl_kernel(self, op: str) -> Decision | None:
        return next((item for item in self.decisions if item.op == op and item.is_rl_kernel), None)

    def refuse_call(self, op: str, refusal: Refusal) -> None:
        if not self._is_fallback_allowed:
            problem = Problem(
                op, f"a call cannot be served: {refusal}", expected="no fallback, because the mode is require"
            )
            raise CheckFailed(problem)
        self.decide(op, refusal)

    def count(self, op: str, count: Mapping[str, int]) -> None:
        self._step[op].update(count)
        self._total[op].update(count)

    def end_step(
        self,
        step: int,
        timers: Mapping[str, float],
        memory: Mapping[str, int],
        odd: Mapping[str, str],
        more: Mapping[str, Any],
    ) -> None:
        """Record a step.  ``odd`` maps an operator to what is invalid in its results; ``more`` holds further fields.

        Raises:
            CheckFailed: a result was invalid, and the mode is ``require``.
        """
        self.write("step", step=step, timers=timers, memory=memory, calls=self._step, odd=odd, **more)
        self._step = {op: Counter(NO_CALLS) for op in self._step}
        self._num_steps += 1
        for op, what in odd.items():
            logger.error("rlk-repro: %s: step %d: %s", op, step, what)
        if odd and not self._is_fallback_allowed:
            raise CheckFailed(*(Problem(f"{op}, step {step}", what, hint="run the baseline to see whether the logits "
                                        "are invalid there too") for op, what in odd.items()))  # fmt: skip

    def close(self) -> None:
        self.write("end", num_steps=self._num_steps, calls=self._total)
        if self._writer is not None:
            self._writer.close()
