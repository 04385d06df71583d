"""RL-Kernel's later generation for tests: on the path, in a route, and problems for it.

The double of tests/support/fake_rl_engine_runtime has only what is new; with the other double behind it, it is whole.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlk_repro.integration.route.api import Route, RouteContext
from rlk_repro.integration.route.table import ROUTES
from rlk_repro.operators import Case

TESTS = Path(__file__).parent
LATER, EARLIER = TESTS / "fake_rl_engine_runtime/rl_engine", TESTS / "fake_rl_engine/rl_engine"
REAL = os.environ.get("RLK_LATER_SRC", "")
CPU = Case(platform="cpu")
NAME = "vocab_parallel_logp"


def write_package(folder: Path, *sources: Path) -> None:
    """An ``rl_engine`` whose modules are looked for in each of the sources, one after another."""
    package = folder / "rl_engine"
    package.mkdir()
    (package / "__init__.py").write_text(f"__path__ += {[str(source) for source in sources]!r}\n")


@contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """This process knows the ``rl_engine`` of a folder and no other; afterwards none."""
    forget()
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "rl_engine"]:
        del sys.modules[name]
    importlib.invalidate_caches()


def get_registry() -> Any:
    return importlib.import_module("rl_engine.runtime.registry").kernel_registry


def make_route(case: Case = CPU, name: str = NAME) -> Route:
    found = ROUTES[name](RouteContext(case=case, native=lambda **_: "native", args=None))
    assert isinstance(found, Route), found
    return found


def make_call(logits: torch.Tensor, tokens: torch.Tensor, group: Any = None, **changes: Any) -> dict[str, Any]:
    call = {"logits": logits, "tokens": tokens, "tp_group": group, "with_entropy": True, "chunk_size": -1,
            "log_prob_keep_mask": None, "with_entropy_grad": False}  # fmt: skip
    return call | changes


def make_problem(seed: int, columns: int = 48, rows: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, columns, generator=generator) * 3
    return logits, torch.randint(columns, (rows,), generator=generator), torch.randn(rows, generator=generator)
