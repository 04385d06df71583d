"""Check that the trainer's Python modules can be imported, before a trial needs them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from rlk_repro.base import proc
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.places import hide_places
from rlk_repro.plan import Plan
from rlk_repro.workloads.checkouts import is_found
from rlk_repro.workloads.environment import profile_env

IMPORT_SCRIPT: Final = Path(__file__).with_name("try_import.py")
# importing torch and Megatron-LM from a cold file system takes minutes
IMPORT_TIMEOUT_S: Final = 600.0
IMPORT_MAX_CHARS: Final = 300
# packages whose name differs from that of their module
IMPORT_DISTRIBUTIONS: Final = {"PIL": "pillow", "yaml": "pyyaml", "cv2": "opencv-python", "sklearn": "scikit-learn"}


def find_absent(names: Iterable[str], trainer_path: str = "") -> Iterator[Finding]:
    for name in names:
        if not is_found(name, trainer_path):
            yield _wrong(f"python module {name}", "installed", "missing")


def try_imports(plan: Plan) -> Iterator[Finding]:
    """Import the trainer's modules in a child process; one finding names all missing ones and how to install them."""
    names = plan.run.workload.imports
    if not names:
        return
    where = f"import {', '.join(names)}"
    env = {**os.environ, **profile_env(plan)[0]}
    done = proc.run([sys.executable, str(IMPORT_SCRIPT), *names], env=env, timeout_s=IMPORT_TIMEOUT_S)
    missing = _read_missing(done.stdout)
    if missing:
        wanted = " ".join(IMPORT_DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in missing)
        expected, found = f"all modules installed (by pip install {wanted})", f"not installed: {', '.join(missing)}"
        yield _wrong(where, expected, found)
    elif done.is_timeout:
        yield Finding(Level.WARNING, where, f"imported within {IMPORT_TIMEOUT_S:g} s", "not imported yet")
    elif not done.is_ok:
        yield _wrong(where, "no error", hide_places(done.last_words)[:IMPORT_MAX_CHARS])


def _read_missing(output: str) -> list[str]:
    try:
        return [str(name) for name in json.loads(output.splitlines()[-1])]
    except (IndexError, ValueError, TypeError):
        return []


def _wrong(where: str, expected: str, found: str) -> Finding:
    return Finding(Level.BLOCKING, where, expected, found)
