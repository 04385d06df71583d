"""Fetch stored rollouts, whose digest the run pins, from a mirror or from the archives that the run names.

An archive is any tar file, for example a bundle, with the files ``0.pt``, ``1.pt``, … in any of its folders.
"""

from __future__ import annotations

import re
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, Self

from rlk_repro.base.disk import Unwritable, open_stream
from rlk_repro.base.errors import BundleUnreadable, EnvironmentMissing, Problem, SpecError
from rlk_repro.prepare.contents import FileRecord, digest_of, record_files
from rlk_repro.prepare.downloads import Bounds, open_url
from rlk_repro.prepare.making import Made, Tell, WorkDir
from rlk_repro.rundir.paths import RolloutDir
from rlk_repro.rundir.rollout_files import check_file
from rlk_repro.spec import StoredRollouts

FOLDER: Final = "rollouts"
_NUMBERED: Final = re.compile(r"(0|[1-9][0-9]*)\.pt")
# The size of an archive is not known in advance.
MAX_ARCHIVE_BYTES: Final = 64 << 30
MAX_HEADER_BYTES: Final = 1 << 16


class _Header(tarfile.TarInfo):
    """A header of a stranger's archive; tarfile reads the body of an extended header whole, whatever its size."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        info = super().frombuf(buf, encoding, errors)
        is_file = info.type in {tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE}
        if info.type == tarfile.GNUTYPE_SPARSE or (not is_file and info.size > MAX_HEADER_BYTES):
            raise BundleUnreadable(Problem("rollout archive", "has an unusual header", got=f"{info.size} bytes",
                                           expected=f"at most {MAX_HEADER_BYTES}, and no sparse file"))  # fmt: skip
        return info


@dataclass(frozen=True, kw_only=True)
class Storage:
    stored: StoredRollouts
    mirror: Path | None
    is_offline: bool

    @property
    def source(self) -> dict[str, Any]:
        return self.stored.model_dump(mode="json", include={"name", "num_files", "digest", "made_by"})

    def run(self, work: WorkDir, tell: Tell) -> Made:
        """Fetch the rollouts' files and check them.

        Raises:
            BundleUnreadable: the files differ from those that the run names, or hold code as well as data.
        """
        found = self._copy(work) or self._fetch(work, tell)
        if not found:
            raise EnvironmentMissing(
                Problem(f"rollouts {self.stored.name}", "not found", expected="a mirror or archive with the files",
                        hint=f"--mirror DIR with the files DIR/{FOLDER}/{self.stored.name}/0.pt and so on")
            )  # fmt: skip
        files = record_files(work.files)
        self.check(files)
        for name in files:
            check_file(work.files / name)
        return Made(source=self.source, files=files)

    def check(self, files: Mapping[str, FileRecord]) -> None:
        where = f"rollouts {self.stored.name}"
        wanted = {RolloutDir(Path()).file(number).name: number for number in range(self.stored.num_files)}
        if files.keys() != wanted.keys():
            odd = sorted(files.keys() ^ wanted.keys())
            raise BundleUnreadable(Problem(where, "differ from the files that the run names", got=odd[0],
                                           expected=f"0.pt to {self.stored.num_files - 1}.pt"))  # fmt: skip
        digest = f"sha256:{digest_of({name: item.sha256 for name, item in files.items()}, wanted)}"
        if digest != self.stored.digest:
            raise BundleUnreadable(
                Problem(where, "differ from the files that the run names", got=digest, expected=self.stored.digest)
            )

    def _copy(self, work: WorkDir) -> bool:
        folder = None if self.mirror is None else self.mirror / FOLDER / self.stored.name
        if folder is None or not folder.is_dir():
            return False
        _clear(work)
        for number in range(self.stored.num_files):
            file = RolloutDir(folder).file(number)
            if file.is_file():
                shutil.copyfile(file, work.files / file.name)
        return True

    def _fetch(self, work: WorkDir, tell: Tell) -> bool:
        reasons = []
        for url in () if self.is_offline else self.stored.fetch:
            tell(f"rollouts {self.stored.name} from {url}")
            _clear(work)
            bounds = Bounds(asked=url, what=f"archive {url}", limit=MAX_ARCHIVE_BYTES)
            try:
                with open_url(bounds) as stream:
                    _unpack(stream, work.files, self.stored.num_files, bounds)
            except Unwritable:
                raise
            except (OSError, EOFError, tarfile.TarError) as error:
                reasons.append(Problem(url, f"could not be fetched ({error})"))
                _clear(work)
            except BundleUnreadable:
                _clear(work)
                raise
            else:
                return True
        if reasons:
            raise EnvironmentMissing(*reasons)
        return False


def _clear(work: WorkDir) -> None:
    shutil.rmtree(work.files, ignore_errors=True)
    work.files.mkdir(parents=True)


def _unpack(stream: IO[bytes], folder: Path, num_files: int, bounds: Bounds) -> None:
    """Only numbered files are unpacked, from any folder of the archive."""
    unpacked_bytes = 0
    with tarfile.open(fileobj=stream, mode="r|*", tarinfo=_Header) as archive:
        for member in archive:
            name = PurePosixPath(member.name).name
            unpacked_bytes += member.size
            bounds.check_size(unpacked_bytes)
            match = _NUMBERED.fullmatch(name)
            if match is None or not member.isfile() or member.issparse() or int(match[1]) >= num_files:
                continue
            data = archive.extractfile(member)
            assert data is not None
            try:
                with open_stream(folder / name, "xb") as target:
                    shutil.copyfileobj(data, target)
            except FileExistsError:
                raise SpecError(Problem("rollout archive", "holds two files with the same number", got=name)) from None
