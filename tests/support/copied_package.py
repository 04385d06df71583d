"""A copy of the project's package and data, to extend as a user of the source would."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests import ROOT

FOLDERS = ("rlk_repro", "jobs", "manifests", "slurm", "k8s", "docker")


class Copy:
    """The project in ``root``; ``touched`` tells which of its files are no longer what they were."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in FOLDERS:
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "examples"))
        self._before = self._read()

    def add(self, source: Path, name: str) -> None:
        shutil.copyfile(source, self.root / name)

    def replace(self, name: str, old: str, new: str) -> None:
        path = self.root / name
        text = path.read_text()
        assert text.count(old) == 1, (name, old)
        path.write_text(text.replace(old, new))

    def touched(self) -> dict[str, int]:
        """By name of an earlier file, how many of its lines are new; it lost none but those they replace."""
        after = self._read()
        changed = {name: text for name, text in self._before.items() if after[name] != text}
        return {
            name: len(set(after[name].splitlines()) - set(text.splitlines())) for name, text in changed.items()
        }  # fmt: skip

    def run(self, *argv: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
        """The copy's command, with nothing of the checkout on its path."""
        command = [sys.executable, "-m", "rlk_repro", *map(str, argv)]
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        env = {**kept, "PYTHONPATH": str(self.root), **env}
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)

    def _read(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.root)): path.read_text(errors="replace")
            for name in FOLDERS for path in (self.root / name).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }  # fmt: skip


# An environment, and wheels that hold one empty module, for pip to install or refuse.


def make_environment(folder: Path) -> None:
    """With the pip of the tests' Python: to install a pip takes seconds."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "pip").symlink_to(Path(sysconfig.get_path("purelib"), "pip"))


def make_wheel(folder: Path, name: str, version: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path, metadata = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "")
        archive.writestr(f"{metadata}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{metadata}/RECORD", "")
    return path


# Repositories of a folder under an address of https, as a site with mirrors has them: by git's own configuration.


ADDRESS = "https://git.example"


def render_config(mirror: str) -> str:
    return f'[url "{mirror}/"]\n\tinsteadOf = {ADDRESS}/\n'


def mirror_folder(folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """``https://git.example/<name>`` is then the repository ``<name>`` of the folder."""
    home.mkdir(parents=True, exist_ok=True)
    (home / ".gitconfig").write_text(render_config(folder.as_uri()))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_ALLOW_PROTOCOL", "file")
    return ADDRESS
