"""Read OCI image layouts from a folder or a tar, without unpacking.

https://github.com/opencontainers/image-spec/blob/main/image-layout.md
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, Final, cast

from rlk_repro.base.errors import BundleUnreadable, Problem
from rlk_repro.base.files import CHUNK_BYTES
from rlk_repro.base.findings import Finding, Level

MAX_JSON_BYTES: Final = 8 << 20
MAX_MEMBERS: Final = 100_000
_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
_INDEXES: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_ATTESTATION: Final = "vnd.docker.reference.type"
MAX_KEPT_BYTES: Final = 16 << 20
_WHITEOUT: Final = ".wh."
_OPAQUE: Final = ".wh..wh..opq"


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    digest: str
    size_bytes: int
    media_type: str


@dataclass(frozen=True, kw_only=True)
class OciImage:
    """The image of one platform; ``index_digest`` is the digest of its multi-platform index, if it has one."""

    digest: str
    index_digest: str | None
    platform: str
    labels: Mapping[str, str]
    blobs: tuple[Descriptor, ...]
    layers: tuple[Descriptor, ...]

    @property
    def size_bytes(self) -> int:
        return sum(item.size_bytes for item in self.blobs)


class OciLayout:
    """The files of an image layout by name, in a folder or a tar."""

    def __init__(self, where: Path, files: Mapping[str, Path | tarfile.TarInfo]) -> None:
        self.where = where
        self._files = files

    def size_bytes(self, name: str) -> int | None:
        file = self._files.get(name)
        return file.stat().st_size if isinstance(file, Path) else None if file is None else file.size

    @contextmanager
    def open(self, name: str) -> Iterator[BufferedReader]:
        """Open one file as a stream; raise BundleUnreadable if the layout has no file of this name."""
        file = self._files.get(name)
        if file is None:
            raise BundleUnreadable(Problem(str(self.where), f"holds no {name}", expected="a complete image"))
        with ExitStack() as opened:
            if isinstance(file, Path):
                yield opened.enter_context(file.open("rb"))
            else:
                archive = opened.enter_context(tarfile.open(self.where, "r:"))
                yield opened.enter_context(cast("BufferedReader", archive.extractfile(file)))

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON object of at most MAX_JSON_BYTES; raise BundleUnreadable for any other file."""
        if (self.size_bytes(name) or 0) > MAX_JSON_BYTES:
            raise BundleUnreadable(Problem(f"{self.where}: {name}", "is too large", expected="a small JSON file"))
        with self.open(name) as stream:
            data = stream.read()
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise BundleUnreadable(Problem(f"{self.where}: {name}", "is not a JSON object"))
        return value


def open_layout(path: Path) -> OciLayout:
    """Open an OCI image layout in a folder or a tar archive; raise BundleUnreadable if the path holds no image."""
    try:
        files = dict(_list_folder(path) if path.is_dir() else _list_tar(path))
    except (OSError, tarfile.TarError) as error:
        hint = "make the archive with skopeo copy SOURCE oci-archive:FILE; do not compress it"
        raise BundleUnreadable(Problem(str(path), f"is not an OCI archive ({error})", hint=hint)) from None
    if "index.json" not in files:
        raise BundleUnreadable(Problem(str(path), "holds no index.json", expected="an OCI layout or its tar archive"))
    return OciLayout(path, files)


def _list_folder(path: Path) -> Iterator[tuple[str, Path | tarfile.TarInfo]]:
    for file in path.rglob("*"):
        if file.is_file() and not file.is_symlink():
            yield file.relative_to(path).as_posix(), file


def _list_tar(path: Path) -> Iterator[tuple[str, Path | tarfile.TarInfo]]:
    with tarfile.open(path, "r:") as archive:
        for number, member in enumerate(archive):
            if number >= MAX_MEMBERS:
                raise tarfile.TarError("too many members")
            if member.isreg():
                yield member.name.removeprefix("./"), member


def blob_name(digest: str, where: str) -> str:
    """Return the path of a blob inside a layout; raise BundleUnreadable if the digest is not a sha256."""
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise BundleUnreadable(Problem(where, "no sha256 digest", got=digest[:100]))
    return f"blobs/sha256/{match[1]}"


