"""Find single files in an image's layers; a file in an upper layer hides the same path in lower layers."""

from __future__ import annotations

import gzip
import hashlib
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any, Final, cast

from rlk_repro.base.errors import BundleUnreadable, Problem
from rlk_repro.base.files import CHUNK_BYTES
from rlk_repro.images.oci import Descriptor, OciImage, OciLayout, blob_name

MAX_KEPT_BYTES: Final = 16 << 20
_WHITEOUT: Final = ".wh."
_OPAQUE: Final = ".wh..wh..opq"


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
