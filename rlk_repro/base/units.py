"""Format numbers and times for people and for files, and group values."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from datetime import datetime
from typing import Final, TypeVar

SIGNIFICANT_DIGITS: Final = 12
MIB: Final = 1 << 20
GIB: Final = 1 << 30
MINUS: Final = "\N{MINUS SIGN}"

K = TypeVar("K")
V = TypeVar("V")


def canonical(value: float) -> float:
    """Round to 12 significant digits, so that every numpy, libm and processor gives the same bytes."""
    if value == 0 or not math.isfinite(value):
        return value
    return float(f"{value:.{SIGNIFICANT_DIGITS - 1}e}")


def format_duration(seconds: float) -> str:
    """Return a text like ``0.42 s``, ``3 min 05 s`` or ``2 h 07 min``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def parse_minutes(text: str) -> float | None:
    """Read ``1d``, ``4h``, ``90m`` or ``1h30m`` as minutes; None for any other text and for zero."""
    found = re.fullmatch(r"(?:(\d{1,4})d)?(?:(\d{1,5})h)?(?:(\d{1,6})m(?:in)?)?", text.strip())
    days, hours, minutes = (0, 0, 0) if found is None else (int(part or 0) for part in found.groups())
    return float(days * 1440 + hours * 60 + minutes) or None


def format_bytes(size_bytes: float) -> str:
    """Return a size like ``512 B`` or ``1.5 MiB``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_number(value: float, digits: int = 4) -> str:
    return f"{value:.{digits}g}"


def format_percent(ratio: float) -> str:
    """Return a change with its sign: the ratio 0.95 is ``-5.00 %``."""
    return f"{(ratio - 1) * 100:+z.2f} %"


def format_change(ratio: float, decimals: int = 2) -> str:
    """Return a change as reports spell it: the ratio 0.95 is ``−5.00 %``, and one that rounds to 1 is ``0 %``."""
    text = f"{(ratio - 1) * 100:+,.{decimals}f}".replace("-", MINUS)
    return f"{text} %" if text.strip(f"+{MINUS}0.") else "0 %"


def format_interval(low: float | None, high: float | None, decimals: int | None = None) -> str:
    """Return the interval of a ratio as a change, like ``−2.97 to −2.86 %``; a wide one has fewer decimals."""
    if low is None or high is None:
        return "n/a"
    shown = find_decimals(low, high) if decimals is None else decimals
    ends = [format_change(end, shown) for end in (low, high)]
    if ends == ["0 %", "0 %"]:
        return f"within {10**-shown:g} %"
    return f"{ends[0].removesuffix(' %')} to {ends[1]}"


def find_decimals(low: float | None, high: float | None) -> int:
    """Return the number of decimals that percentages with this interval deserve."""
    width = 0.0 if low is None or high is None else 100 * (high - low)
    if width < 4:
        return 2
    return 1 if width < 20 else 0


def format_count(value: int) -> str:
    return f"{value:,}"


def count(number: int, noun: str, nouns: str = "") -> str:
    """Return a text like ``1 pair`` or ``9,216 tokens``; ``nouns`` is the plural if it is not ``noun`` + s."""
    return f"{format_count(number)} {noun if number == 1 else nouns or noun + 's'}"


def name_some(items: Iterable[str], limit: int = 3) -> str:
    names = list(items)
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def group(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Map each key to its values; keys and values stay in the order of the pairs."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


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
