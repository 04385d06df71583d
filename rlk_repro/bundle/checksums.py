"""Write SHA256SUMS, which ``sha256sum -c`` can read, and find files that differ from it."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeAlias

from rlk_repro.base.escapes import printable
from rlk_repro.base.findings import MAX_FINDINGS, Finding, Level
from rlk_repro.rundir.paths import RunDir

CHECKSUMS: Final = str(RunDir(Path()).checksums)
Piece: TypeAlias = bytes | memoryview

CODEC: Final = ("utf-8", "surrogateescape")
_LINE: Final = re.compile(rb"(\\?)([0-9a-f]{64})  (.+)", re.DOTALL)
_ESCAPES: Final = {b"\\": rb"\\", b"\n": rb"\n", b"\r": rb"\r"}
_PLAIN: Final = {escape: plain for plain, escape in _ESCAPES.items()}


def render_checksums(digests: Mapping[str, str]) -> bytes:
    """Return one line per file, sorted by the bytes of the name; a name with a line break or backslash is escaped."""
    return b"".join(_render_line(name, digests[name]) for name in sorted(digests, key=sort_key))


def sort_key(name: str) -> bytes:
    return name.encode(*CODEC)


def parse_checksums(data: bytes) -> tuple[dict[str, str], list[Finding]]:
    """Return digests by file name, and a finding for each line that ``render_checksums`` would write differently."""
    digests: dict[str, str] = {}
    findings: list[Finding] = []
    previous = b""
    for number, line in enumerate(io.BytesIO(data), start=1):
        if len(findings) >= MAX_FINDINGS:
            found = "too many wrong lines; reading stopped at this line"
            findings.append(_line_finding(number, "fewer wrong lines", found))
            break
        parsed = _parse_line(line)
        if parsed is None:
            findings.append(_line_finding(number, "'<sha256>  <name>'", ascii(line[:120].decode(*CODEC))))
            continue
        name, digest = parsed
        if name in digests:
            findings.append(_line_finding(number, "every name once", f"{name!r} again"))
        elif sort_key(name) < previous:
            findings.append(_line_finding(number, "names in order", f"{name!r} out of order"))
        digests.setdefault(name, digest)
        previous = sort_key(name)
    return digests, findings


def check_seal(checksums: bytes, digests: Mapping[str, str]) -> list[Finding]:
    """Compare SHA256SUMS with the digests of the present files."""
    listed, findings = parse_checksums(checksums)
    return [*findings, *_diff(listed, {name: digest for name, digest in digests.items() if name != CHECKSUMS})]


def _diff(listed: Mapping[str, str], found: Mapping[str, str]) -> Iterator[Finding]:
    for name in sorted(listed.keys() | found.keys(), key=sort_key):
        if name not in found:
            yield Finding(Level.BLOCKING, printable(name), f"sha256 {listed[name]}", "missing")
        elif name not in listed:
            yield Finding(Level.BLOCKING, printable(name), "no file", f"an extra file that {CHECKSUMS} does not list")
        elif listed[name] != found[name]:
            yield Finding(Level.BLOCKING, printable(name), f"sha256 {listed[name]}", f"sha256 {found[name]}")


def hash_through(name: str, pieces: Iterable[Piece], digests: dict[str, str]) -> Iterator[Piece]:
    """Yield the pieces unchanged; after the last piece, ``digests[name]`` is the sha256 of all pieces."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
        yield piece
    digests[name] = digest.hexdigest()


def _render_line(name: str, digest: str) -> bytes:
    raw = sort_key(name)
    escaped = re.sub(rb"[\\\n\r]", lambda match: _ESCAPES[match[0]], raw)
    return (b"\\" if escaped != raw else b"") + digest.encode() + b"  " + escaped + b"\n"


def _parse_line(line: bytes) -> tuple[str, str] | None:
    match = _LINE.fullmatch(line.removesuffix(b"\n"))
    if match is None:
        return None
    raw = re.sub(rb"\\.", lambda escape: _PLAIN.get(escape[0], b""), match[3]) if match[1] else match[3]
    name, digest = raw.decode(*CODEC), match[2].decode()
    return (name, digest) if _render_line(name, digest) == line else None


def _line_finding(number: int, expected: str, found: str) -> Finding:
    return Finding(Level.BLOCKING, f"{CHECKSUMS}:{number}", expected, found)
