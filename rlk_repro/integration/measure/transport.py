"""Read from NCCL's log which transport NCCL uses; only this log reports the transport.

Without a fast fabric NCCL falls back to TCP, and the slow network then dominates all times of a run.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.files import read_start

LOG_VARIABLE: Final = "NCCL_DEBUG_FILE"
MAX_LOG_BYTES: Final = 16 << 20
_NETWORK: Final = re.compile(r"NCCL INFO (?:Using network|Assigned NET plugin) (.+?)(?: to comm)?$", re.M)
_PATH: Final = re.compile(r"NCCL INFO Channel \S+ : .* via (\S+)", re.M)
_PLACE: Final = re.compile(r"/[0-9]+(?:\([0-9]+\))?")
_NVLS: Final = re.compile(r"NCCL INFO (?:NVLS comm 0x|Connected NVLS tree)", re.M)
_MNNVL: Final = re.compile(r"NCCL INFO .*\bMNNVL [1-9]", re.M)


def read_transport(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    pattern = (os.environ if environ is None else environ).get(LOG_VARIABLE)
    if not pattern:
        return {"unknown": f"{LOG_VARIABLE} is not set"}
    host = socket.gethostname().partition(".")[0]
    try:
        data = read_start(Path(pattern.replace("%h", host).replace("%p", str(os.getpid()))), MAX_LOG_BYTES)
    except BundleUnreadable:
        return {"unknown": "NCCL has written no log"}
    return parse_transport(data.decode(errors="replace"))


def parse_transport(log: str) -> dict[str, Any]:
    """Read from NCCL's log: the network between nodes, the channels' transports, and whether NVLS and MNNVL are on."""
    networks = sorted({match[1] for match in _NETWORK.finditer(log)})
    return {
        "network": ", ".join(networks) or "none",
        "paths": sorted({_PLACE.sub("", match[1]) for match in _PATH.finditer(log)}),
        "nvls": _NVLS.search(log) is not None,
        "mnnvl": _MNNVL.search(log) is not None,
    }
