"""Read the settings of the switch from the environment, and replace functions of a trainer's loss module.

In both variants, wrappers time the functions of ``TIMERS``. ``use_commit`` selects one of
several installed commits of RL-Kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from rlk_repro.base.errors import EnvironmentMissing, Problem, SpecError
from rlk_repro.base.units import group
from rlk_repro.integration.measure.agreement import TokenRecord
from rlk_repro.integration.measure.energy import open_energy
from rlk_repro.integration.measure.installation import Installation, check_signatures, find_installation
from rlk_repro.integration.measure.ledger import Ledger, OpsWriter
from rlk_repro.integration.measure.profile import StepProfile, Timers
from rlk_repro.integration.measure.ranks import check_ranks_agree, find_rank
from rlk_repro.integration.measure.shadow import ShadowStep
from rlk_repro.integration.route.api import Claim, Route, RouteContext, RouteFactory, dispatch_calls, resolve
from rlk_repro.integration.route.batch import CurrentBatch
from rlk_repro.integration.route.linear_logp import NAME as LINEAR_LOGP
from rlk_repro.integration.route.rl_kernel import PACKAGE, find_commit
from rlk_repro.integration.route.table import ROUTES
from rlk_repro.integration.route.watch import Watch
from rlk_repro.integration.vime_abi import APPROX_KL, CLIP, LOG_PROBS, LOSS, LOSS_MODULE
from rlk_repro.operators import ALL_OPERATORS, DEFAULT_OPS, OPS_SCHEMA, Case, Platform, Refusal, find_conflicts
from rlk_repro.rundir.paths import TrialDir
from rlk_repro.schedule import LETTERS, SHADOW
from rlk_repro.switches import (
    AGREEMENT_RECORD,
    COMMITS,
    DEMO_WAIT,
    ENGINES_DIR,
    ENTROPY_METRIC,
    GC_FREEZE,
    OPS_DIR,
    SCHEDULED,
    SWITCH,
    SWITCH_BASELINE_OPS,
    SWITCH_COMMIT,
    SWITCH_MODE,
    SWITCH_OPS,
    SWITCH_SCHEDULE,
)

PIP_SOURCE: Final = "git+https://github.com/RL-Align/RL-Kernel"


class Mode(StrEnum):
    OFF = "off"
    AUTO = "auto"
    REQUIRE = "require"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings from the environment; unless ``VIME_RL_KERNEL`` is 1, the trainer's own functions serve."""

    mode: Mode = Mode.OFF
    ops: tuple[str, ...] = ()
    baseline_ops: tuple[str, ...] = ()
    schedule: str = ""
    commit: str = ""
    ops_dir: Path | None = None
    engines_dir: Path | None = None
    has_entropy_metric: bool = True
    agreement_record: str = "1"
    gc_freeze_after: int = 0
    """Number of rollouts after which existing Python objects are exempt from garbage collection; 0 for never."""

    @property
    def is_requested(self) -> bool:
        return self.mode is not Mode.OFF

    @property
    def is_active(self) -> bool:
        """Whether the settings request any change of the trainer."""
        return self.is_requested or self.ops_dir is not None or not self.has_entropy_metric or self.gc_freeze_after > 0

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the variables; an empty variable counts as unset, and the default mode is ``require``.

        Raises:
            SpecError: values are invalid; the error lists all of them.
        """
        problems: list[Problem] = []
        switch = _read_choice(environ, SWITCH, ("1", "0"), "0", problems)
        mode = _read_choice(environ, SWITCH_MODE, tuple(Mode), Mode.REQUIRE, problems)
        entropy = _read_choice(environ, ENTROPY_METRIC, ("1", "0"), "1", problems)
        ops = _read_ops(SWITCH_OPS, environ.get(SWITCH_OPS) or ",".join(DEFAULT_OPS), problems)
        of_baseline = environ.get(SWITCH_BASELINE_OPS)
        baseline_ops = _read_ops(SWITCH_BASELINE_OPS, of_baseline, problems) if of_baseline else ()
        agreement_record = _read_choice(environ, AGREEMENT_RECORD, ("1", "0", SCHEDULED), "1", problems)
        schedule = environ.get(SWITCH_SCHEDULE, "")
        if not set(schedule) <= LETTERS.keys():
            expected = f"a letter per rollout: {' or '.join(LETTERS)}"
            problems.append(Problem(SWITCH_SCHEDULE, "is not a valid schedule", got=schedule, expected=expected))
        freeze_after = environ.get(GC_FREEZE) or "0"
        if not freeze_after.isdecimal():
            expected = "a number of rollouts"
            problems.append(Problem(GC_FREEZE, "is not a number", got=freeze_after, expected=expected))
        if problems:
            raise SpecError(*problems)
        is_requested = switch == "1" and mode != Mode.OFF
        return cls(
            mode=Mode(mode) if is_requested else Mode.OFF,
            ops=ops if is_requested else (),
            baseline_ops=baseline_ops if is_requested and schedule else (),
            schedule=schedule if is_requested or SCHEDULED in (agreement_record, environ.get(DEMO_WAIT)) else "",
            agreement_record=agreement_record,
            commit=environ.get(SWITCH_COMMIT, "") if is_requested else "",
            ops_dir=_read_folder(environ, OPS_DIR),
            engines_dir=_read_folder(environ, ENGINES_DIR),
            has_entropy_metric=entropy == "1",
            gc_freeze_after=int(freeze_after),
        )


def _read_folder(environ: Mapping[str, str], name: str) -> Path | None:
    return Path(environ[name]) if environ.get(name) else None


def _read_choice(
    environ: Mapping[str, str], name: str, valid: Sequence[str], default: str, problems: list[Problem]
) -> str:
    value = environ.get(name) or default
    if value not in valid:
        problems.append(Problem(name, "unknown value", got=value, expected=f"one of {', '.join(valid)}"))
    return value


def _read_ops(name: str, text: str, problems: list[Problem]) -> tuple[str, ...]:
    ops = tuple(text.split(","))
    if any(op not in ALL_OPERATORS for op in ops) or len(set(ops)) != len(ops):
        expected = f"a comma-separated list of {', '.join(ALL_OPERATORS)}, each at most once"
        problems.append(Problem(name, "unknown or repeated operator", got=text, expected=expected))
        return ()
    for pair in find_conflicts(ops):
        problems.append(Problem(name, "operators serve the same calls", got=text,
                                expected=f"only one of {' and '.join(pair)}"))  # fmt: skip
    return ops


_CLIP_KL: Final = Timers("clip_kl_forward", "clip_kl_backward")
TIMERS: Final[Mapping[str, Timers]] = {
    LOG_PROBS: Timers("log_probs_forward", "log_probs_backward", "log_probs_no_grad"),
    APPROX_KL: _CLIP_KL,
    CLIP: _CLIP_KL,
    LOSS: Timers("grpo_loss_forward", "grpo_loss_backward"),
}


def install_into(
    target: ModuleType,
    settings: Settings,
    *,
    trainer: str,
    case: Case,
    args: Any = None,
    routes: Mapping[str, RouteFactory] = ROUTES,
) -> Installation:
    """Replace functions of a trainer's loss module; a second call returns the first installation.

    Raises:
        EnvironmentMissing: the functions of the module take other arguments than the pinned trainer's, or the mode is
            ``require`` and an operator cannot run.
        SpecError: this rank's ops file already exists, or the planned commit of RL-Kernel is absent.
    """
    installed = find_installation(target, TIMERS)
    if installed is not None:
        return installed
    if settings.commit:
        use_commit(settings.commit)
    check_signatures(target, LOSS_MODULE)
    case = dataclasses.replace(case, has_entropy_metric=settings.has_entropy_metric)
    batch, watch = CurrentBatch(), Watch()
    found = {}
    for op in (*settings.ops, *settings.baseline_ops):
        native = getattr(target, ALL_OPERATORS[op].function)
        found[op] = resolve(op, RouteContext(case=case, native=native, args=args, batch=batch, watch=watch), routes)
    rank, world_size = find_rank()
    # compare the ranks' choices before any error: a rank that cannot continue must first tell the other ranks
    check_ranks_agree(rank, world_size, _describe_choice(settings, found))
    if settings.mode is Mode.REQUIRE:
        _forbid_fallbacks(found)
    profile = StepProfile(case.platform)
    ledger = Ledger(
        OpsWriter(settings.ops_dir, rank) if settings.ops_dir else None,
        ops=tuple(found),
        own=target.__name__,
        is_fallback_allowed=settings.mode is not Mode.REQUIRE,
    )
    libraries = TrialDir(settings.ops_dir.parent).libraries_file(rank) if settings.ops_dir else None
    energy = open_energy(case.platform) if settings.ops_dir else None
    installation = Installation(profile, ledger, watch, libraries, settings.schedule, energy)
    installation.gc_freeze_after = settings.gc_freeze_after
    ledger.write(
        "install",
        schema=OPS_SCHEMA,
        ops=tuple(found),
        mode=settings.mode.value,
        is_requested=settings.is_requested,
        rank=rank,
        world_size=world_size,
        trainer=trainer,
        target=target.__name__,
        platform=str(case.platform),
        pid=os.getpid(),
        is_memory_per_step=profile.is_memory_per_step,
        has_entropy_metric=settings.has_entropy_metric,
    )
    for op, result in found.items():
        ledger.decide(op, result)
    if SHADOW in settings.schedule and settings.is_requested and settings.ops_dir:
        installation.shadow = ShadowStep(
            profile,
            ledger,
            watch,
            installation.turn,
            batch,
            is_loss_routed=any(ALL_OPERATORS[op].function == LOSS for op in settings.ops),
            refusal=_find_shadow_refusal(settings.ops, case),
        )
    # ranks that split a vocabulary have the same tokens, so only the first of them records the tokens
    if settings.ops_dir and settings.agreement_record != "0" and rank % case.tensor_parallel == 0:
        size = case.context_parallel
        refusal = f"context parallel size {size}: a rank has only parts of responses" if size > 1 else ""
        turn = installation.turn if settings.agreement_record == SCHEDULED else None
        installation.tokens = TokenRecord(refusal, turn)
    for name in TIMERS:
        enabled = _list_claims(name, settings.ops, found)
        baseline = _list_claims(name, settings.baseline_ops, found)
        reasons = ["timers", *(operator.name for operator, route in (*enabled, *baseline) if route is not None)]
        if name == LOG_PROBS and not settings.has_entropy_metric:
            reasons.append("no entropy metric")
        make = functools.partial(_wrap, name, installation, settings, enabled, baseline, batch)
        installation.rebind(target, name, make, ", ".join(reasons))
    return installation


def _find_shadow_refusal(ops: Sequence[str], case: Case) -> str:
    if case.context_parallel > 1:
        return f"context parallel size {case.context_parallel}: a rank that stops would leave the other ranks waiting"
    return f"{LINEAR_LOGP} takes hidden states, but a baseline step has only logits" if LINEAR_LOGP in ops else ""


def _describe_choice(settings: Settings, found: Mapping[str, Route | Refusal]) -> str:
    chosen = {op: f"{item.implementation} {item.version}" if isinstance(item, Route) else str(item)
              for op, item in found.items()}  # fmt: skip
    ops = "; ".join(f"{op}: {what}" for op, what in chosen.items())
    schedule = f", schedule {settings.schedule}" if settings.schedule else ""
    return f"mode {settings.mode}, entropy metric {settings.has_entropy_metric}, {ops or 'no operators'}{schedule}"


def _forbid_fallbacks(found: Mapping[str, Route | Refusal]) -> None:
    refused = group((result, op) for op, result in found.items() if isinstance(result, Refusal))
    if refused:
        raise EnvironmentMissing(
            *(
                Problem(
                    f"{SWITCH_MODE}=require",
                    f"{', '.join(ops)}: {refusal}",
                    expected="no fallback",
                    hint=f"repair the cause, remove the operator from {SWITCH_OPS}, or set {SWITCH_MODE}=auto",
                )
                for refusal, ops in refused.items()
            )
        )


def _list_claims(name: str, ops: Sequence[str], found: Mapping[str, Route | Refusal]) -> list[Claim]:
    """List the operators among ``ops`` that serve calls of the trainer's function ``name``, each with its route."""
    claims: list[Claim] = []
    for op in ops:
        operator, result = ALL_OPERATORS[op], found[op]
        if operator.function == name:
            claims.append((operator, result if isinstance(result, Route) else None))
    return claims


