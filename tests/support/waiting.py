"""Tests wait for what must come; how long it may take is the machine's business."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlk_repro.agent import process

LIMIT_S = 120.0


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < until, "it never was so"
        time.sleep(0.01)


def is_written(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def signal_when(is_so: Callable[[], bool], number: signal.Signals) -> None:
    """Signal this process, once, from a thread."""

    def work() -> None:
        wait_until(is_so)
        os.kill(os.getpid(), number)

    threading.Thread(target=work, daemon=True).start()


def let_time_pass(monkeypatch: pytest.MonkeyPatch, seconds: float, once: Path) -> None:
    """To whoever watches a trainer, ``seconds`` pass when ``once`` is written; its next output makes it look."""
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + (seconds if is_written(once) else 0.0))
    monkeypatch.setattr(process, "time", clock)