def load_image(layout: OciLayout, platform: str | None = None) -> OciImage:
    """Load the image of one platform (``amd64``); raise BundleUnreadable unless exactly one image fits."""
    where = str(layout.where)
    descriptor, index_digest = _choose(layout, layout.read_json("index.json"), platform, None)
    try:
        manifest = layout.read_json(blob_name(descriptor["digest"], where))
        config = _descriptor(manifest["config"])
        layers = tuple(_descriptor(item) for item in manifest["layers"])
        body = layout.read_json(blob_name(config.digest, where))
        labels = cast("dict[str, str]", (body.get("config") or {}).get("Labels") or {})
        return OciImage(
            digest=descriptor["digest"],
            index_digest=index_digest,
            platform=f"{body.get('os')}/{body.get('architecture')}",
            labels={str(name): str(value) for name, value in labels.items()},
            blobs=(_descriptor(descriptor), config, *layers),
            layers=layers,
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BundleUnreadable(Problem(where, f"holds no image manifest ({error!r})")) from None


def _choose(
    layout: OciLayout, index: Mapping[str, Any], platform: str | None, index_digest: str | None
) -> tuple[dict[str, Any], str | None]:
    """Return the descriptor of a platform's manifest, and the digest of the nested index that lists it, if any."""
    found = [item for item in index.get("manifests", []) if not _is_attestation(item)]
    if platform is not None and len(found) > 1:
        found = [item for item in found if (item.get("platform") or {}).get("architecture") == platform]
    if len(found) != 1:
        names = ", ".join(str((item.get("platform") or {}).get("architecture")) for item in found) or "none"
        raise BundleUnreadable(
            Problem(
                str(layout.where),
                "does not hold exactly one image",
                got=names,
                expected="one image, or the name of a platform",
                hint="--platform",
            )
        )
    chosen: dict[str, Any] = found[0]
    if chosen.get("mediaType") in _INDEXES and index_digest is None:
        digest = str(chosen.get("digest"))
        return _choose(layout, layout.read_json(blob_name(digest, str(layout.where))), platform, digest)
    return chosen, index_digest


def _is_attestation(item: Mapping[str, Any]) -> bool:
    return _ATTESTATION in (item.get("annotations") or {})


def _descriptor(value: Mapping[str, Any]) -> Descriptor:
    return Descriptor(
        digest=str(value["digest"]), size_bytes=int(value["size"]), media_type=str(value.get("mediaType", ""))
    )


def check_blobs(layout: OciLayout, image: OciImage) -> Iterator[Finding]:
    for blob in image.blobs:
        name = blob_name(blob.digest, str(layout.where))
        size = layout.size_bytes(name)
        if size is None:
            yield Finding(Level.BLOCKING, name, f"{blob.size_bytes} bytes", "missing")
        elif size != blob.size_bytes:
            yield Finding(Level.BLOCKING, name, f"{blob.size_bytes} bytes", f"{size} bytes")
        else:
            with layout.open(name) as stream:
                found = f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"
            if found != blob.digest:
                yield Finding(Level.BLOCKING, name, blob.digest, found)


@dataclass(frozen=True, kw_only=True)
class FoundFile:
    """A file of the image; ``data`` is None if the file is larger than MAX_KEPT_BYTES."""

    sha256: str
    data: bytes | None


def find_files(
    layout: OciLayout, image: OciImage, is_wanted: Callable[[str], bool], is_enough: Callable[[set[str]], bool]
) -> dict[str, FoundFile]:
    """Find files by path, from the top layer down, until ``is_enough`` returns true; skip deleted files."""
    found: dict[str, FoundFile] = {}
    gone: set[str] = set()
    for layer in reversed(image.layers):
        hidden = set(gone)
        for path, member, archive in _members(layout, layer):
            name = path.rpartition("/")[2]
            if name.startswith(_WHITEOUT):
                folder = path.rpartition("/")[0]
                gone.add(folder if name == _OPAQUE else f"{folder}/{name.removeprefix(_WHITEOUT)}".lstrip("/"))
            elif member.isreg() and is_wanted(path) and path not in found and not _is_below(path, hidden):
                found[path] = _read(archive.extractfile(member))
        if is_enough(set(found)):
            break
    return found


def _members(layout: OciLayout, layer: Descriptor) -> Iterator[tuple[str, tarfile.TarInfo, tarfile.TarFile]]:
    with layout.open(blob_name(layer.digest, str(layout.where))) as stream:
        raw = _decompress(layer, stream)
        try:
            with tarfile.open(fileobj=raw, mode="r|", bufsize=CHUNK_BYTES) as archive:
                for member in archive:
                    archive.members = []  # type: ignore[attr-defined]  # tarfile would keep all members in memory
                    yield member.name.removeprefix("./").rstrip("/"), member, archive
        except (tarfile.TarError, OSError, EOFError) as error:
            raise BundleUnreadable(Problem(f"layer {layer.digest}", f"is not a tar archive ({error})")) from None


def _decompress(layer: Descriptor, stream: IO[bytes]) -> IO[bytes]:
    kind = layer.media_type.rpartition("+")[2] if "+" in layer.media_type else layer.media_type.rpartition(".")[2]
    if kind == "gzip":
        return cast("IO[bytes]", gzip.GzipFile(fileobj=cast("Any", stream)))
    if kind == "tar":
        return stream
    hint = "skopeo copy --dest-compress-format gzip SOURCE oci-archive:FILE"
    raise BundleUnreadable(Problem(f"layer {layer.digest}", f"is compressed as {kind}", expected="gzip", hint=hint))


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _read(stream: IO[bytes] | None) -> FoundFile:
    assert stream is not None
    digest, kept, size = hashlib.sha256(), bytearray(), 0
    while data := stream.read(CHUNK_BYTES):
        digest.update(data)
        size += len(data)
        if size <= MAX_KEPT_BYTES:
            kept += data
    return FoundFile(sha256=digest.hexdigest(), data=bytes(kept) if size <= MAX_KEPT_BYTES else None)
