"""Each hostile archive is refused with exit 5 and the member's name, and nothing is written outside."""

import gzip
import math
import tarfile
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.bundle import gzip_stream
from rlk_repro.bundle.gzip_stream import ADVICE, LIMITS, Limits
from rlk_repro.bundle.inspect import inspect_bundle
from rlk_repro.bundle.verify import unpack
from tests.support.make_run import verify_bundle

END = bytes(1024)
SMALL_LIMITS = Limits(num_members=3, total_bytes=1 << 20, ratio=50, ratio_floor_bytes=1 << 16)


def entry(
    name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, *, link: str = "", size: int | None = None
) -> bytes:
    """Return one member as raw tar blocks; ``size`` is a false length."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(data) if size is None else size
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape") + data + bytes(-len(data) % 512)


def long_name(name: bytes, size: int | None = None) -> bytes:
    return entry("././@LongLink", name, tarfile.GNUTYPE_LONGNAME, size=size)


def pax(records: bytes) -> bytes:
    return entry("pax", records, tarfile.XHDTYPE)


def record(key: str, value: str) -> bytes:
    body = f" {key}={value}\n".encode()
    length = len(body) + 2
    return b"%d" % (length if len(b"%d" % length) == 2 else length + 1) + body


HARMLESS = entry("a", b"a")
LEADS_OUT = "refused: path leads out of its folder"
DRIVE = "refused: Windows path with a drive or share"
EMPTY_PART = 'refused: path with an empty part or the part "."'
LINK = "refused: a symbolic link"
TWICE = "refused: appears twice"
NO_NUMBER = "refused: the size is not a number, got '-1', expected digits"
HUGE = "refused: too large in total, got '1048576.0 TiB', expected at most 64.0 GiB"
LARGE = "refused: too large in total, got '1.0 MiB', expected at most 1.0 MiB"
TOO_LONG = "refused: name too long, got '10.0 GiB', expected at most 64.0 KiB"

# Each entry has tar blocks before the end mark, the member, and the text of the message.
HOSTILE: dict[str, tuple[bytes, str, str]] = {
    "absolute": (entry("/etc/owned"), "/etc/owned", "refused: absolute path"),
    "absolute after a dot": (entry(".//owned"), ".//owned", "refused: absolute path"),
    "drive after a dot": (entry("./C:/owned"), "./C:/owned", DRIVE),
    "dot that is a file": (entry("."), ".", EMPTY_PART),
    "dot with a slash that is a file": (entry("./"), "./", EMPTY_PART),
    "link after a dot": (entry("./a", kind=tarfile.SYMTYPE, link="/etc"), "./a", LINK),
    "twice, once after a dot": (HARMLESS + entry("./a"), "a", TWICE),
    "the root twice": (2 * entry(".", kind=tarfile.DIRTYPE), ".", TWICE),
    "the root as a link": (entry(".", kind=tarfile.SYMTYPE, link="/etc"), ".", LINK),
    "parent": (entry("../owned"), "../owned", LEADS_OUT),
    "parent inside": (entry("a/b/../../../owned"), "a/b/../../../owned", LEADS_OUT),
    "parent after a dot": (entry("./../owned"), "./../owned", LEADS_OUT),
    "parent in a pax header": (pax(record("path", "a/../../owned")) + HARMLESS, "a/../../owned", LEADS_OUT),
    "parent in a long name": (long_name(b"a/../../owned\0") + HARMLESS, "a/../../owned", LEADS_OUT),
    "drive": (entry("C:/owned"), "C:/owned", DRIVE),
    "share": (entry("\\\\host\\owned"), "\\\\host\\owned", DRIVE),
    "dot": (entry("././a"), "././a", EMPTY_PART),
    "double slash": (entry("b//a"), "b//a", EMPTY_PART),
    "NUL": (pax(record("path", "a\0b")) + HARMLESS, r"a\x00b", "refused: NUL in the name"),
    "symbolic link": (entry("a", kind=tarfile.SYMTYPE, link="/etc"), "a", LINK),
    "hard link": (entry("a", kind=tarfile.LNKTYPE, link="b"), "a", "refused: a hard link"),
    "character device": (entry("a", kind=tarfile.CHRTYPE), "a", "refused: a device"),
    "block device": (entry("a", kind=tarfile.BLKTYPE), "a", "refused: a device"),
    "named pipe": (entry("a", kind=tarfile.FIFOTYPE), "a", "refused: a named pipe"),
    "sparse file": (entry("a", kind=tarfile.GNUTYPE_SPARSE), "a", "refused: a sparse file"),
    "sparse file by pax": (pax(record("GNU.sparse.major", "1")) + HARMLESS, "a", "refused: a sparse file"),
    "global header": (entry("g", kind=tarfile.XGLTYPE), "g", "refused: a global pax header"),
    "unknown type": (entry("a", kind=b"Z"), "a", "refused: a tar entry of type b'Z'"),
    "twice": (HARMLESS + HARMLESS, "a", TWICE),
    "file and folder": (HARMLESS + entry("a", kind=tarfile.DIRTYPE), "a", TWICE),
    "inside a file": (HARMLESS + entry("a/b"), "a/b", "refused: a folder in this path is also a file"),
    "folder that was a path": (entry("a/b") + HARMLESS, "a", TWICE),
    "folder with content": (entry("a", b"a", tarfile.DIRTYPE), "a", "refused: a folder entry must not hold data"),
    "long part": (entry("x" * 256), "x" * 256, "refused: name too long"),
    "long path": (entry("x/" * 600 + "a"), "x/" * 600 + "a", "refused: name too long"),
    "endless name": (long_name(b"", size=10 << 30), "", TOO_LONG),
    "endless pax header": (entry("pax", b"", tarfile.XHDTYPE, size=10 << 30), "", TOO_LONG),
    "headers without end": (3 * pax(b""), "", "refused: too many headers for one member"),
    "broken pax header": (pax(b"99 path=x\n") + HARMLESS, "", "a pax header is missing or broken"),
    "pax size": (pax(record("size", "-1")) + HARMLESS, "a", NO_NUMBER),
    "negative size": (entry("a", size=-512), "", "a tar header is missing or broken (negative size)"),
    "huge size": (HARMLESS + entry("b", size=1 << 60), "b", HUGE),
    "not a header": (HARMLESS + b"x" * 512, "a", "a tar header is missing or broken (invalid header)"),
    "data after the end": (HARMLESS + END + HARMLESS, "", "data after the end of the archive"),
    "one zero block": (HARMLESS + END[:512] + HARMLESS, "", "ends without an end-of-archive mark"),
    "nothing": (b"", "", "is empty"),
}


def write_gzip(path: Path, tar: bytes) -> Path:
    path.write_bytes(gzip.compress(tar, 1))
    return path


def tree(root: Path) -> set[str]:
    return {str(path) for path in root.rglob("*")}


def refusal(bundle: Path, act: Callable[[Path], object]) -> str:
    """Return the message of the refusal, after a check that nothing was written."""
    before = tree(bundle.parent)
    with pytest.raises(BundleUnreadable) as caught:
        act(bundle)
    assert caught.value.exit_code == 5
    assert tree(bundle.parent) == before
    text = str(caught.value)
    assert ", expected " in text or "\n  hint: " in text
    return text.removesuffix(f", expected {ADVICE['expected']}\n  hint: {ADVICE['hint']}")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_members_are_refused_by_name_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    blocks, member, what = HOSTILE[name]
    bundle = write_gzip(tmp_path / "hostile.tgz", blocks + END)
    message = f"{bundle}: {member}: {what}" if member else f"{bundle}: {what}"
    assert refusal(bundle, lambda path: unpack(path, tmp_path / "out")) == message
    assert refusal(bundle, verify_bundle) == message
    assert refusal(bundle, inspect_bundle) == message


SOUND = gzip.compress(HARMLESS + END)
CUT = "ends early: the file was cut off"
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a gzip file"),
    "not gzip": (HARMLESS + END, "not a gzip file"),
    "cut in the header": (SOUND[:9], "not a gzip file"),
    "flags": (SOUND[:3] + b"\x02" + SOUND[4:], "damaged or unusual, got 2, expected flags 0, 4 or 8"),
    "endless name": (SOUND[:3] + b"\x08" + SOUND[4:10] + b"x" * 5000, "(file name without end)"),
    "foreign extra field": (SOUND[:3] + b"\x04" + SOUND[4:], "gzip header is damaged"),
    "cut in the data": (SOUND[:-20], CUT),
    "cut in the trailer": (SOUND[:-1], CUT),
    "crc": (SOUND[:-8] + bytes([SOUND[-8] ^ 1]) + SOUND[-7:], "content is damaged (CRC or length differs)"),
    "length": (SOUND[:-1] + b"\x01", "content is damaged (CRC or length differs)"),
    "trailing garbage": (SOUND + b"x", "data after the end of the archive"),
    "second gzip member": (SOUND + SOUND, "data after the end of the archive"),
    "no end mark": (gzip.compress(HARMLESS), "ends without an end-of-archive mark"),
    "cut in a member": (gzip.compress(entry("a", b"", size=600)), "the archive ends inside this member"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_containers_are_refused_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    data, what = BROKEN[name]
    bundle = tmp_path / "broken.tgz"
    bundle.write_bytes(data)
    message = refusal(bundle, lambda path: unpack(path, tmp_path / "out"))
    assert message.startswith(f"{bundle}: ")
    assert message.splitlines()[0].endswith(what)
    assert refusal(bundle, verify_bundle) == message


def test_a_name_in_the_gzip_header_is_harmless(tmp_path: Path) -> None:
    bundle = tmp_path / "named.tgz"
    with bundle.open("wb") as file, gzip.GzipFile("../../owned", "wb", fileobj=file) as stream:
        stream.write(HARMLESS + END)
    assert unpack(bundle, tmp_path / "out").root == tmp_path / "out"


@pytest.mark.parametrize(("blocks", "limits", "what"), [
    (entry("a") + entry("b") + entry("c"), SMALL_LIMITS, "c: refused: too many members, expected at most 3"),
    (entry("1/2/3/4/5"), SMALL_LIMITS, "1/2/3/4/5: refused: too many members, expected at most 3"),
    (entry("a", bytes((1 << 20) + 1)), SMALL_LIMITS, f"a: {LARGE}"),
    (HARMLESS + bytes(1 << 21), Limits(total_bytes=1 << 20), LARGE),  # zeros after the end count, too
    (entry("a", b"\n" * 2000), Limits(small_num_lines=1999),
     "refused: too many lines, expected at most 1999 in a file of "),
    (HARMLESS + entry("b"), Limits(small_num_members=2), "b: refused: too many members, expected at most 2"),
])  # fmt: skip
def test_limits_hold_before_anything_is_read(
    blocks: bytes, limits: Limits, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gzip_stream, "LIMITS", limits)
    bundle = write_gzip(tmp_path / "large.tgz", blocks + END)
    assert refusal(bundle, lambda path: unpack(path, tmp_path / "out")).startswith(f"{bundle}: {what}")


def test_what_an_archive_may_hold_grows_with_its_size() -> None:
    sizes = [LIMITS.most_bytes(size) for size in (10**6, 11 << 20, 1 << 40)]
    assert sizes == [32 << 20, (32 + 2000) << 20, LIMITS.total_bytes]
    assert (LIMITS.most_lines(2 << 20), LIMITS.most_members(2 << 20)) == (math.inf, LIMITS.num_members)


def write_bomb(path: Path, num_members: int, member_bytes: int) -> Path:
    """Write zeros as a file a thousand times smaller: flushed deflate blocks, each written many times."""
    engine = zlib.compressobj(9, zlib.DEFLATED, -15)
    zeros = engine.compress(bytes(1 << 20)) + engine.flush(zlib.Z_FULL_FLUSH)
    with path.open("wb") as stream:
        stream.write(b"\x1f\x8b\x08\0\0\0\0\0\0\xff")
        for number in range(num_members):
            stream.write(engine.compress(entry(str(number), size=member_bytes)) + engine.flush(zlib.Z_FULL_FLUSH))
            for _ in range(member_bytes >> 20):
                stream.write(zeros)
    return path


def refusal_in_little_memory(bundle: Path, act: Callable[[Path], object]) -> str:
    tracemalloc.start()
    try:
        message = refusal(bundle, act)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 64 << 20
    return message


BOMB = "expected at most 200 times the compressed size"


@pytest.mark.parametrize("act", [verify_bundle, lambda path: unpack(path, path.parent / "out")])
def test_a_bomb_is_refused_before_it_inflates(act: Callable[[Path], object], tmp_path: Path) -> None:
    bundle = write_bomb(tmp_path / "bomb.tgz", 1, 3 << 30)
    assert bundle.stat().st_size < 4 << 20
    expected = f"{bundle}: 0: refused: a compression bomb, got '3.0 GiB from 3.0 MiB', {BOMB}"
    assert refusal_in_little_memory(bundle, act) == expected


def test_a_bomb_in_many_members_is_refused_at_the_floor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(ratio_floor_bytes=1 << 27, small_total_bytes=1 << 30)
    monkeypatch.setattr(gzip_stream, "LIMITS", limits)
    bundle = write_bomb(tmp_path / "bomb.tgz", 6, 1 << 27)
    expected = f"{bundle}: 0: refused: a compression bomb, got '128.9 MiB from 131.5 KiB', {BOMB}"
    assert refusal_in_little_memory(bundle, inspect_bundle) == expected


NUMBERS = {"mode": (100, 8), "owner": (108, 8), "group": (116, 8), "size": (124, 12), "time": (136, 12)}


@pytest.mark.parametrize("raw", [b"7_000", b"0o7000", b"+10", b"-1", b"1 0", b"\010", b"\xff" * 8])
@pytest.mark.parametrize("field", NUMBERS)
def test_numbers_that_tools_read_differently_are_refused(tmp_path: Path, field: str, raw: bytes) -> None:
    """GNU tar skips such a header and finds the next one inside the member: another list of checksums."""
    start, size = NUMBERS[field]
    block = bytearray(entry("a", b"a"))
    block[start : start + size] = raw.ljust(size, b"\0")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block[:512])
    bundle = write_gzip(tmp_path / "hostile.tgz", bytes(block) + END)
    found = refusal(bundle, verify_bundle)
    assert "a number that other tools read differently" in found or "a tar header is missing or broken" in found


@pytest.mark.parametrize("name", ["x/SHA256SUMS", "sha256sums"])
def test_a_second_list_of_checksums_is_refused(tmp_path: Path, name: str) -> None:
    bundle = write_gzip(tmp_path / "hostile.tgz", entry("SHA256SUMS", b"a") + entry(name, b"b") + END)
    assert "a second list of checksums" in refusal(bundle, verify_bundle)
