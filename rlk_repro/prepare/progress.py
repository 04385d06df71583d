from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from rlk_repro.base.units import format_bytes, format_duration
from rlk_repro.prepare.making import Tell, WorkDir

LIVE_S: Final = 1.0
PLAIN_S: Final = 30.0


@contextmanager
def watch_growth(folder: Path, what: str, expected: int | None, tell: Tell, *, is_live: bool) -> Iterator[None]:
    """Inside the ``with`` block, report the size of the unfinished copy of ``folder``, the speed and the time left."""
    stop = threading.Event()
    work = WorkDir.of(folder).path

    def watch() -> None:
        first, started_s = measure(work), time.monotonic()
        while not stop.wait(LIVE_S if is_live else PLAIN_S):
            size_bytes = measure(work)
            if size_bytes:
                tell(f"{what}: {describe(size_bytes, first, expected, time.monotonic() - started_s)}")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def describe(size_bytes: int, first: int, missing: int | None, elapsed_s: float) -> str:
    """Describe the growth of a folder that held ``first`` bytes when ``missing`` bytes were still to come.

    The time left is given from one percent of ``missing`` on, because first files are often small and slow.
    """
    growth = size_bytes - first
    speed = growth / elapsed_s if elapsed_s > 0 else 0.0
    text = format_bytes(size_bytes)
    if missing:
        text += f" of {format_bytes(max(first + missing, size_bytes))}"
    if speed <= 0:
        return text
    text += f", {format_bytes(int(speed))}/s"
    left = (missing - growth) / speed if missing and growth >= missing / 100 else 0.0
    return f"{text}, {format_duration(left)} left" if left > 0 else text


def measure(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # os.walk skips a folder that vanished; rglob would raise an error
        for name in names:
            with suppress(OSError):
                total += Path(parent, name).stat().st_size
    return total
