"""Which RL-Kernel this process of tests can import."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
