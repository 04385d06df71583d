"""Fetch stored rollouts, whose digest the run pins, from a mirror or from the archives that the run names.

An archive is a bundle, or another ``.tar.gz``, with the files ``0.pt``, ``1.pt``, … in any of its folders.
"""

from __future__ import annotations

import re
import shutil
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPMessage
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final
from urllib.parse import urlsplit

from rlk_repro.base.disk import Unwritable, open_stream
from rlk_repro.base.errors import BundleUnreadable, EnvironmentMissing, Problem, SpecError
from rlk_repro.base.files import CHUNK_BYTES
from rlk_repro.base.units import format_bytes
from rlk_repro.bundle.archive import ArchiveReader
from rlk_repro.prepare.contents import FileRecord, digest_of, record_files
from rlk_repro.prepare.steps import Made, Tell, WorkDir
from rlk_repro.rundir.paths import RolloutDir
from rlk_repro.rundir.rollout_files import check_file
from rlk_repro.spec import StoredRollouts

FOLDER: Final = "rollouts"
ARCHIVE: Final = "archive.tgz"
_NUMBERED: Final = re.compile(r"(0|[1-9][0-9]*)\.pt")
# The size of an archive is not known in advance, and a server could send data without end.
MAX_ARCHIVE_BYTES: Final = 64 << 30
TIMEOUT_S: Final = 60.0


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
            archive = work.files / ARCHIVE
            try:
                _download(url, archive, MAX_ARCHIVE_BYTES)
                _unpack(archive, work.files, self.stored.num_files, f"archive {url}")
            except Unwritable:
                raise
            except OSError as error:
                reasons.append(Problem(url, f"could not be fetched ({error})"))
                _clear(work)
            except BundleUnreadable:
                _clear(work)
                raise
            else:
                archive.unlink()
                return True
        if reasons:
            raise EnvironmentMissing(*reasons)
        return False


def _clear(work: WorkDir) -> None:
    shutil.rmtree(work.files, ignore_errors=True)
    work.files.mkdir(parents=True)


def _unpack(archive: Path, folder: Path, num_files: int, what: str) -> None:
    """Only numbered files are unpacked, from any folder of the archive."""
    with archive.open("rb") as stream:
        reader = ArchiveReader(stream, what)
        for member in reader:
            match = _NUMBERED.fullmatch(PurePosixPath(member.name).name)
            if match is None or member.is_folder or int(match[1]) >= num_files:
                continue
            try:
                with open_stream(folder / match[0], "xb") as target:
                    for piece in reader.data():
                        target.write(piece)
            except FileExistsError:
                what = "holds two files with the same number"
                raise SpecError(Problem("rollout archive", what, got=match[0])) from None


def _download(url: str, path: Path, limit: int) -> None:
    """Fetch ``url`` to a file.

    Raises:
        OSError: no answer, or a redirect that leads neither to https nor to the same server.
        BundleUnreadable: the file is larger than ``limit`` bytes.
    """
    total = 0
    opener = urllib.request.build_opener(_Redirects)
    with opener.open(url, timeout=TIMEOUT_S) as answer, open_stream(path, "wb") as file:
        while piece := answer.read(CHUNK_BYTES):
            total += len(piece)
            if total > limit:
                expected = f"at most {limit} bytes ({format_bytes(limit)})"
                hint = "fetch the files by hand, and give their folder as --mirror"
                what = "is larger than allowed"
                raise BundleUnreadable(Problem(f"archive {url}", what, expected=expected, hint=hint))
            file.write(piece)


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        target, asked = urlsplit(newurl), urlsplit(req.full_url)
        if target.scheme != "https" and (target.scheme, target.netloc) != (asked.scheme, asked.netloc):
            raise OSError(f"redirected to {newurl}, expected https or the requested address")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
