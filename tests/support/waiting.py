"""Tests wait for what must come; how long it may take is the machine's business."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Final

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


# Ports for daemons that cannot choose their own: the port must be known before it is bound.


# Below the ports that Linux hands out by itself and above Ray's: nobody who binds port 0 takes one before its daemon
# does. Each worker of the tests has a block of its own.
_FIRST: Final = 20000
_PER_WORKER: Final = 1000
_NUM_WORKERS: Final = 12
_given: Final[set[int]] = set()
_lock: Final = threading.Lock()  # pods are started in threads


def find_ports(count: int) -> list[int]:
    """Free ports of the loopback interface, none of them given before in this process."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _NUM_WORKERS
    block = range(_FIRST + worker * _PER_WORKER, _FIRST + (worker + 1) * _PER_WORKER)
    found: list[int] = []
    with _lock:
        for port in random.sample(block, len(block)):
            if port in _given:
                continue
            with contextlib.suppress(OSError), socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                _given.update(found)
                return found
    raise AssertionError(f"no {count} free ports in {block}")


def find_port() -> int:
    """One of them."""
    return find_ports(1)[0]
