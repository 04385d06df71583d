"""Use a Ray cluster that somebody else keeps up, as KubeRay does: no agent starts or ends it.

Each trial passes its environment to the workers, because they may be older than the trial.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final

from rlk_repro.agent.ray.launch import SETTINGS, TOKEN_NAMES
from rlk_repro.agent.step import Step
from rlk_repro.workloads.api import Command
from rlk_repro.workloads.environment import JOB_CONFIG, OVERRIDE_JOB_CONFIG, resolve_env

ADDRESS_VARIABLE: Final = "RLK_REPRO_RAY_ADDRESS"
"""Variable set by the process that started the agent: the address of a Ray cluster that the agent must not end."""


class GivenRay:
    """Behaves like a ``RayNode`` that is always up."""

    is_up = True
    reason = ""

    def __init__(self, address: str, command: Command) -> None:
        self.client_env = render_given_env(address, command, dict(os.environ))
        self.asking_env = {**os.environ, **SETTINGS, "RAY_ADDRESS": address}

    def keep(self, *, is_joining: bool) -> None:
        """Nothing: its owner keeps it up."""

    def put_away(self, step: Step) -> None:
        """Nothing: its owner ends it."""


def render_given_env(address: str, command: Command, outside: dict[str, str]) -> dict[str, str]:
    """Return the variables by which a trial reaches a Ray that already runs, and by which its workers get their own."""
    inner = resolve_env(command, outside)
    own = {name: value for name, value in inner.items() if outside.get(name) != value}
    asked: Any = json.loads(own.pop(JOB_CONFIG, "{}")).get("runtime_env", {})
    config = {"runtime_env": {**asked, "env_vars": own}, "metadata": {}}
    # a trial gets the token of this Ray cluster, but no other token of the agent's environment
    token = {name: outside[name] for name in TOKEN_NAMES if name in outside}
    return {
        **SETTINGS,
        **token,
        "RAY_ADDRESS": address,
        JOB_CONFIG: json.dumps(config, sort_keys=True),
        OVERRIDE_JOB_CONFIG: "1",
    }
