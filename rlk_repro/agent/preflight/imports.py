"""Check that the trainer's modules can be imported: a child process imports them before the first trial."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rlk_repro.base import proc
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.places import hide_places
from rlk_repro.plan import Plan
from rlk_repro.workloads.environment import profile_env

SCRIPT: Final = Path(__file__).with_name("try_import.py")
# importing torch and Megatron-LM from a cold file system takes minutes
TIMEOUT_S: Final = 600.0
MAX_CHARS: Final = 300
# packages whose name differs from that of their module
DISTRIBUTIONS: Final = {"PIL": "pillow", "yaml": "pyyaml", "cv2": "opencv-python", "sklearn": "scikit-learn"}


def check_imports(plan: Plan) -> Iterator[Finding]:
    """Yield one finding that lists all missing modules and the command that installs them."""
    names = plan.run.workload.imports
    if not names:
        return
    where = f"import {', '.join(names)}"
    env = {**os.environ, **profile_env(plan)[0]}
    done = proc.run([sys.executable, str(SCRIPT), *names], env=env, timeout_s=TIMEOUT_S)
    missing = _read_answer(done.stdout)
    if missing:
        wanted = " ".join(DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in missing)
        expected, found = f"all modules installed (by pip install {wanted})", f"not installed: {', '.join(missing)}"
        yield Finding(Level.BLOCKING, where, expected, found)
    elif done.is_timeout:
        yield Finding(Level.WARNING, where, f"imported within {TIMEOUT_S:g} s", "not imported yet")
    elif not done.is_ok:
        yield Finding(Level.BLOCKING, where, "no error", hide_places(done.last_words)[:MAX_CHARS])


def _read_answer(output: str) -> list[str]:
    try:
        return [str(name) for name in json.loads(output.splitlines()[-1])]
    except (IndexError, ValueError, TypeError):
        return []
