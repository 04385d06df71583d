"""Write whole files (a file appears complete or not at all), read and write canonical JSON, and compute sha256."""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

from rlk_repro.base.disk import Stream, Unwritable, writing
from rlk_repro.base.errors import BundleUnreadable, Problem
from rlk_repro.base.units import canonical, format_bytes

CHUNK_BYTES: Final = 1 << 20

# Limits for untrusted JSON: Python values, above all lists and objects, take up to 40 times the bytes of their text.
MAX_JSON_BYTES: Final = 4 << 20
MAX_PLAN_BYTES: Final = 1 << 20
MAX_RECORDS_BYTES: Final = 16 << 20
MAX_ANALYSIS_BYTES: Final = 64 << 20
"""An analysis may be larger than other JSON: it holds mostly numbers, which need little more memory than their text."""
MAX_JSON_LISTS: Final = 400_000
MAX_JSON_DEPTH: Final = 64
MAX_JSON_DIGITS: Final = 20
_TOO_DEEP: Final = f"more than {MAX_JSON_DEPTH} levels"


@contextmanager
def replacing(path: Path, *, is_durable: bool = True) -> Iterator[BinaryIO]:
    """Open a seekable stream whose content replaces ``path`` when the block ends without an error.

    Without ``is_durable``, the call does not wait for the disk, and a power cut may damage the file.
    """
    with writing(path):
        make_folder(path.parent)
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


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # a file or a link to nothing has the name
        raise Unwritable.at(path, error) from error


def write_bytes(path: Path, data: bytes, *, is_durable: bool = True) -> None:
    with replacing(path, is_durable=is_durable) as stream:
        stream.write(data)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any, *, is_durable: bool = True) -> None:
    write_bytes(path, dump_json(value), is_durable=is_durable)


def dump_json(value: Any) -> bytes:
    """Return canonical JSON: sorted keys, 12 significant digits, NaN and infinities as null, one trailing newline."""
    text = json.dumps(_plain(value), sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode("utf-8", errors="backslashreplace")


def dump_json_line(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def load_json(path: Path, *, schema: int | None = None, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read JSON; raise BundleUnreadable for a file that is absent, not JSON, too large, or of a newer ``schema``."""
    return parse_json(str(path), read_limited(path, max_bytes), schema=schema, max_bytes=max_bytes)


def load_record(path: Path, *, schema: int | None = None) -> dict[str, Any]:
    """Read a JSON object; return an empty one if the file is absent, cannot be read, or holds something else."""
    try:
        value = load_json(path, schema=schema)
    except BundleUnreadable:
        return {}
    return value if isinstance(value, dict) else {}


def read_limited(path: Path, max_bytes: int) -> bytes:
    """Read a regular file; raise BundleUnreadable for a file that is absent, unreadable, or over ``max_bytes``."""
    data = read_start(path, max_bytes + 1)
    if len(data) > max_bytes:
        raise BundleUnreadable(Problem(str(path), "too large", expected=f"at most {format_bytes(max_bytes)}"))
    return data


def read_start(path: Path, num_bytes: int) -> bytes:
    """Read the first bytes of a regular file; refuse a pipe (BundleUnreadable), because reading one may never end."""
    try:
        with io.BufferedReader(io.FileIO(path, opener=_open_at_once)) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise BundleUnreadable(Problem(str(path), "not readable", expected="a regular file"))
            return stream.read(num_bytes)
    except FileNotFoundError:
        raise BundleUnreadable(Problem(str(path), "missing", expected="a file")) from None
    except OSError as error:
        raise BundleUnreadable(Problem(str(path), f"not readable ({error.strerror})")) from None


def read_end(path: Path, num_bytes: int) -> bytes:
    """Read the last lines of a file, at most ``num_bytes``; of a longer file, a first line says how much is left out.

    The result is empty if the file cannot be read.
    """
    try:
        with path.open("rb") as stream:
            left_out = max(stream.seek(0, os.SEEK_END) - num_bytes, 0)
            stream.seek(left_out)
            data = stream.read(num_bytes)
    except OSError:
        return b""
    return b"[%d bytes before]\n" % left_out + data.partition(b"\n")[2] if left_out else data


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # Windows has no such flag


def parse_json(where: str, data: bytes, *, schema: int | None = None, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Parse JSON; raise BundleUnreadable for NaN, infinities, long numbers, a duplicate key, and too much data."""
    try:
        value = decode_json(data, max_bytes)
    except ValueError as error:
        raise BundleUnreadable(Problem(where, f"not readable as JSON ({error})")) from None
    if schema is not None:
        check_schema(where, value, schema)
    return value


def decode_json(data: bytes, max_bytes: int) -> Any:
    if len(data) > max_bytes:
        raise ValueError(f"{format_bytes(len(data))}, at most {format_bytes(max_bytes)} are read")
    text = data.decode()
    num_lists = data.count(b"[") + data.count(b"{")
    if num_lists > MAX_JSON_LISTS:
        raise ValueError(f"{num_lists} lists and objects, at most {MAX_JSON_LISTS} are read")
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if num_lists > MAX_JSON_DEPTH:
        _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        lists = [item for item in level if type(item) is list]
        objects = [item.values() for item in level if type(item) is dict]
        if not lists and not objects:
            return
        level = [item for items in (*lists, *objects) for item in items]
    raise ValueError(_TOO_DEEP)


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {twice[:60]!a} is given twice")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _parse_int(text: str) -> int:
    if len(text) > MAX_JSON_DIGITS + 1:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _parse_float(text: str) -> float:
    value = float(text)
    if value - value != 0:
        raise ValueError(f"{text[:40]} is too large for a number")
    return value


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_make_object, parse_constant=_refuse_constant, parse_int=_parse_int, parse_float=_parse_float
)


def check_schema(where: str, value: Any, schema: int) -> None:
    """Raise BundleUnreadable for a value without a schema number, or with a newer one than ``schema``."""
    found = value.get("schema") if isinstance(value, Mapping) else None
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise BundleUnreadable(Problem(where, "invalid schema number", got=found, expected=f"1 to {schema}"))
    if found > schema:
        expected = f"schema {schema} or older"
        raise BundleUnreadable(
            Problem(where, "written by a newer version", got=found, expected=expected, hint="upgrade rlk-repro")
        )


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int):  # most values; the check for a Mapping is slow
        return value
    if isinstance(value, float):
        rounded = canonical(value)
        return rounded if rounded - rounded == 0 else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