def _wrap(
    name: str,
    installation: Installation,
    settings: Settings,
    enabled: Sequence[Claim],
    baseline: Sequence[Claim],
    batch: CurrentBatch,
    function: Callable[..., Any],
) -> Callable[..., Any]:
    """Wrap one function of the loss module: what computes, then its timer, then the records, which no timer counts."""
    if enabled or baseline:
        function = dispatch_calls(function, enabled, baseline, installation.ledger, installation.turn)
    if name == LOG_PROBS and not settings.has_entropy_metric:
        function = without_entropy_metric(function)
    if name == LOSS and settings.is_requested:
        function = _hold_batch(batch, function)
    function = installation.profile.time_function(function, TIMERS[name])
    shadow, tokens = installation.shadow, installation.tokens
    if shadow is not None and name == LOG_PROBS:
        function = shadow.follow_log_probs(function)
    if shadow is not None and name == LOSS:
        function = shadow.follow_loss(function)
    if tokens is not None and name == LOSS:
        function = tokens.follow_loss(function)
    return function


def without_entropy_metric(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the log-prob function: compute the entropy only if the loss needs its gradient; otherwise return zeros."""
    signature = inspect.signature(function)

    def compute(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if not bound.arguments["with_entropy"] or bound.arguments["with_entropy_grad"]:
            return function(*args, **kwargs)
        bound.arguments["with_entropy"] = False
        log_probs, _ = function(*bound.args, **bound.kwargs)
        return log_probs, log_probs.new_zeros(len(log_probs))

    return functools.update_wrapper(compute, function, updated=())


def _hold_batch(current: CurrentBatch, function: Callable[..., Any]) -> Callable[..., Any]:
    def compute(args: Any, batch: Any, *rest: Any, **named: Any) -> Any:
        with current.hold(args, batch):
            return function(args, batch, *rest, **named)

    return functools.update_wrapper(compute, function, updated=())


def probe_platform() -> Platform:
    if not torch.cuda.is_available():
        return Platform.CPU
    return Platform.CUDA if torch.version.hip is None else Platform.ROCM


def use_commit(commit: str) -> None:
    """Put the folder of an RL-Kernel commit first on this process's ``sys.path``.

    ``RLK_COMMITS`` names a folder with one subfolder per commit, which has the commit's 40 digits as its name.

    Raises:
        EnvironmentMissing: the folder is absent or holds another commit, or RL-Kernel is already imported.
    """
    folder = Path(os.environ.get(COMMITS, "")) / commit
    if str(folder) in sys.path:
        return
    found = {find_commit(item) for item in distributions(path=[str(folder)])}
    if not os.environ.get(COMMITS) or commit not in found or not (folder / PACKAGE).is_dir():
        hint = f"pip install --no-deps --no-build-isolation --target {COMMITS}/{commit} {PIP_SOURCE}@{commit}"
        raise EnvironmentMissing(
            Problem(f"{COMMITS}/{commit}", "is not an installed RL-Kernel of this commit",
                    got=str(folder) if os.environ.get(COMMITS) else f"no variable {COMMITS}", hint=hint)
        )  # fmt: skip
    if PACKAGE in sys.modules:
        raise EnvironmentMissing(Problem(PACKAGE, "is already imported from elsewhere", expected=str(folder)))
    sys.path.insert(0, str(folder))
