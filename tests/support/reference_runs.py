"""Runs of the reference trainer in the process of the tests, which has imported torch already."""

from __future__ import annotations

import os
import re
from unittest import mock

import pytest

from rlk_repro.integration.measure.installation import find_installation
from rlk_repro.integration.switch import TIMERS
from rlk_repro.refengine import core
from rlk_repro.refengine.__main__ import main

SMALL = (
    "--rollout-batch-size 4 --n-samples-per-prompt 4 --micro-batch-size 8 --use-kl-loss "
    "--kl-loss-coef 0.1 --num-steps-per-rollout 2 --entropy-coef 0 --num-threads 1 "
    "--device cpu --seed 3 --custom-megatron-init-path rlk_repro.integration.reference.install"
)


def run_trainer(caplog: pytest.LogCaptureFixture, flags: str, **switches: str) -> list[str]:
    """Run the trainer with these environment variables; return its lines of optimizer steps."""
    prefixes = ("VIME_", "RLK_REPRO_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    caplog.clear()
    try:
        environment = mock.patch.dict(os.environ, kept | switches, clear=True)
        with environment, caplog.at_level("INFO"):
            assert main(flags.split()) == 0
    finally:
        installation = find_installation(core, TIMERS)
        if installation is not None:
            installation.undo()
    return [message for message in caplog.messages if re.match(r"step \d+: ", message)]
