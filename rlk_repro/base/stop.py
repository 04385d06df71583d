"""Receive requests to stop: SIGTERM and SIGINT set a flag and wake the waiting thread."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """The first signal that asked to stop, and a file descriptor that becomes readable at every signal."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.wake_fd, self._writer = os.pipe()
        os.set_blocking(self.wake_fd, False)
        os.set_blocking(self._writer, False)

    def request(self, number: int, _frame: FrameType | None = None) -> None:
        self.signal = self.signal or signal.Signals(number)

    def wait(self, timeout_s: float) -> bool:
        """Sleep for ``timeout_s``, or until a signal asks the agent to stop; return whether a signal did."""
        until = time.monotonic() + timeout_s
        while self.signal is None and (left_s := until - time.monotonic()) > 0:
            select.select([self.wake_fd], [], [], left_s)
            self.clear()
        return self.signal is not None

    def clear(self) -> None:
        """Empty the pipe that wakes this thread; ``signal`` still holds the request to stop."""
        try:
            while os.read(self.wake_fd, select.PIPE_BUF):
                pass
        except BlockingIOError:
            return

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT inside the block; only the main thread may call this."""
        previous = {number: signal.getsignal(number) for number in SIGNALS}
        previous_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        try:
            for number in SIGNALS:
                signal.signal(number, self.request)
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_fd)
            os.close(self.wake_fd)
            os.close(self._writer)
