"""Convert times between Unix seconds and the text that rlk-repro's files use."""

from __future__ import annotations

import time
from datetime import datetime


def format_utc(unix_s: float) -> str:
    """Return a time like ``2026-11-20T13:45:12.345Z``."""
    whole, milliseconds = divmod(int(unix_s * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{milliseconds:03d}Z"


def utc_now() -> str:
    return format_utc(time.time())


def parse_utc(text: str) -> float:
    """Return Unix seconds; raise ValueError for a text that is not a UTC time in ISO format."""
    if not text.endswith("Z"):
        raise ValueError("not UTC")
    return datetime.fromisoformat(text).timestamp()
