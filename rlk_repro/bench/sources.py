"""Import from the measured trainer what a bench process needs."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final

from rlk_repro.base.errors import EnvironmentMissing, Problem
from rlk_repro.sources import MEGATRON, VIME
from rlk_repro.workloads.checkouts import require_importable

LOSS_MODULE: Final = "vime.backends.megatron_utils.loss"


def load_vime_loss() -> ModuleType:
    """Return vime's loss module; importing it imports Megatron-LM's core.

    Raises:
        EnvironmentMissing: vime, Megatron-LM or a package that they import is absent.
    """
    require_importable(VIME, MEGATRON)
    try:
        return importlib.import_module(LOSS_MODULE)
    except ModuleNotFoundError as error:
        raise EnvironmentMissing(
            Problem(f"python module {error.name}", "missing", expected=f"what {LOSS_MODULE} imports",
                    hint="install the requirements of vime and Megatron-LM")
        ) from error  # fmt: skip
