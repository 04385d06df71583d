"""Slurm's clients as small scripts that answer what a test put down and note how they were called."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

_SCRIPT = """\
#!/bin/sh
name=$(basename "$0")
{{ printf '%s' "$name"; for part; do printf '\\037%s' "$part"; done; printf '\\036'; }} >> {folder}/calls
env | grep -E '^(SBATCH|SLURM|SQUEUE)_' >> {folder}/env
case " $* " in *" --test-only "*) name=$name-test;; *" config "*) name=config;; *" topology "*) name=topology;; esac
[ -f {folder}/$name.err ] && cat {folder}/$name.err >&2
[ -f {folder}/$name.out ] && cat {folder}/$name.out
exit "$(cat {folder}/$name.rc 2>/dev/null || echo 0)"
"""
CLIENTS = ("sbatch", "squeue", "sacct", "scancel", "scontrol", "sinfo")


class FakeSlurm:
    """Answers are kept by client; ``sbatch-test`` is sbatch with ``--test-only``, ``config`` is scontrol's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        binaries = folder / "bin"
        binaries.mkdir(parents=True)
        for name in CLIENTS:
            tool = binaries / name
            tool.write_text(_SCRIPT.format(folder=folder))
            tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{binaries}{os.pathsep}{os.environ['PATH']}")
        self.answer("sinfo", "slurm-wlm 22.05.8\n")
        self.answer("config", "Configuration data as of today\nClusterName             = test\n"
                              "SLURM_VERSION           = 22.05.8\n")  # fmt: skip
        self.answer("sacct", error="Slurm accounting storage is disabled\n", code=1)

    def answer(self, name: str, text: str = "", *, error: str = "", code: int = 0) -> None:
        (self.folder / f"{name}.out").write_text(text)
        (self.folder / f"{name}.err").write_text(error)
        (self.folder / f"{name}.rc").write_text(str(code))

    def queue(self, *rows: str) -> None:
        self.answer("squeue", "".join(f"{row}\n" for row in rows))

    @property
    def calls(self) -> list[list[str]]:
        path = self.folder / "calls"
        return [call.split("\x1f") for call in path.read_text().split("\x1e")[:-1]] if path.exists() else []

    def count(self, name: str) -> int:
        return sum(call[0] == name for call in self.calls)

    @property
    def seen_env(self) -> str:
        return (self.folder / "env").read_text()
