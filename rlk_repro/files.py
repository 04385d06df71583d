"""Whole files: they appear complete or not at all.  Also canonical JSON and sha256 of a file.

No file names are decided here; that is rundir's business.
"""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from rlk_repro.disk import Stream, writing
from rlk_repro.errors import BundleUnreadable, Problem
from rlk_repro.units import canonical

CHUNK_BYTES: Final = 1 << 20


@contextmanager
def replacing(path: Path, *, is_durable: bool = True) -> Iterator[BinaryIO]:
    """A seekable stream that becomes ``path`` when the block ends well; a kill leaves the old file or the new one.

    Without ``is_durable`` that holds for kills, not for power cuts, and nothing waits for the disk.

    Raises:
        Unwritable: it cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
    try:
        raw = Stream(handle, "wb", path)
        with io.BufferedWriter(raw) as stream:
            yield stream
            stream.flush()
            if is_durable:
                raw.sync()
        with writing(path):
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_bytes(path: Path, data: bytes, *, is_durable: bool = True) -> None:
    """Write a whole file by way of ``replacing``."""
    with replacing(path, is_durable=is_durable) as stream:
        stream.write(data)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any, *, is_durable: bool = True) -> None:
    write_bytes(path, dump_json(value), is_durable=is_durable)


def dump_json(value: Any) -> bytes:
    """Canonical JSON: sorted keys, 12 significant digits, NaN and infinities as null, one trailing newline."""
    text = json.dumps(_plain(value), sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode("utf-8", errors="backslashreplace")


def dump_json_line(value: Any) -> str:
    """The same on one line, for JSON Lines files."""
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def load_json(path: Path, *, schema: int | None = None) -> Any:
    """Read one of our own JSON files.

    Raises:
        BundleUnreadable: absent, not JSON, or ``schema`` newer than this version understands.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise BundleUnreadable(Problem(str(path), "missing", expected="a JSON file")) from None
    except OSError as error:
        raise BundleUnreadable(Problem(str(path), f"not readable as JSON ({error})")) from None
    return parse_json(str(path), data, schema=schema)


def parse_json(where: str, data: bytes, *, schema: int | None = None) -> Any:
    """The same for bytes at hand, such as a member of a bundle."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BundleUnreadable(Problem(where, f"not readable as JSON ({error})")) from None
    if schema is not None:
        check_schema(where, value, schema)
    return value


def check_schema(where: str, value: Any, schema: int) -> None:
    """Refuse anything but an object whose ``schema`` is a number up to ours."""
    found = value.get("schema") if isinstance(value, Mapping) else None
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise BundleUnreadable(Problem(where, "no schema number", got=found, expected=f"1 to {schema}"))
    if found > schema:
        raise BundleUnreadable(
            Problem(
                where,
                "written by a newer version",
                got=found,
                expected=f"schema {schema} or older",
                hint="upgrade rlk-repro",
            )
        )


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        rounded = canonical(value)
        return rounded if rounded - rounded == 0 else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
