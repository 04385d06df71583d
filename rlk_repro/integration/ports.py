"""Give the engines of a run ports of their own where several runs of vime share a machine.

vime looks for free ports from 15000 on, and its engines bind them some 20 s later. So two runs that start together
choose the same ports, and the second engine ends. The port of a run's Ray tells the runs of a machine apart.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

FIRST: Final = 15_000
"""Where vime looks first; it takes some 34 ports for an engine."""
END: Final = 20_000
"""From here on, vime looks for ports of its trainers."""
DISTANCE: Final = 40
NUM_PLACES: Final = 120
DEFAULT_RAY_PORT: Final = 6379
FIRST_OWN: Final = "RLK_REPRO_FIRST_ENGINE_PORT"
MODULE: Final = "vime.ray.ray_actor"


def use_own_ports() -> None:
    """Connect the driver to Ray so that every worker calls ``watch``; not for a run on Ray's usual port."""
    first = find_engine_port(os.environ.get("RAY_ADDRESS", ""))
    if first == FIRST:
        return
    import ray

    hook = f"{__name__}.{watch.__name__}"
    ray.init(runtime_env={"worker_process_setup_hook": hook, "env_vars": {FIRST_OWN: str(first)}})


def find_engine_port(ray_address: str) -> int:
    """Return where a run's engines look first for free ports, by the port of its Ray.

    The ports from 6379 to 6498 give 15000 to 19760, and these repeat.
    """
    port = ray_address.rpartition(":")[2]
    place = int(port) - DEFAULT_RAY_PORT if port.isdecimal() else 0
    return FIRST + place % NUM_PLACES * DISTANCE


def watch() -> None:
    """Change vime's search when this worker imports it; an import now would load torch into idle workers."""
    sys.meta_path.insert(0, _Watch())


class _Watch(MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            begin_at(module, int(os.environ[FIRST_OWN]))

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def begin_at(module: Any, first: int) -> None:
    """Let ``get_free_port`` of vime's module look for an engine's ports from ``first`` on."""
    find = module.get_free_port

    def get_free_port(start_port: int = 10_000, consecutive: int = 1) -> int:
        is_for_engine = FIRST <= start_port < END
        found: int = find(max(start_port, first) if is_for_engine else start_port, consecutive)
        return found

    module.get_free_port = get_free_port
    sys.stderr.write(f"rlk-repro: {MODULE}.get_free_port replaced: engines look for ports from {first} on\n")
