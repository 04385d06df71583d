"""Replace functions of one trainer, and restore them."""

from __future__ import annotations

import atexit
import functools
import gc
import hashlib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem
from rlk_repro.base.files import write_json
from rlk_repro.integration.measure.agreement import TokenRecord
from rlk_repro.integration.measure.energy import EnergyCounter
from rlk_repro.integration.measure.engines import EngineRecord
from rlk_repro.integration.measure.ledger import Ledger
from rlk_repro.integration.measure.libraries import loaded_libraries
from rlk_repro.integration.measure.profile import FORWARD_ONLY, StepProfile, read_counts
from rlk_repro.integration.measure.ranks import check_ranks_agree, find_rank
from rlk_repro.integration.measure.shadow import ShadowStep
from rlk_repro.integration.route.api import Turn
from rlk_repro.integration.route.watch import Watch
from rlk_repro.schedule import LETTERS, SHADOW

logger = logging.getLogger(__name__)

Maker: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
_HANDLE: Final = "rlk_repro_installation"


class Installation:
    """The replaced functions of one trainer, their timers, and the record of what ran; ``undo`` restores everything."""

    def __init__(
        self, profile: StepProfile, ledger: Ledger, watch: Watch, libraries: Path | None, schedule: str = "",
        energy: EnergyCounter | None = None,
    ) -> None:  # fmt: skip
        self.profile, self.ledger, self._watch = profile, ledger, watch
        self._libraries, self._schedule, self._energy = libraries, schedule, energy
        self.turn = Turn(is_enabled=not schedule)
        self.shadow: ShadowStep | None = None
        self.tokens: TokenRecord | None = None
        self.gc_freeze_after = 0
        # with R3, of each pass of this step: the routers that replayed, and all routers
        self.replays: list[tuple[int, int]] = []
        self._engines: EngineRecord | None = None
        self._begun: int | None = None
        self._counts = read_counts()
        self._undo = ExitStack()
        self._undo.callback(ledger.close)
        if energy is not None:
            self._undo.callback(energy.close)
        atexit.register(self.undo)
        self._undo.callback(atexit.unregister, self.undo)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def undo(self) -> None:
        self._undo.close()

    def on_undo(self, function: Callable[..., Any], *args: Any) -> None:
        self._undo.callback(function, *args)

    def rebind(self, owner: Any, name: str, make: Maker, why: str) -> None:
        """Replace ``owner.name`` by ``make(owner.name)`` until ``undo`` runs, unless this object has done so before."""
        original = getattr(owner, name)
        if getattr(original, _HANDLE, None) is self:
            return
        replacement = make(original)
        setattr(replacement, _HANDLE, self)
        if name in vars(owner):
            self._undo.callback(setattr, owner, name, vars(owner)[name])
        else:
            self._undo.callback(delattr, owner, name)  # the original is an attribute of the owner's class
        setattr(owner, name, replacement)
        logger.info("rlk-repro: %s.%s replaced: %s", getattr(owner, "__name__", type(owner).__name__), name, why)

    def rebind_phases(self, owner: Any, phases: Mapping[str, str], follow: Maker | None) -> None:
        """Measure the peak memory of each phase; ``follow``, if given, also wraps the function of ``FORWARD_ONLY``."""
        for name, phase in phases.items():
            make = functools.partial(self._wrap_phase, phase, follow if phase == FORWARD_ONLY else None)
            self.rebind(owner, name, make, "peak memory")

    def _wrap_phase(self, phase: str, follow: Maker | None, function: Callable[..., Any]) -> Callable[..., Any]:
        return self.profile.run_in_phase(phase, function if follow is None else follow(function))

    def open_engines(self, folder: Path | None) -> EngineRecord | None:
        """Open this rank's file for an agreement run; return None if ``folder`` is None or the file is already open."""
        if folder is None or self._engines is not None:
            return None
        self._engines = EngineRecord(folder, find_rank()[0])
        self.on_undo(self._engines.close)
        return self._engines

    def begin_step(self, rollout_id: int) -> None:
        """Switch to the variant that the schedule gives a rollout, once all ranks agree on rollout and schedule.

        Raises:
            CheckFailed: the ranks differ in rollout or schedule, or the schedule has ended.
        """
        if not self._schedule:
            return
        if not 0 <= rollout_id < len(self._schedule):
            expected = f"0 to {len(self._schedule) - 1}"
            raise CheckFailed(Problem("rollout", "is not in the schedule", got=rollout_id, expected=expected))
        variant = LETTERS[self._schedule[rollout_id]]
        digest = hashlib.sha256(self._schedule.encode()).hexdigest()[:12]
        check_ranks_agree(*find_rank(), f"rollout {rollout_id}, {variant}, schedule {digest}")
        self.turn.is_enabled, self._begun = variant == "enabled", rollout_id
        if self.shadow is not None:
            self.shadow.begin_step(rollout_id if self._schedule[rollout_id] == SHADOW else None)

    def end_step(self, rollout_id: int) -> None:
        """Record times and memory of one rollout's training; after the first rollout, also record the loaded libraries.

        Raises:
            CheckFailed: another rollout had begun; or, in mode ``require``, a result of RL-Kernel was invalid.
        """
        if self.shadow is not None:
            self.shadow.begin_step(None)
        timers, memory = self.profile.end_step()
        energy_j = None if self._energy is None else self._energy.read_j()
        odd = self._watch.settle()
        if self._libraries is not None:
            write_json(self._libraries, loaded_libraries())
            self._libraries = None
        more: dict[str, Any] = {} if energy_j is None else {"energy_j": energy_j}
        if self.tokens is not None and (agreement := self.tokens.end_step()) is not None:
            more["agreement"] = agreement
        if self.gc_freeze_after and rollout_id + 1 == self.gc_freeze_after:
            more["gc_frozen"] = freeze_objects()
        self.ledger.end_step(rollout_id, timers, memory, odd, more | self._end_turn(rollout_id))
        if self._begun not in {None, rollout_id}:
            raise CheckFailed(
                Problem("rollout", "differs from the rollout that began", got=rollout_id, expected=str(self._begun))
            )

    def _end_turn(self, rollout_id: int) -> dict[str, Any]:
        if not self._schedule:
            return {}
        before, self._counts = self._counts, read_counts()
        variant = "enabled" if self.turn.is_enabled else "baseline"
        counts = {name: max(0, count - before.get(name, 0)) for name, count in self._counts.items()}
        if self.replays:
            replayed, routers = zip(*self.replays, strict=True)
            counts |= {"routers_replayed": min(replayed), "routers": max(routers)}
            self.replays.clear()
        return {"variant": variant if self._begun == rollout_id else None, "counts": counts}


