"""Check that the trainer's Python modules can be imported, before a trial needs them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Final

from rlk_repro.base import proc
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.places import hide_places
from rlk_repro.plan import Plan
from rlk_repro.workloads.environment import profile_env

# importing torch and Megatron-LM from a cold file system takes minutes
IMPORT_TIMEOUT_S: Final = 600.0
IMPORT_MAX_CHARS: Final = 300


def try_imports(plan: Plan) -> Iterator[Finding]:
    """Import the trainer's modules in a child process, which may fail in any way."""
    names = ", ".join(plan.run.workload.imports)
    if not names:
        return
    where, env = f"import {names}", {**os.environ, **profile_env(plan)[0]}
    done = proc.run([sys.executable, "-P", "-c", f"import {names}"], env=env, timeout_s=IMPORT_TIMEOUT_S)
    if done.is_timeout:
        yield Finding(Level.WARNING, where, f"imported within {IMPORT_TIMEOUT_S:g} s", "not imported yet")
    elif not done.is_ok:
        yield Finding(Level.BLOCKING, where, "no error", hide_places(done.last_words)[:IMPORT_MAX_CHARS])
