"""Start the child processes of a pod's first process: the node agent, and Ray if KubeRay made the pod."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from typing import Final

from rlk_repro.agent.ray.launch import SETTINGS, require_tokens
from rlk_repro.agent.ray.node import raise_file_limit
from rlk_repro.base.errors import EnvironmentMissing, Problem
from rlk_repro.base.guarded import Guarded
from rlk_repro.clusters.k8s.pod.roster import Roster
from rlk_repro.rundir.paths import RunDir

RAY_COMMAND: Final = "KUBERAY_GEN_RAY_START_CMD"
MAKER: Final = "a pod that KubeRay 1.5.1 or later made"
RAY_GRACE_S: Final = 10.0
_STDERR: Final = 2


def start_ray(environ: Mapping[str, str]) -> Guarded:
    """Start Ray with the exact command that KubeRay would have run in this container."""
    require_tokens()
    command = environ.get(RAY_COMMAND)
    if not command:
        raise EnvironmentMissing(Problem(RAY_COMMAND, "not set", expected=MAKER))
    if environ.get("RAY_AUTH_MODE") != "token" or not environ.get("RAY_AUTH_TOKEN"):
        what = "not set: anyone who reaches Ray's ports could run any code"
        raise EnvironmentMissing(Problem("RAY_AUTH_TOKEN", what, expected=MAKER))
    raise_file_limit()
    words = [os.path.expandvars(word) for word in shlex.split(command)]
    return Guarded(words, {**environ, **SETTINGS}, _STDERR)


def start_agent(run_dir: RunDir, node: str, roster: Roster, env: Mapping[str, str]) -> Guarded:
    argv = [sys.executable, "-m", "rlk_repro.job", str(run_dir.root), "--resume", "--node", node]
    argv += ["--nodes", ",".join(roster.nodes), "--allocation", roster.allocation]
    return Guarded(argv, env, _STDERR)
