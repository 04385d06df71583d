"""Check whether a bundle is unchanged since it was sealed, and report every problem in one pass, without unpacking."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from rlk_repro.base.answer import Answer
from rlk_repro.base.disk import MORE_ROOM, new_folder, temporary_folder, writing
from rlk_repro.base.errors import BundleUnreadable, Problem, SpecError
from rlk_repro.base.escapes import printable
from rlk_repro.base.files import (
    MAX_ANALYSIS_BYTES,
    MAX_JSON_BYTES,
    MAX_PLAN_BYTES,
    MAX_RECORDS_BYTES,
    parse_json,
    sha256_bytes,
)
from rlk_repro.base.findings import Finding, Level, has_blocking, limit_findings
from rlk_repro.base.units import format_bytes
from rlk_repro.bundle.archive import ArchiveReader, read_own
from rlk_repro.bundle.checksums import (
    CHECKSUMS,
    Piece,
    check_seal,
    hash_through,
    parse_checksums,
    render_checksums,
)
from rlk_repro.bundle.seal import UNPACKED, FolderReader, is_folder, open_archive, write_through
from rlk_repro.rundir import manifest, results
from rlk_repro.rundir.paths import RunDir

_LAYOUT: Final = RunDir(Path())
_PARTS_OF_NODE_AND_TRIAL_FILES: Final = 3
# The newest schema number that this version reads in each file.
_SCHEMAS: Final = {
    str(_LAYOUT.plan): 1,
    str(_LAYOUT.submission): 1,
    str(_LAYOUT.prepared): 1,
    str(_LAYOUT.analysis): results.SCHEMA,
    str(_LAYOUT.node("*").manifest): manifest.SCHEMA,
    str(_LAYOUT.trial("*").exit): 1,
}
_MAX_BYTES: Final = {
    CHECKSUMS: MAX_RECORDS_BYTES,
    str(_LAYOUT.plan): MAX_PLAN_BYTES,
    str(_LAYOUT.prepared): MAX_RECORDS_BYTES,
    str(_LAYOUT.analysis): MAX_ANALYSIS_BYTES,
}
_ID: Final = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Verification(Answer):
    """The answer of ``verify``; ``bundle_id`` is computed from the files, and None if the bundle was never sealed.

    ``claimed_id`` is the id that the bundle's own SHA256SUMS gives, if that id differs from ``bundle_id``.
    """

    is_ok: bool
    bundle_id: str | None
    findings: tuple[Finding, ...]
    claimed_id: str | None = None


@dataclass
class _Contents:
    digests: dict[str, str] = field(default_factory=dict)
    checksums: bytes | None = None
    folders: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


@contextmanager
def open_verified(path: Path) -> Iterator[tuple[RunDir, Verification]]:
    """Yield a run directory and its verification; a bundle is unpacked into a temporary folder while it is verified.

    One reading hashes and unpacks a bundle, so the yielded files are those that were verified.  They are the reader's
    only until the block ends.
    """
    if is_folder(path):
        yield RunDir(path), verify(path)
        return
    with temporary_folder("rlk-repro-") as folder:
        unpacked = folder / UNPACKED
        with writing(folder, hint=MORE_ROOM):
            unpacked.mkdir()
            verification = _judge(_verify_archive(path, unpacked))
        yield RunDir(unpacked), verification


def unpack(bundle: Path, destination: Path) -> RunDir:
    """Unpack a bundle into a new folder, which becomes a run directory; after an error the folder does not exist.

    Raises:
        SpecError: there is no such bundle, or the destination exists.
        BundleUnreadable: the bundle is unsafe.
    """
    if destination.exists():
        raise SpecError(Problem(str(destination), "already exists", expected="a new folder"))
    with new_folder(destination) as partial:
        _verify_archive(bundle, partial)
    return RunDir(destination)


def verify(path: Path, *, expected_id: str | None = None) -> Verification:
    """Check a bundle or a run directory against its SHA256SUMS, and check the schema numbers of rlk-repro's JSON files.

    Any difference is a blocking finding, as is another id than ``expected_id``. If another tool packed
    the bundle, a warning says that owners, modes and times are not checked.

    Raises:
        SpecError: there is no such file, or ``expected_id`` is not 64 hex digits.
        BundleUnreadable: the archive is unsafe or cannot be read to its end; the error names damaged members.
    """
    if expected_id is not None and _ID.fullmatch(expected_id) is None:
        expected, hint = "64 lower-case hex digits", "without --id, rlk-repro verify prints a bundle's whole id"
        raise SpecError(Problem("--id", "not a bundle id", got=expected_id, expected=expected, hint=hint))
    if not is_folder(path):
        return _judge(_verify_archive(path), expected_id)
    reader, contents = FolderReader(RunDir(path)), _Contents()
    _read(reader, contents)
    contents.findings += [*reader.refused, *_compare(contents)]
    return _judge(contents, expected_id)


def _judge(contents: _Contents, expected_id: str | None = None) -> Verification:
    bundle_id, claimed_id = _identify(contents.digests)
    findings = tuple(limit_findings([*contents.findings, *_check_id(bundle_id, expected_id)]))
    return Verification(is_ok=not has_blocking(findings), bundle_id=bundle_id, findings=findings, claimed_id=claimed_id)


def _verify_archive(path: Path, folder: Path | None = None) -> _Contents:
    contents = _Contents()
    with open_archive(path) as reader:
        try:
            _read(reader, contents, folder)
        except BundleUnreadable as error:
            raise BundleUnreadable(*error.problems, *_find_damaged(path, contents)) from None
    packing = _check_packing(path, reader)
    contents.findings += [*_compare(contents), *_find_extra_folders(contents), *packing]
    return contents


def _identify(digests: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return the id computed from the present files, and the id that SHA256SUMS gives if the two differ."""
    claimed = digests.get(CHECKSUMS)
    if claimed is None:
        return None, None
    own = {name: digest for name, digest in digests.items() if name != CHECKSUMS}
    bundle_id = sha256_bytes(render_checksums(own))
    return bundle_id, None if claimed == bundle_id else claimed


