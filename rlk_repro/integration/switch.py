"""The switch between a trainer and RL-Kernel: settings from the environment, and ``install_into`` that acts on them.

The functions of ``TARGETS`` are rebound in both variants, for the timers; operators that were asked for are routed
beneath the timers.  No trainer file is edited, and nothing is used because it happens to be there.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from rlk_repro.errors import EnvironmentMissing, Problem, SpecError
from rlk_repro.integration.decisions import (
    Claim,
    Ledger,
    OpsWriter,
    Route,
    RouteContext,
    RouteFactory,
    dispatch_calls,
    resolve,
)
from rlk_repro.integration.installation import Installation, check_signatures, find_installation
from rlk_repro.integration.profile import Profile, Timers
from rlk_repro.integration.routes import ROUTES
from rlk_repro.operators import DEFAULT_OPS, OPERATORS, Case, Platform, Refusal, find_conflicts
from rlk_repro.rundir import libraries_beside, libraries_file

SWITCH_VARIABLE: Final = "VIME_RL_KERNEL"
MODE_VARIABLE: Final = "VIME_RL_KERNEL_MODE"
OPS_VARIABLE: Final = "VIME_RL_KERNEL_OPS"
OPS_DIR_VARIABLE: Final = "RLK_REPRO_OPS_DIR"
LIBRARIES_DIR_VARIABLE: Final = "RLK_REPRO_LIBRARIES_DIR"


class Mode(StrEnum):
    OFF = "off"
    AUTO = "auto"
    REQUIRE = "require"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the environment asks for.  Unless ``VIME_RL_KERNEL`` is 1 the mode is off and there are no operators."""

    mode: Mode = Mode.OFF
    ops: tuple[str, ...] = ()
    ops_dir: Path | None = None
    libraries_dir: Path | None = None

    @property
    def is_requested(self) -> bool:
        return self.mode is not Mode.OFF

    @property
    def is_active(self) -> bool:
        """Whether there is anything to do: RL-Kernel to route in, or measurements to write."""
        return self.is_requested or self.ops_dir is not None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the variables; unset and empty are the same, and the mode is ``require`` if not given.

        Raises:
            SpecError: values that mean nothing, all of them, with the valid ones.
        """
        problems: list[Problem] = []
        switch = _read_choice(environ, SWITCH_VARIABLE, ("1", "0"), "0", problems)
        mode = _read_choice(environ, MODE_VARIABLE, tuple(Mode), Mode.REQUIRE, problems)
        ops = _read_ops(environ.get(OPS_VARIABLE) or ",".join(DEFAULT_OPS), problems)
        if problems:
            raise SpecError(*problems)
        is_requested = switch == "1" and mode != Mode.OFF
        ops_dir = _read_folder(environ, OPS_DIR_VARIABLE)
        return cls(
            mode=Mode(mode) if is_requested else Mode.OFF,
            ops=ops if is_requested else (),
            ops_dir=ops_dir,
            libraries_dir=_read_folder(environ, LIBRARIES_DIR_VARIABLE) or (ops_dir and libraries_beside(ops_dir)),
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


def _read_ops(text: str, problems: list[Problem]) -> tuple[str, ...]:
    ops = tuple(text.split(","))
    if any(op not in OPERATORS for op in ops) or len(set(ops)) != len(ops):
        expected = f"a comma-separated list of {', '.join(OPERATORS)}, each at most once"
        problems.append(Problem(OPS_VARIABLE, "unknown or repeated operator", got=text, expected=expected))
        return ()
    for pair in find_conflicts(ops):
        problems.append(Problem(OPS_VARIABLE, "operators serve the same calls", got=text,
                                expected=f"only one of {' and '.join(pair)}"))  # fmt: skip
    return ops


@dataclass(frozen=True)
class Target:
    """A function of a trainer's loss module: its parameters as of vime 1fc199d9, and its timers."""

    parameters: str
    timers: Timers


