"""Fetch a run's bundle block by block and replace the staged run directory by the bundle's content."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rlk_repro.base.console import Tell, silence
from rlk_repro.base.disk import open_stream, writing
from rlk_repro.base.errors import CheckFailed, Problem
from rlk_repro.base.files import sha256_file
from rlk_repro.base.units import format_bytes
from rlk_repro.clusters.k8s.facts import BLOCK_BYTES
from rlk_repro.clusters.k8s.kubectl import Unreachable
from rlk_repro.rundir.paths import RunDir

MAX_FAILURES: Final = 8
FIRST_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 20.0
TELL_S: Final = 5.0

AskBlock = Callable[[int, int], bytes | None]


def fetch_bundle(ask: AskBlock, run_dir: RunDir, size_bytes: int, digest: str, tell: Tell = silence) -> Path:
    """Fetch the bundle to ``run_dir.bundle``.

    Raises:
        Unreachable: the connection was lost; the next call fetches only the missing part.
        CheckFailed: the received bundle differs from the pod's bundle.
    """
    part = run_dir.partial_bundle(digest)
    for other in run_dir.root.glob(run_dir.partial_bundle("*").name):
        if other != part:
            other.unlink()
    with writing(part):
        _fill(ask, part, size_bytes, tell)
    found = sha256_file(part)
    if found != digest:
        part.unlink()
        what = "the bundle was damaged during the transfer"
        raise CheckFailed(Problem(run_dir.run_id, what, got=found, expected=digest))
    part.replace(run_dir.bundle)
    return run_dir.bundle


def put_in_place(run_dir: RunDir) -> None:
    from rlk_repro.bundle.seal import unpack

    with tempfile.TemporaryDirectory(dir=run_dir.root, prefix=".partial-") as folder:
        whole = unpack(run_dir.bundle, Path(folder) / "bundle")
        names = {path.name for path in whole.root.iterdir()}
        checksums = run_dir.checksums.name
        for name in sorted(names, key=lambda name: name == checksums):
            _replace(whole.root / name, run_dir.root / name)
    shutil.rmtree(run_dir.live.root, ignore_errors=True)


def _fill(ask: AskBlock, part: Path, size_bytes: int, tell: Tell) -> None:
    with open_stream(part, "ab") as stream:
        # only whole blocks are kept: an interruption can leave a part of the last block
        offset = stream.tell() // BLOCK_BYTES * BLOCK_BYTES if stream.tell() < size_bytes else size_bytes
        stream.truncate(offset)
        stream.seek(offset)
        if offset:
            tell(f"{format_bytes(offset)} were fetched earlier")
        num_failures, told = 0, time.monotonic()
        while offset < size_bytes:
            wanted = min(BLOCK_BYTES, size_bytes - offset)
            data = ask(offset, wanted)
            if data is None or len(data) != wanted:
                num_failures += 1
                if num_failures == MAX_FAILURES:
                    raise Unreachable(
                        Problem("kubernetes", f"the connection was lost after {offset} of {size_bytes} bytes",
                                hint="run the same command again to fetch the missing bytes")
                    )  # fmt: skip
                time.sleep(min(FIRST_PAUSE_S * 2 ** (num_failures - 1), MAX_PAUSE_S))
                continue
            num_failures = 0
            stream.write(data)
            stream.flush()
            offset += wanted
            if time.monotonic() - told >= TELL_S:
                told = time.monotonic()
                tell(f"{format_bytes(offset)} of {format_bytes(size_bytes)}")


def _replace(source: Path, target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    source.replace(target)