def _check_id(bundle_id: str | None, expected_id: str | None) -> list[Finding]:
    if expected_id in {None, bundle_id}:
        return []
    return [Finding(Level.BLOCKING, "id", str(expected_id), bundle_id or "no id: the bundle was never sealed")]


def _read(reader: ArchiveReader | FolderReader, contents: _Contents, folder: Path | None = None) -> None:
    """Hash every file, and write it below ``folder`` where one is given."""
    for member in reader:
        name = member.name
        if member.is_folder:
            contents.folders.append(name)
            if folder is not None:
                (folder / name).mkdir(parents=True, exist_ok=True)
            continue
        data: Iterable[Piece] = reader.data()
        if folder is not None:
            data = write_through(folder / name, data)
        pieces = hash_through(name, data, contents.digests)
        schema = _find_schema(name)
        if name != CHECKSUMS and schema is None:
            for _ in pieces:
                pass
            continue
        max_bytes = _MAX_BYTES.get(name, MAX_JSON_BYTES)
        content = read_own(pieces, max_bytes)
        if content is None:
            found = format_bytes(member.size_bytes)
            limit = f"at most {format_bytes(max_bytes)}"
            contents.findings.append(Finding(Level.BLOCKING, printable(name), limit, found))
        elif schema is None:
            contents.checksums = content
        else:
            contents.findings += _check_schema(name, content, schema)


def _find_schema(name: str) -> int | None:
    parts = name.split("/")
    if len(parts) == _PARTS_OF_NODE_AND_TRIAL_FILES:
        parts[1] = "*"
    return _SCHEMAS.get("/".join(parts))


def _check_schema(name: str, data: bytes, schema: int) -> list[Finding]:
    try:
        parse_json(name, data, schema=schema, max_bytes=len(data))
    except BundleUnreadable as error:
        expected = f"JSON of schema {schema} or older"
        return [Finding(Level.BLOCKING, printable(name), expected, str(problem)) for problem in error.problems]
    return []


def _compare(contents: _Contents) -> list[Finding]:
    if contents.checksums is None:
        return [Finding(Level.BLOCKING, CHECKSUMS, "a seal", "missing: the run was interrupted or has not finished")]
    return check_seal(contents.checksums, contents.digests)


def _find_damaged(path: Path, contents: _Contents) -> list[Problem]:
    if contents.checksums is None:
        return []
    listed, _ = parse_checksums(contents.checksums)
    return [
        Problem(f"{path}: {printable(name)}", "damaged", got=digest, expected=listed.get(name, "no such member"))
        for name, digest in contents.digests.items()
        if name != CHECKSUMS and listed.get(name) != digest
    ]


def _find_extra_folders(contents: _Contents) -> list[Finding]:
    """Find empty folders in the archive, because no checksum covers them."""
    used = {str(parent) for name in contents.digests for parent in PurePosixPath(name).parents} | {""}
    return [
        Finding(Level.BLOCKING, f"{printable(name)}/", "no folder", "an extra folder")
        for name in contents.folders
        if name not in used
    ]


def _check_packing(path: Path, reader: ArchiveReader) -> list[Finding]:
    if reader.is_as_packed and reader.foreign_member is None:
        return []
    if reader.is_own:
        found = "changed bytes that decompress to the same content"
        if reader.is_as_packed:
            found = "a header or padding that rlk-repro does not write"
        return [Finding(Level.BLOCKING, str(path), "the bytes that were packed", found)]
    found = "an archive that another tool packed, so only its content is checked"
    findings = [Finding(Level.WARNING, str(path), "an archive that rlk-repro packed", found)]
    if reader.foreign_member is not None:
        expected = "a header as rlk-repro writes it"
        found = "the owner, mode, time or padding differs; this is the first such member"
        findings.append(Finding(Level.WARNING, printable(reader.foreign_member), expected, found))
    return findings
