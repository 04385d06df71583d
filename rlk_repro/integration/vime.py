"""Install the switch to RL-Kernel into every training process of vime.

vime calls ``install`` (``--custom-megatron-init-path``) after it creates its process groups and before it builds the
model.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any, Final

from rlk_repro.base.errors import EnvironmentMissing
from rlk_repro.integration.measure.installation import Installation, find_signature_problems
from rlk_repro.integration.measure.profile import FORWARD_ONLY, UPDATE, Timers
from rlk_repro.integration.output_layers import defer_output_layers
from rlk_repro.integration.switch import Settings, install_into, probe_platform
from rlk_repro.integration.vime_abi import (
    ACTOR_MODULE,
    BEGIN,
    BEGIN_SIGNATURE,
    LOSS_MODULE,
    REPLAY,
    UPDATERS,
)
from rlk_repro.integration.vime_engines import VimeEngines
from rlk_repro.loss_options import read_loss_options
from rlk_repro.operators import Case

TRAINER: Final = "vime"
PHASES: Final = {"forward_only": FORWARD_ONLY, "train": UPDATE}


def install(args: argparse.Namespace) -> Installation | None:
    """Replace vime's functions as the environment variables request; if they request nothing, return None."""
    settings = Settings.from_env()
    if not settings.is_active:
        return None
    from vime.backends.megatron_utils import actor, loss

    replays = _find_routing_replay(args, settings)
    expected = [(actor, ACTOR_MODULE), (loss, LOSS_MODULE), *((item, REPLAY) for item in replays)]
    if settings.schedule:
        expected.append((actor, BEGIN_SIGNATURE))
    problems = [item for owner, names in expected for item in find_signature_problems(owner, names)]
    if problems:
        raise EnvironmentMissing(*problems)
    installation = _install_loss(args, settings, has_output_layer=True)
    make_initialize = functools.partial(_prepare_model, installation)
    installation.rebind(actor, "initialize_model_and_optimizer", make_initialize, "optimizer timer, output layers")
    record = installation.open_engines(settings.engines_dir)
    engines = None if record is None else VimeEngines(record)
    installation.rebind_phases(actor, PHASES, None if engines is None else engines.follow_pass)
    if engines is not None:
        installation.rebind(actor, BEGIN, engines.follow_begin, "record of engines")
        for name, send in UPDATERS.items():
            followers = {
                "connect_rollout_engines": engines.server.follow_connect,
                "update_weights": engines.weights.follow_update,
                send: engines.weights.follow_send,
            }
            for method, follow in followers.items():
                installation.rebind(getattr(actor, name), method, follow, "record of engines")
    make_end = functools.partial(_end_step_after, installation)
    installation.rebind(actor, "log_perf_data", make_end, "end of step")
    if settings.schedule:
        installation.rebind(actor, BEGIN, functools.partial(_begin_step_before, installation), "sets the variant")
    for replay in replays:
        _count_replays(installation, replay)
    return installation


def install_loss(args: argparse.Namespace) -> Installation | None:
    """Replace functions of vime's loss module only, for a program that calls them without vime's trainer."""
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


def _find_routing_replay(args: argparse.Namespace, settings: Settings) -> list[Any]:
    """Return vime's class that replays the rollout's experts (R3), if a session uses it."""
    if not settings.schedule or not getattr(args, "use_rollout_routing_replay", False):
        return []
    from vime.utils.routing_replay import RoutingReplay

    return [RoutingReplay]


def _count_replays(installation: Installation, replay: Any) -> None:
    """At the end of a pass, count the routers that took all of the rollout's experts.

    vime itself does not check this.
    """

    def make_count(clear: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(clear)
        def count_and_clear() -> None:
            routers = replay.all_routing_replays
            installation.replays.append((sum(map(_has_replayed, routers)), len(routers)))
            clear()

        return count_and_clear

    for name in REPLAY:
        installation.rebind(replay, name, make_count, "counts routers that replayed")


def _has_replayed(router: Any) -> bool:
    """Tell whether a router took each choice once, and once more if its layer was recomputed."""
    recorded = len(router.top_indices_list)
    is_whole = router.forward_index == recorded and router.backward_index in {0, recorded}
    return recorded > 0 and is_whole


def _prepare_model(installation: Installation, initialize: Callable[..., Any]) -> Callable[..., Any]:
    """Time Megatron's ``optimizer.step``: unscaling, clipping, update and parameter copies."""
    time_step = functools.partial(installation.profile.time_function, timers=Timers("optimizer"))

    @functools.wraps(initialize)
    def initialize_and_prepare(args: argparse.Namespace, role: str = "actor") -> Any:
        result = initialize(args, role)
        model, optimizer = result[:2]
        installation.rebind(optimizer, "step", time_step, "timer")
        if role == "actor":
            defer_output_layers(installation, model)
        return result

    return initialize_and_prepare


def _begin_step_before(installation: Installation, begin: Callable[..., Any]) -> Callable[..., Any]:
    """Count the rollouts, because vime reports a rollout's number only after the passes without gradient."""
    numbers = itertools.count()

    @functools.wraps(begin)
    def begin_step(*args: Any, **kwargs: Any) -> Any:
        installation.begin_step(next(numbers))
        return begin(*args, **kwargs)

    return begin_step


def _end_step_after(installation: Installation, log_perf_data: Callable[..., Any]) -> Callable[..., Any]:
    """Every rank calls ``log_perf_data`` between training and weight sync."""

    @functools.wraps(log_perf_data)
    def log_and_end_step(rollout_id: int, *args: Any, **kwargs: Any) -> Any:
        result = log_perf_data(rollout_id, *args, **kwargs)
        installation.end_step(rollout_id)
        return result

    return log_and_end_step
