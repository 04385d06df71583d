"""A small run directory as a job leaves it, and ways to rewrite its bundle byte by byte."""

from __future__ import annotations

import gzip
import json
import random
import tarfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, cast

from rlk_repro.base.findings import Finding
from rlk_repro.bundle.archive import ArchiveWriter, Member
from rlk_repro.bundle.gzip_stream import GzipWriter
from rlk_repro.bundle.verify import verify
from rlk_repro.rundir.paths import RunDir
from tests.conftest import WEIRD_NAMES

RUN_ID = "20261120-133000-smoke"
TRIAL = "00-p0-baseline"
LOG = f"trials/{TRIAL}/stdout.log"
ODD_NAMES = (*WEIRD_NAMES, "back\\slash", "\\n", "carriage\rreturn", " lead", "x" * 255, "not-utf-8-\udcff", "c:colon")


def make_run_dir(parent: Path) -> RunDir:
    """Unsealed: our JSON, logs, odd names, empty and incompressible content, and what is never packed."""
    run_dir = RunDir(parent / RUN_ID)
    noise = random.Random(0)
    for path in (run_dir.submission, run_dir.node("n0").manifest):
        _write(path, json.dumps({"schema": 1}).encode())
    _write(run_dir.plan, json.dumps({"schema": 1, "run_id": RUN_ID}).encode())
    _write(run_dir.run_yaml, b"run: smoke\n")
    for name, status in ((TRIAL, "ok"), ("01-p0-enabled", "failed")):
        trial = run_dir.trial(name)
        lines = (f"step {step}: {{'perf/step_time': {noise.random()}}}\n" for step in range(50))
        _write(trial.stdout, "".join(lines).encode())
        _write(trial.ops_file(0), b"")
        _write(trial.exit, json.dumps({"schema": 1, "status": status}).encode())
    _write(run_dir.trial("02-p1-enabled").stdout, b"died before its exit record\n")
    _write(run_dir.rollouts / "0.bin", noise.randbytes(1500))
    for name in ODD_NAMES:
        _write(run_dir.scheduler / name, name.encode("utf-8", "surrogateescape"))
    _write(run_dir.scheduler / "/".join(["deep" * 10] * 6) / "long path", b"beyond 100 bytes\n")
    for path in (run_dir.lock, run_dir.report / "index.html", run_dir.root / "job" / ".partial-x"):
        _write(path, b"never packed")
    return run_dir


def read_tar(bundle: Path) -> bytes:
    return gzip.decompress(bundle.read_bytes())


def write_as_packed(bundle: Path, tar: bytes) -> Path:
    """Put any tar into our own gzip container."""
    with bundle.open("wb") as stream:
        writer = GzipWriter(stream)
        writer.write(tar)
        writer.close()
    return bundle


def rewrite(
    bundle: Path, target: Path, *, removed: Collection[str] = (), added: Mapping[str, bytes] | None = None
) -> Path:
    """The same archive without some files and with others, in our container."""
    with tarfile.open(bundle) as old, target.open("wb") as stream:
        kept = [(info.name, cast("IO[bytes]", old.extractfile(info)).read()) for info in old]
        new = ArchiveWriter(stream)
        for name, data in [*(item for item in kept if item[0] not in removed), *(added or {}).items()]:
            new.add(Member(name=name, size_bytes=len(data)), [data])
        new.close()
    return target


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


# The findings of ``verify`` as a list, for tests that expect no id.


def verify_bundle(path: Path) -> list[Finding]:
    return list(verify(path).findings)
