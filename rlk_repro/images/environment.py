"""Create a virtual environment with a stack's packages, sources, kernels and record, for hosts without containers.

The steps are those of docker/Dockerfile.locked.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rlk_repro.base import proc
from rlk_repro.base.disk import find_existing
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem, SpecError
from rlk_repro.base.files import load_json, sha256_bytes, write_json, write_text
from rlk_repro.base.guarded import run_shown
from rlk_repro.base.units import format_bytes
from rlk_repro.images.build import ROOT, make_arguments, require_clean, say, timed
from rlk_repro.images.stacks import COST, DISK_BYTES, choose_platform, lock_path, read_lock
from rlk_repro.probes.container import LOCK
from rlk_repro.spec import ImagePlatform, Stack

PYTHON: Final = "3.12"
STEPS: Final = ("inputs", "transformer-engine", "package", "sources", "rl-kernel", "imports", "record")
KEPT: Final = ("transformer-engine", "sources", "rl-kernel")
"""Steps that take minutes, and are repeated only after a change of the lock or the pins."""
COMPILING: Final = dict.fromkeys(("transformer-engine", "rl-kernel"), "compiling; a lower MAX_JOBS saves memory")
TIMEOUT_S: Final = 4 * 3600.0
PIP: Final = ("--require-hashes", "--no-deps", "--only-binary", ":all:")


def create(stack: Stack, platform: str | None, folder: Path) -> None:
    """Create the environment, or continue an interrupted build."""
    folder = folder.absolute()
    chosen = choose_platform(stack, list(stack.locks), platform, "lock")
    num_packages = len(read_lock(stack, chosen))
    require_clean()
    _check_space(folder)
    _make_venv(folder)
    with timed("packages", f"installing {num_packages} packages; without a cache, {COST}"):
        _install(folder, lock_path(stack.stack, chosen))
    write_text(folder / LOCK, lock_path(stack.stack, chosen).read_text())
    given = make_arguments(stack, chosen, f"requirements/{lock_path(stack.stack, chosen).name}", stack.locks[chosen])
    given |= {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    _run_steps(stack, chosen, folder, given)


def _run_steps(stack: Stack, chosen: ImagePlatform, folder: Path, environ: Mapping[str, str]) -> None:
    done = _read_steps(folder)
    for step in STEPS:
        key = _key(stack, chosen, step)
        if done.get(step) == key:
            say(f"{step}: done already")
            continue
        words = COMPILING.get(step, "running")
        # each build step runs modules of this checkout, because the image's record names this checkout's commit
        argv = [str(_python(folder)), "-m", "tools.image_build", step]
        with timed(step, words):
            _require(f"step {step}", _shown(argv, environ))
        if step in KEPT:
            done[step] = key
            write_json(folder / "steps.json", done)
        require_clean(environ["REVISION"])


def check(folder: Path, stack: str | None, platform: str | None) -> int:
    """Run the environment's own check; return 0 if the environment matches its record, 1 if it differs."""
    folder = folder.absolute()
    if not (folder / LOCK).is_file():
        raise _no_environment(folder)
    # the check runs in the caller's folder, because a relative path in --stack is relative to that folder
    argv = ["env", str(_python(folder)), "-P", "-m", "rlk_repro.image_check"]
    for flag, value in (("--stack", stack), ("--platform", platform)):
        if value:
            argv += [flag, value]
    code = run_shown(argv, timeout_s=TIMEOUT_S)
    if code in {126, 127}:
        raise _no_environment(folder)
    return 1 if code is None else code


def source_requirement(stack: Stack) -> str:
    """Return pip's requirement line for ``transformer-engine-torch``, which pip builds from sources."""
    component = stack.components.get("transformer-engine-torch")
    if component is None or component.version is None or component.sha256 is None:
        where = f"stack {stack.stack}: components.transformer-engine-torch"
        raise SpecError(Problem(where, "missing", expected="the version and the sha256 of the sources"))
    return f"transformer-engine-torch=={component.version} --hash=sha256:{component.sha256}\n"


def _no_environment(folder: Path) -> EnvironmentMissing:
    return EnvironmentMissing(Problem(str(folder), "is not an environment of a stack", hint="rlk-repro env create DIR"))


def _make_venv(folder: Path) -> None:
    if not _python(folder).is_file():
        uv, python = shutil.which("uv"), shutil.which(f"python{PYTHON}")
        if uv is None and python is None:
            raise EnvironmentMissing(Problem(f"uv, python{PYTHON}", "are not on PATH", expected="one of them"))
        argv = [uv, "venv", "--quiet", "--python", PYTHON] if uv else [str(python), "-m", "venv"]
        _require("creating the environment", _shown([*argv, str(folder)], {}))
    words = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    found = proc.run([str(_python(folder)), "-c", words]).stdout.strip()
    if found != PYTHON:
        raise EnvironmentMissing(
            Problem(str(_python(folder)), "is another version of Python", got=found, expected=PYTHON)
        )


def _install(folder: Path, lock: Path) -> None:
    uv, python = shutil.which("uv"), str(_python(folder))
    argv = [python, "-m", "pip", "install"]
    if uv:
        argv = [uv, "pip", "install", "--python", python]
    _require("installing the packages", _shown([*argv, *PIP, "--requirement", str(lock)], {}))


def _key(stack: Stack, platform: ImagePlatform, step: str) -> str:
    pins = {str(name): pin.commit for name, pin in stack.pins.items()}
    return sha256_bytes(json.dumps([step, stack.locks[platform], source_requirement(stack), pins]).encode())


def _read_steps(folder: Path) -> dict[str, str]:
    path = folder / "steps.json"
    return dict(load_json(path)) if path.is_file() else {}


def _check_space(folder: Path) -> None:
    """Refuse a disk without space for the packages, unless the packages are already installed."""
    if (folder / LOCK).is_file():
        return
    parent = find_existing(folder, os.path.isdir)
    free = shutil.disk_usage(parent).free
    if free < DISK_BYTES:
        raise EnvironmentMissing(
            Problem(
                str(parent), "has too little space", got=format_bytes(free), expected=f"{format_bytes(DISK_BYTES)} free"
            )
        )
    say(f"{folder}: needs about {format_bytes(DISK_BYTES)}; {format_bytes(free)} are free")


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _shown(argv: Sequence[str], environ: Mapping[str, str]) -> int | None:
    # the steps are modules of this checkout, and a package's setup.py may import from its own folder
    words = ["env", f"--chdir={ROOT}", "--unset=PYTHONSAFEPATH", *argv]
    return run_shown(words, timeout_s=TIMEOUT_S, env=os.environ | environ)


def _require(what: str, code: int | None) -> None:
    if code != 0:
        raise CheckFailed(Problem(what, "did not finish", got=code, hint="run the same command again: it continues"))
