"""Let pods show each other that they still run: each keeps changing a file on the shared file system."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Final, Self

_WIDTH: Final = 20


class Pulse:
    """A context manager whose thread writes the time to a file at regular intervals, and ``text`` on the next line."""

    def __init__(self, path: Path, interval_s: float, text: str = "") -> None:
        self._path = path
        self._text = text
        self._interval_s = interval_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            # a full disk must not look like a dead agent: the same few bytes are overwritten in place
            with contextlib.suppress(OSError):
                self._beat()
            if self._is_over.wait(self._interval_s):
                return

    def _beat(self) -> None:
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            written = os.pwrite(handle, f"{time.time_ns():{_WIDTH}}\n{self._text}".encode(), 0)
            os.ftruncate(handle, written)  # an earlier process may have written a longer text
        finally:
            os.close(handle)
