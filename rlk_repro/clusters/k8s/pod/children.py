"""The processes that a pod's first process starts: Ray where KubeRay brings it, and the node agent."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from subprocess import Popen  # noqa: TID251 (the type of what proc starts)
from typing import Final

from rlk_repro.agent.ray.launch import SETTINGS, require_tokens
from rlk_repro.agent.ray.node import raise_file_limit
from rlk_repro.base import proc
from rlk_repro.base.errors import EnvironmentMissing, Problem
from rlk_repro.clusters.k8s.pod.roster import Roster
from rlk_repro.rundir.paths import RunDir

RAY_COMMAND: Final = "KUBERAY_GEN_RAY_START_CMD"
MAKER: Final = "a pod that KubeRay 1.5.1 or later made"
RAY_GRACE_S: Final = 10.0
_STDERR: Final = 2


class Child:
    """One process with its own group; ``code`` is None while it runs."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._process: Popen[bytes] = proc.start(argv, output_fd=_STDERR, env=env)

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def ask(self) -> None:
        """The process alone: it ends its own."""
        if self.code is None:
            proc.signal_process(self._process.pid, signal.SIGTERM)

    def end(self, grace_s: float) -> None:
        self.ask()
        if not proc.wait(self._process, grace_s):
            proc.signal_group(self._process.pid, signal.SIGKILL)
            self._process.wait()


def start_ray(environ: Mapping[str, str]) -> Child:
    """What KubeRay would have run in this container, word by word.

    Raises:
        EnvironmentMissing: KubeRay left no command or no token, or Ray is too old for one.
    """
    require_tokens()
    command = environ.get(RAY_COMMAND)
    if not command:
        raise EnvironmentMissing(Problem(RAY_COMMAND, "not set", expected=MAKER))
    if environ.get("RAY_AUTH_MODE") != "token" or not environ.get("RAY_AUTH_TOKEN"):
        what = "not set: whoever reaches Ray's ports would run what they like"
        raise EnvironmentMissing(Problem("RAY_AUTH_TOKEN", what, expected=MAKER))
    raise_file_limit()
    words = [os.path.expandvars(word) for word in shlex.split(command)]
    return Child(words, {**environ, **SETTINGS})


def start_agent(run_dir: RunDir, node: str, roster: Roster, env: Mapping[str, str]) -> Child:
    argv = [sys.executable, "-m", "rlk_repro.job", str(run_dir.root), "--resume", "--node", node]
    argv += ["--nodes", ",".join(roster.nodes), "--allocation", roster.allocation]
    return Child(argv, env)
