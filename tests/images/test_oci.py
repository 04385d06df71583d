"""OCI layouts and archives: read in place, hashed in a stream; what is broken is named, however large the rest."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.files import dump_json
from rlk_repro.images.archive_check import check_archive
from rlk_repro.images.oci import check_blobs, find_files, load_image, open_layout
from tests.images.test_record import LABELS, VIME, make_code, make_record, make_stack

RECORD = "opt/rlk-repro/provenance.json"
EXTENSION = "usr/lib/python3/rl_engine/_C.so"
OCI = "application/vnd.oci.image"
ZEROS_20_GIB = "6cb118a8f8b3c19385874297e291dcbcdf3a9837ba1ca7b00ace2491adbff551"


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def make_tar(files: Mapping[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def make_layout(
    folder: Path, layers: list[Mapping[str, bytes]], *, labels: Mapping[str, str] = LABELS, machine: str = "amd64"
) -> Path:
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def put(data: bytes, kind: str) -> dict[str, Any]:
        (blobs / digest(data)[7:]).write_bytes(data)
        return {"mediaType": f"{OCI}.{kind}", "digest": digest(data), "size": len(data)}

    packed = [put(gzip.compress(make_tar(files), mtime=0), "layer.v1.tar+gzip") for files in layers]
    config = {"os": "linux", "architecture": machine, "config": {"Labels": dict(labels)}}
    manifest = {"config": put(json.dumps(config).encode(), "config.v1+json"), "layers": packed}
    listed = [put(json.dumps(manifest).encode(), "manifest.v1+json")]
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": listed}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder


def own_layer() -> dict[str, bytes]:
    code = make_code()
    code["rl_kernel"]["extension_sha256"] = hashlib.sha256(b"compiled").hexdigest()
    return {
        RECORD: dump_json(make_record(code=code).to_json()),
        EXTENSION: b"compiled",
        "root/vime/.git/HEAD": f"{VIME}\n".encode(),
    }


def pack(folder: Path) -> Path:
    path = folder.with_suffix(".tar")
    with tarfile.open(path, "w") as archive:
        archive.add(folder, ".")
    return path


def find(path: Path, *names: str) -> dict[str, bytes | None]:
    layout = open_layout(path)
    found = find_files(layout, load_image(layout), lambda name: name in names, lambda _: False)
    return {name: file.data for name, file in found.items()}


def wheres(path: Path) -> list[str]:
    return [finding.where for finding in check_archive(path, make_stack(), "cuda-amd64").findings]


def test_folder_and_archive_are_read_alike(tmp_path: Path) -> None:
    folder = make_layout(tmp_path / "image", [{"etc/os-release": b"x"}, own_layer()])
    first, second = (check_archive(path, make_stack(), "cuda-amd64") for path in (folder, pack(folder)))
    assert first == second
    assert first.findings == ()
    assert first.stack is not None
    assert first.platform == "linux/amd64"


def test_a_list_of_platforms_needs_the_platform(tmp_path: Path) -> None:
    folder = make_layout(tmp_path / "image", [own_layer()])
    manifests = []
    for machine in ("amd64", "arm64"):
        make_layout(folder, [own_layer()], machine=machine)
        (item,) = json.loads((folder / "index.json").read_text())["manifests"]
        manifests.append(item | {"platform": {"os": "linux", "architecture": machine}})
    unknown = manifests[0] | {"annotations": {"vnd.docker.reference.type": "attestation-manifest"}}
    inner = json.dumps({"schemaVersion": 2, "manifests": [*manifests, unknown]}).encode()
    (folder / "blobs/sha256" / digest(inner)[7:]).write_bytes(inner)
    outer = [{"mediaType": f"{OCI}.index.v1+json", "digest": digest(inner), "size": len(inner)}]
    (folder / "index.json").write_text(json.dumps({"manifests": outer}))
    with pytest.raises(BundleUnreadable, match="does not hold exactly one image, got 'amd64, arm64'"):
        check_archive(folder)
    checked = check_archive(folder, make_stack(), "cuda-amd64")
    assert (checked.digest, checked.findings) == (digest(inner), ())
    assert [finding.where for finding in check_archive(folder, None, "cuda-arm64").findings] == ["image.platform"]


def test_upper_layers_win_and_deleted_files_stay_deleted(tmp_path: Path) -> None:
    layers: list[Mapping[str, bytes]] = [
        {"a": b"1", "b": b"1", "c/d": b"1", "e/f": b"1", "e/g": b"1"},
        {"./a": b"2", ".wh.b": b"", ".wh.c": b"", "e/.wh..wh..opq": b"", "e/g": b"2"},
    ]
    assert find(make_layout(tmp_path / "x", layers), "a", "b", "c/d", "e/f", "e/g") == {"a": b"2", "e/g": b"2"}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({EXTENSION: b"another"}, "rl_engine._C"),
        ({"root/vime/.git/HEAD": b"ref: refs/heads/main\n"}, "vime/.git/HEAD"),
        ({RECORD: b"{}"}, "/opt/rlk-repro/provenance.json"),
        ({RECORD: dump_json(make_record().to_json()).replace(b"sm_80", b"sm_86")}, "/opt/rlk-repro/provenance.json"),
    ],
)
def test_files_that_differ_from_the_record_are_found(tmp_path: Path, change: dict[str, bytes], where: str) -> None:
    assert wheres(make_layout(tmp_path / "image", [{}, own_layer() | change])) == [where]


def test_an_image_without_record(tmp_path: Path) -> None:
    assert wheres(make_layout(tmp_path / "image", [{"a": b""}])) == ["/opt/rlk-repro/provenance.json"]


def test_broken_blobs_are_named(tmp_path: Path) -> None:
    folder = make_layout(tmp_path / "image", [{"a": b"1"}, own_layer()])
    image = load_image(open_layout(folder))
    first, last = (folder / "blobs/sha256" / layer.digest[7:] for layer in image.layers)
    last.unlink()
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    found = [(finding.where, finding.found[:7]) for finding in check_blobs(open_layout(folder), image)]
    assert found == [(f"blobs/sha256/{first.name}", "sha256:"), (f"blobs/sha256/{last.name}", "missing")]


@pytest.mark.parametrize("index", ["[]", "{}", '{"manifests": [{"digest": "sha1:0", "size": 1}]}',
                                   '{"manifests": [{"digest": "sha256:../../etc/passwd", "size": 1}]}'])  # fmt: skip
def test_an_invalid_layout_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "index.json").write_text(index)
    with pytest.raises(BundleUnreadable):
        check_archive(tmp_path)
    (tmp_path / "file").write_bytes(b"x" * 2000)
    with pytest.raises(BundleUnreadable, match="is not an OCI archive"):
        check_archive(tmp_path / "file")


def test_a_layer_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    folder = make_layout(tmp_path / "image", [own_layer()])
    text = (folder / "index.json").read_text()
    (item,) = json.loads(text)["manifests"]
    manifest = (folder / "blobs/sha256" / item["digest"][7:]).read_bytes().replace(b"tar+gzip", b"tar+zstd")
    (folder / "blobs/sha256" / digest(manifest)[7:]).write_bytes(manifest)
    (folder / "index.json").write_text(json.dumps({"manifests": [item | {"digest": digest(manifest)}]}))
    (finding,) = check_archive(folder).findings
    assert "is compressed as zstd, expected gzip" in finding.found


@pytest.mark.real
def test_twenty_gigabytes_take_little_memory(tmp_path: Path) -> None:
    """A base layer of 20 GB, sparse on disk and never decompressed, but hashed like every other."""
    size = 20 << 30
    folder = make_layout(tmp_path / "image", [own_layer()])
    base = {"mediaType": f"{OCI}.layer.v1.tar", "digest": f"sha256:{ZEROS_20_GIB}", "size": size}
    (item,) = json.loads((folder / "index.json").read_text())["manifests"]
    manifest = json.loads((folder / "blobs/sha256" / item["digest"][7:]).read_bytes())
    data = json.dumps(manifest | {"layers": [base, *manifest["layers"]]}).encode()
    (folder / "blobs/sha256" / digest(data)[7:]).write_bytes(data)
    (folder / "index.json").write_text(json.dumps({"manifests": [item | {"digest": digest(data), "size": len(data)}]}))
    path = tmp_path / "image.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(folder, ".")
        end = archive.offset
    with path.open("r+b") as stream:
        stream.seek(end)
        header = tarfile.TarInfo(f"./blobs/sha256/{ZEROS_20_GIB}")
        header.size = size
        end += stream.write(header.tobuf(tarfile.GNU_FORMAT))
        stream.truncate(end)
        stream.truncate(end + size + 1024)
    words = (
        "import sys; from pathlib import Path; from rlk_repro.images.archive_check import check_archive; "
        "found = check_archive(Path(sys.argv[1])); assert found.stack and not found.findings, found.findings; "
        # its own peak: what getrusage tells may be that of the process that started it
        "status = Path('/proc/self/status').read_text(); "
        "print(found.size_bytes, int(status.split('VmHWM:')[1].split()[0]) // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", words, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    num_bytes, peak_mib = map(int, done.stdout.split())
    assert num_bytes > size
    assert peak_mib <= 200, peak_mib
