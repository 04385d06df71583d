"""The workflow that releases images, run here step by step: what GitHub would put into it is given by name."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests import ROOT
from tests.support.images import examples
from tests.support.images.examples import Engine

WORKFLOW = ROOT / ".github" / "workflows" / "images.yml"
EXPRESSION = re.compile(r"\$\{\{ (.*?) \}\}")
CONDITION = re.compile(r"(\S+) == '(\w+)'")
GH = '#!/bin/sh\necho "$@" >>"{log}"\n'
PROGRAM = '#!/bin/sh\nexec "{python}" -m rlk_repro "$@"\n'


@dataclass(frozen=True)
class Release:
    """``folder`` is a checkout with an origin; ``asked`` has what ``gh`` was told."""

    folder: Path
    engine: Engine
    values: Mapping[str, str]
    repository: str

    @classmethod
    def make(cls, place: Path, engine: Engine, context: Path, repository: str) -> Release:
        folder = place / "checkout"
        shutil.copytree(context, folder)
        shutil.copyfile(ROOT / "Makefile", folder / "Makefile")
        private, public = _make_keys(place / "gpg")
        (folder / "docker" / "release.gpg").write_text(public)
        examples.commit_files(folder, {".gitignore": ".venv\n__pycache__\n"}, "released")
        examples.git(place, "clone", "--quiet", "--bare", str(folder), str(place / "origin"))
        examples.git(folder, "remote", "add", "origin", str(place / "origin"))
        _write_program(folder / ".venv/bin/rlk-repro", PROGRAM.format(python=sys.executable))
        _write_program(place / "bin/gh", GH.format(log=place / "asked"))
        for name in (".venv", ".base"):
            (folder / ".venv" / name).touch()
        values = {"vars.ROCM_BASE": "", "github.actor": "us", "github.token": "x", "secrets.GITHUB_TOKEN": "x",
                  "github.ref_name": "images-test", "secrets.IMAGE_SIGNING_KEY": private}  # fmt: skip
        return cls(folder, engine, values, repository)

    @property
    def asked(self) -> Path:
        return self.folder.parent / "asked"

    def run_job(self, name: str, values: Mapping[str, str]) -> dict[str, str]:
        """What its steps put out, by name; each must end well."""
        found: dict[str, str] = {}
        for step in _read_job(name)["steps"]:
            if "run" in step and _holds(step.get("if", ""), found):
                done, outputs = self._run(name, step, values)
                assert done.returncode == 0, (step, done.stdout[-2000:], done.stderr[-2000:])
                found |= {f"steps.{step.get('id')}.outputs.{key}": text for key, text in outputs.items()}
        return {key: text for key, text in found.items() if not key.endswith(".is-built")}

    def run_step(self, job: str, name: str, values: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        (step,) = (step for step in _read_job(job)["steps"] if step.get("name") == name)
        return self._run(job, step, values)[0]

    def sign_from(self, signatures: Path) -> None:
        shutil.copytree(signatures, self.folder / "signatures")

    def _run(
        self, job: str, step: Mapping[str, Any], values: Mapping[str, str]
    ) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
        known = {**self.values, **values}
        workflow = yaml.safe_load(WORKFLOW.read_text())
        given = {**workflow["env"], **_read_job(job).get("env", {}), **step.get("env", {})}
        env = {name: EXPRESSION.sub(lambda found: known.get(found[1], ""), text) for name, text in given.items()}
        output = self.folder.parent / "output"
        output.write_text("")
        env |= {"REPOSITORY": self.repository, "GITHUB_OUTPUT": str(output), "GITHUB_RUN_ID": "1"}
        path = f"{self.folder.parent / 'bin'}:{examples.PATH}"
        script = self.folder.parent / "step.sh"
        script.write_text(step["run"])
        done = examples.run("nice", "-n", "5", "bash", "-e", script, cwd=self.folder, check=False,
                            env={**self.engine.variables, **env, "PATH": path})  # fmt: skip
        return done, dict(line.split("=", 1) for line in output.read_text().splitlines())


def _read_job(name: str) -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())["jobs"][name]
    return job


def _holds(condition: str, found: Mapping[str, str]) -> bool:
    match = CONDITION.fullmatch(condition)
    return not condition or (match is not None and found.get(match[1]) == match[2])


def _make_keys(home: Path) -> tuple[str, str]:
    """Private and public key of gpg, in text."""
    home.mkdir(mode=0o700)
    gpg = ("gpg", "--homedir", home, "--batch", "--quiet")
    examples.run(*gpg, "--passphrase", "", "--quick-gen-key", "release", "ed25519", "sign", "never")
    keys = [examples.run(*gpg, "--armor", f"--{what}").stdout for what in ("export-secret-keys", "export")]
    examples.run("gpgconf", "--homedir", home, "--kill", "all")
    return keys[0], keys[1]


def _write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
