"""Read the state of the kernel's clock: whether it is synchronized to UTC, and how large its error may be.

The call ``adjtimex`` without a mode only reads, and works in containers, which have no time daemon to ask.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Final

from rlk_repro.rundir.manifest import Fact, Unknown

# struct timex on 64-bit Linux begins: modes, padding, offset, freq, maxerror, esterror, status
TIMEX: Final = struct.Struct("@i4xqqqqi")
TIMEX_BYTES: Final = 256
UNSYNCHRONISED: Final = 0x40  # STA_UNSYNC


def probe_clock() -> dict[str, Fact]:
    buffer = ctypes.create_string_buffer(TIMEX_BYTES)
    try:
        answer = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except (OSError, AttributeError):
        return _unknown("this C library has no adjtimex")
    if answer < 0:
        return _unknown(f"adjtimex: {os.strerror(ctypes.get_errno())}")
    return read_timex(buffer.raw)


def read_timex(data: bytes) -> dict[str, Fact]:
    _, _, _, max_error_us, _, status = TIMEX.unpack_from(data)
    is_synchronized = not status & UNSYNCHRONISED
    error: Fact = round(max_error_us / 1e6, 3) if is_synchronized else Unknown("this clock is not synchronized")
    return {"clock_is_synchronized": is_synchronized, "clock_max_error_s": error}


def _unknown(reason: str) -> dict[str, Fact]:
    return {"clock_is_synchronized": Unknown(reason), "clock_max_error_s": Unknown(reason)}
