"""Ports for daemons that cannot choose their own: the port must be known before it is bound."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from typing import Final

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
