"""Print as JSON which operators RL-Kernel chooses on this machine: ``python -m rlk_repro.images.resolve``.

The module runs as a separate process, because importing RL-Kernel can fail and can occupy a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, Final

from rlk_repro.base import proc
from rlk_repro.operators import OPERATORS
from rlk_repro.rundir.manifest import Unknown

NAMES: Final = ("logp", "ratio_kl", "grpo_loss", "linear_logp")
TIMEOUT_S: Final = 600.0


def ask_registry(environ: Mapping[str, str] | None = None) -> dict[str, Any] | Unknown:
    """Run this module as a process; return its answer, or its last output if the process failed."""
    argv = [sys.executable, "-P", "-m", __name__]
    done = proc.run(argv, env=environ, timeout_s=TIMEOUT_S)
    if not done.is_ok:
        return Unknown(done.last_words)
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def resolve() -> dict[str, Any]:
    """Return RL-Kernel's platform, the error of loading its extension, and the class name for each operator."""
    from rl_engine.kernels import registry
    from rl_engine.platforms.device import device_ctx

    backends = getattr(getattr(registry, "OpBackend", None), "__members__", {})
    chosen = {name: registry.kernel_registry.get_op(OPERATORS[name].find_registered(backends)) for name in NAMES}
    return {
        "platform": device_ctx.device_type if device_ctx.device_type in ("cuda", "rocm") else "cpu",
        "extension_error": _import_extension(),
        "operators": {name: type(op).__name__ for name, op in chosen.items()},
    }


def _import_extension() -> str:
    # The caller has already imported torch, which the extension needs.
    try:
        import rl_engine._C  # noqa: F401
    except ImportError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    print(json.dumps(resolve()))  # noqa: T201
