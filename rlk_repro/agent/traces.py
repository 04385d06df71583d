"""Search a trial's profiler traces for secrets before they are packed; a trace that may hold one is withheld."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rlk_repro.base.files import write_text
from rlk_repro.base.findings import Finding, Level

_BLOCK_BYTES: Final = 1 << 20
_OVERLAP_BYTES: Final = 1 << 13
"""A secret of at most this length is found where two blocks meet."""

SEARCH_S: Final = 300.0
"""Seconds in which the traces of one trial are searched.  A trace that is not searched by then is withheld."""


def withhold_traces(
    folder: Path, where: str, scrub: Callable[[bytes], bytes], *, within_s: float = SEARCH_S
) -> list[Finding]:
    """Replace each trace that holds a secret, or that no time is left to search, by a note; return one warning each."""
    until = time.monotonic() + within_s
    findings = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        reason = _find_reason(path, scrub, until)
        if reason is None:
            continue
        path.unlink()
        write_text(path.with_name(f"{path.name}.withheld.txt"), f"This trace is withheld: {reason}.\n")
        findings.append(
            Finding(Level.WARNING, f"{where}: {path.name}", "a trace without secrets", f"{reason}: withheld")
        )
    return findings


def _find_reason(path: Path, scrub: Callable[[bytes], bytes], until: float) -> str | None:
    """Return why the trace is withheld; None if it was searched and holds no known secret."""
    kept = b""
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            if time.monotonic() > until:
                return "not searched for secrets in time"
            text = kept + block
            if scrub(text) != text:
                return "it holds what looks like a secret"
            kept = text[-_OVERLAP_BYTES:]
    return None
