"""Time as our files write it."""

from __future__ import annotations

import time
from datetime import datetime


def format_utc(unix_s: float) -> str:
    """``2026-11-20T13:45:12.345Z``."""
    whole, milliseconds = divmod(int(unix_s * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{milliseconds:03d}Z"


def utc_now() -> str:
    return format_utc(time.time())


def parse_utc(text: str) -> float:
    """Unix seconds of what ``format_utc`` wrote.

    Raises:
        ValueError: it is something else.
    """
    if not text.endswith("Z"):
        raise ValueError("not UTC")
    return datetime.fromisoformat(text).timestamp()