_RATIO_KL: Final = Timers("ratio_kl_forward", "ratio_kl_backward")
TARGETS: Final[Mapping[str, Target]] = {
    "calculate_log_probs_and_entropy": Target(
        "(logits, tokens, tp_group, with_entropy, chunk_size, log_prob_keep_mask, with_entropy_grad)",
        Timers("log_probs_forward", "log_probs_backward", "log_probs_no_grad"),
    ),
    "compute_approx_kl": Target("(log_probs, log_probs_base, kl_loss_type, importance_ratio)", _RATIO_KL),
    "compute_policy_loss": Target("(ppo_kl, advantages, eps_clip, eps_clip_high, eps_clip_c)", _RATIO_KL),
    "policy_loss_function": Target(
        "(args, batch, logits, sum_of_sample_mean)", Timers("grpo_loss_forward", "grpo_loss_backward")
    ),
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
    """Rebind the functions of a trainer's loss module; once installed, return what is installed.

    Raises:
        EnvironmentMissing: the module is not the one this was written for, or the mode is ``require`` and an
            operator cannot run.
        SpecError: this rank's ops file is there already.
    """
    installed = find_installation(target, TARGETS)
    if installed is not None:
        return installed
    check_signatures(target, {name: spec.parameters for name, spec in TARGETS.items()})
    found = {op: resolve(op, _make_context(op, target, case, args), routes) for op in settings.ops}
    if settings.mode is Mode.REQUIRE:
        _forbid_fallbacks(found)
    rank, world_size = find_rank()
    ledger = Ledger(
        OpsWriter(settings.ops_dir, rank) if settings.ops_dir else None,
        ops=settings.ops,
        own=target.__name__,
        is_fallback_allowed=settings.mode is not Mode.REQUIRE,
    )
    libraries = libraries_file(settings.libraries_dir, rank) if settings.libraries_dir else None
    installation = Installation(Profile(case.platform), ledger, libraries)
    ledger.open(
        mode=settings.mode.value,
        is_requested=settings.is_requested,
        rank=rank,
        world_size=world_size,
        trainer=trainer,
        target=target.__name__,
        platform=str(case.platform),
        pid=os.getpid(),
        is_memory_per_step=installation.profile.is_memory_per_step,
    )
    for op, result in found.items():
        ledger.decide(op, result)
    _rebind_targets(installation, target, found)
    return installation


def _make_context(op: str, target: ModuleType, case: Case, args: Any) -> RouteContext:
    return RouteContext(case=case, native=getattr(target, OPERATORS[op].function), args=args)


def _forbid_fallbacks(found: Mapping[str, Route | Refusal]) -> None:
    refused: dict[Refusal, list[str]] = {}
    for op, result in found.items():
        if isinstance(result, Refusal):
            refused.setdefault(result, []).append(op)
    if refused:
        raise EnvironmentMissing(
            *(
                Problem(
                    f"{MODE_VARIABLE}=require",
                    f"{', '.join(ops)}: {refusal}",
                    expected="no fallback",
                    hint=f"repair that, drop it from {OPS_VARIABLE}, or set {MODE_VARIABLE}=auto",
                )
                for refusal, ops in refused.items()
            )
        )


def _rebind_targets(installation: Installation, target: ModuleType, found: Mapping[str, Route | Refusal]) -> None:
    claims = [Claim(OPERATORS[op], result if isinstance(result, Route) else None) for op, result in found.items()]
    for name, spec in TARGETS.items():
        own = [claim for claim in claims if claim.operator.function == name]
        routed = [claim.operator.name for claim in own if claim.route is not None]
        make = functools.partial(_wrap, installation, own, spec.timers)
        installation.rebind(target, name, make, ", ".join(["timers", *routed]))


def _wrap(
    installation: Installation, claims: Sequence[Claim], timers: Timers, function: Callable[..., Any]
) -> Callable[..., Any]:
    inner = dispatch_calls(function, claims, installation.ledger) if claims else function
    return installation.profile.time_function(inner, timers)


def find_rank() -> tuple[int, int]:
    """This process's rank and the world size: torch's where it knows, else the launcher's, else a world of one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def probe_platform() -> Platform:
    """Where torch computes in this process by default."""
    if not torch.cuda.is_available():
        return Platform.CPU
    return Platform.CUDA if torch.version.hip is None else Platform.ROCM
