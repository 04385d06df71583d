"""Install the switch to RL-Kernel into the reference trainer: ``--custom-megatron-init-path`` names ``install``."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from rlk_repro.integration.measure.installation import Installation
from rlk_repro.integration.measure.profile import FORWARD_ONLY, UPDATE, Timers
from rlk_repro.integration.route.api import Turn
from rlk_repro.integration.route.linear_logp import Head, HiddenStates
from rlk_repro.integration.route.rl_kernel import PACKAGE
from rlk_repro.integration.switch import Settings, install_into, probe_platform
from rlk_repro.loss_options import read_loss_options
from rlk_repro.operators import Case, Platform

if TYPE_CHECKING:
    from rlk_repro.refengine.data import Microbatch, Sample
    from rlk_repro.refengine.model import Transformer
    from rlk_repro.refengine.trainer import Trainer

TRAINER: Final = "reference"
PHASES: Final = {"compute_log_probs": FORWARD_ONLY, "_train_step": UPDATE}


def install(args: argparse.Namespace) -> Installation | None:
    """Replace the trainer's functions as the environment variables request; if they request nothing, return None."""
    settings = Settings.from_env()
    if not settings.is_active:
        return None
    if find_spec(PACKAGE) is not None:
        # torch imports this module (40 MB of memory) at RL-Kernel's first gradient, so both variants import it here
        import torch.fx.experimental.symbolic_shapes  # noqa: F401

    from rlk_repro.refengine import core, trainer
    from rlk_repro.refengine.optimizer import AdamW

    platform = Platform.CPU if args.device == "cpu" else probe_platform()
    case = Case(platform=platform, loss=read_loss_options(vars(args)))
    installation = install_into(core, settings, trainer=TRAINER, case=case, args=args)
    time_step = functools.partial(installation.profile.time_function, timers=Timers("optimizer"))
    installation.rebind(AdamW, "step", time_step, "timer")
    record = installation.open_engines(settings.engines_dir)
    engines = None
    if record is not None:
        from rlk_repro.integration.reference_engines import ReferenceEngines

        engines = ReferenceEngines(record)
    installation.rebind_phases(trainer.Trainer, PHASES, None if engines is None else engines.follow_pass)
    if engines is not None:
        installation.rebind(trainer.Trainer, "train", engines.follow_train, "record of engines")
    if installation.ledger.find_rl_kernel("linear_logp") is not None:
        make = functools.partial(_hand_over, installation.turn)
        installation.rebind(trainer, "forward", make, "returns hidden states")
    if settings.schedule:
        make_begin = functools.partial(_begin_step_before, installation)
        installation.rebind(trainer.Trainer, "train", make_begin, "sets the variant")
    if installation.end_step not in trainer.step_end_hooks:
        trainer.step_end_hooks.append(installation.end_step)
        installation.on_undo(trainer.step_end_hooks.remove, installation.end_step)
    return installation


def _begin_step_before(installation: Installation, train: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(train)
    def begin_and_train(self: Trainer, rollout_id: int, samples: Sequence[Sample]) -> None:
        installation.begin_step(rollout_id)
        train(self, rollout_id, samples)

    return begin_and_train


def _hand_over(turn: Turn, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``forward``: while RL-Kernel is in use, return hidden states [1, T, D] and the output layer's weight."""

    @functools.wraps(forward)
    def hand_over(model: Transformer, microbatch: Microbatch) -> Any:
        if not turn.is_enabled:
            return forward(model, microbatch)
        layout = microbatch.layout
        hidden = model.find_hidden_states(microbatch.tokens, layout.positions, layout.attend)
        return HiddenStates.of(hidden.unsqueeze(0), Head(model.output_weight.to(hidden.dtype)))

    return hand_over
