"""Install the switch into vime, through its ``--custom-megatron-init-path``, in every training process.

vime calls this once its process groups exist and before the model is built.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any, Final

from rlk_repro.integration.measure.engines import compose
from rlk_repro.integration.measure.installation import Installation, check_signatures
from rlk_repro.integration.measure.profile import FORWARD_ONLY, UPDATE, Timers
from rlk_repro.integration.measure.profiled import ProfiledSteps
from rlk_repro.integration.output_layers import defer_output_layers
from rlk_repro.integration.switch import Settings, install_into, probe_platform
from rlk_repro.integration.vime_abi import Abi, find_abi
from rlk_repro.integration.vime_engines import VimeEngines
from rlk_repro.operators import Case, read_loss_options

TRAINER: Final = "vime"
PHASES: Final = {"forward_only": FORWARD_ONLY, "train": UPDATE}


def install(args: argparse.Namespace) -> Installation | None:
    """Install what the environment asks for.  Return None, and change nothing, if it asks for nothing."""
    settings = Settings.from_env()
    if not settings.is_active:
        return None
    from vime.backends.megatron_utils import actor, loss

    abi = find_abi(loss, actor)
    if settings.schedule:
        check_signatures(actor, abi.begin)
    installation = _install_loss(args, settings, has_output_layer=True)
    make_initialize = functools.partial(_prepare_model, installation, abi)
    installation.rebind(actor, "initialize_model_and_optimizer", make_initialize, "optimizer timer, output layers")
    record = installation.open_engines(settings.engines_dir)
    engines = None if record is None else VimeEngines(record)
    for name, phase in PHASES.items():
        make: Callable[..., Any] = functools.partial(installation.profile.run_in_phase, phase)
        if engines is not None and name == "forward_only":
            make = compose(engines.follow_pass, make)
        installation.rebind(actor, name, make, "peak memory")
    if engines is not None:
        for name in abi.begin:
            installation.rebind(actor, name, engines.follow_begin, "record of engines")
    make_end = functools.partial(_end_step_after, installation, ProfiledSteps.from_env())
    installation.rebind(actor, "log_perf_data", make_end, "end of step")
    for name in abi.begin if settings.schedule else ():
        installation.rebind(actor, name, functools.partial(_begin_step_before, installation), "variant of the rollout")
    return installation


def install_loss(args: argparse.Namespace) -> Installation | None:
    """Install into vime's loss module alone, for a program that calls its functions without vime's trainer."""
    settings = Settings.from_env()
    return _install_loss(args, settings, has_output_layer=False) if settings.is_active else None


def _install_loss(args: argparse.Namespace, settings: Settings, *, has_output_layer: bool) -> Installation:
    from vime.backends.megatron_utils import loss

    case = Case(
        platform=probe_platform(),
        tensor_parallel=args.tensor_model_parallel_size,
        context_parallel=args.context_parallel_size,
        loss=read_loss_options(vars(args)),
        has_output_layer=has_output_layer,
    )
    return install_into(loss, settings, trainer=TRAINER, case=case, args=args)


def _prepare_model(installation: Installation, abi: Abi, initialize: Callable[..., Any]) -> Callable[..., Any]:
    """Time Megatron's ``optimizer.step`` (unscaling, clipping, update, parameter copies), and let the actor's model
    leave out its logits where nothing needs them."""
    time_step = functools.partial(installation.profile.time_function, timers=Timers("optimizer"))

    @functools.wraps(initialize)
    def initialize_and_prepare(args: argparse.Namespace, role: str = "actor") -> Any:
        result = initialize(args, role)
        model, optimizer = result[:2]
        installation.rebind(optimizer, "step", time_step, "timer")
        if role == "actor":
            defer_output_layers(installation, model, abi)
        return result

    return initialize_and_prepare


def _begin_step_before(installation: Installation, begin: Callable[..., Any]) -> Callable[..., Any]:
    """Count rollouts here, because vime gives a rollout's number only after its passes without gradient; the count is
    compared with vime's number when the step ends."""
    numbers = itertools.count()

    @functools.wraps(begin)
    def begin_step(*args: Any, **kwargs: Any) -> Any:
        installation.begin_step(next(numbers))
        return begin(*args, **kwargs)

    return begin_step


def _end_step_after(
    installation: Installation, profiled: ProfiledSteps, log_perf_data: Callable[..., Any]
) -> Callable[..., Any]:
    """End the step when vime logs a rollout's timings: on every rank, after the training, before the weight sync."""

    @functools.wraps(log_perf_data)
    def log_and_end_step(rollout_id: int, *args: Any, **kwargs: Any) -> Any:
        result = log_perf_data(rollout_id, *args, **kwargs)
        installation.end_step(rollout_id)
        profiled.end_step(rollout_id)
        return result

    return log_and_end_step