def freeze_objects() -> int:
    """Exempt all Python objects of this process from garbage collection; return their number.

    vime collects garbage after every step.  With a trainer's libraries loaded, a garbage collection takes 0.4 s, and
    this time varies more than the time of the training (docs/statistics.md).
    """
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()


def find_installation(owner: Any, names: Iterable[str]) -> Installation | None:
    found = (getattr(getattr(owner, name, None), _HANDLE, None) for name in names)
    return next((item for item in found if item is not None), None)


def check_signatures(owner: Any, expected: Mapping[str, str]) -> None:
    """Raise an EnvironmentMissing that names all functions of ``owner`` that are absent or take other parameters."""
    problems = find_signature_problems(owner, expected)
    if problems:
        raise EnvironmentMissing(*problems)


def find_signature_problems(owner: Any, expected: Mapping[str, str]) -> list[Problem]:
    found = (_check_signature(owner, name, text) for name, text in expected.items())
    return [problem for problem in found if problem is not None]


def _check_signature(owner: Any, name: str, expected: str) -> Problem | None:
    where, hint = f"{owner.__name__}.{name}", "use the trainer at the commit that the stack pins"
    function = getattr(owner, name, None)
    if not callable(function):
        return Problem(where, "no such function", expected=expected, hint=hint)
    parameters = inspect.signature(function).parameters.values()
    found = inspect.Signature([inspect.Parameter(item.name, item.kind) for item in parameters])
    if str(found) == expected:
        return None
    return Problem(where, "takes other arguments", got=str(found), expected=expected, hint=hint)
