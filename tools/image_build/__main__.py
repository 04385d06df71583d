"""Run one step of an image's build: ``python -m tools.image_build STEP``; see the Dockerfiles."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Final

from rlk_repro.base.errors import finish
from tools.image_build.inputs import is_locked, read_inputs

STEPS: Final = {
    "inputs": "inputs.check_inputs",
    "transformer-engine": "locked.install_transformer_engine",
    "package": "package.install_package",
    "vime": "locked.install_vime",
    "sources": "locked.install_sources",
    "rl-kernel": "kernels.install",
    "imports": "locked.check_imports",
    "record": "package.write_record",
}
"""The function of each step; only its own module is imported, because the first steps run before any installation."""


def run_step(step: str) -> None:
    if is_locked():
        from tools.image_build.locked import use_toolkit

        os.environ.update(use_toolkit(os.environ))
    module, _, name = STEPS[step].partition(".")
    getattr(importlib.import_module(f"tools.image_build.{module}"), name)(read_inputs())


if __name__ == "__main__":
    sys.exit(finish(lambda: run_step(sys.argv[1]), has_title=False))
