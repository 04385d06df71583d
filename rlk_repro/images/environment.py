"""Create a virtual environment with a stack's packages, sources, kernels and record, for hosts without containers.

The steps are those of docker/Dockerfile.locked.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rlk_repro.base import git, proc
from rlk_repro.base.disk import find_existing
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem, SpecError
from rlk_repro.base.files import load_json, sha256_bytes, sha256_file, write_bytes, write_json, write_text
from rlk_repro.base.guarded import Guarded
from rlk_repro.base.units import format_bytes
from rlk_repro.bundle.checksums import CHECKSUMS, render_checksums
from rlk_repro.images import packed
from rlk_repro.images.build import ROOT, make_arguments, require_clean, say, timed
from rlk_repro.images.lock import FOLDER, Locked, lock_path, read_lock, sum_sizes
from rlk_repro.images.stacks import choose_platform
from rlk_repro.probes.container import LOCK
from rlk_repro.spec import ImagePlatform, Stack

PYTHON: Final = "3.12"
STEPS: Final = ("inputs", "transformer-engine", "package", "sources", "rl-kernel", "imports", "sbom", "record")
KEPT: Final = ("transformer-engine", "sources", "rl-kernel")
"""Steps that take minutes, and are repeated only after a change of the lock or the pins."""
TIMEOUT_S: Final = 4 * 3600.0
ARCHITECTURES: Final = "80 90 100"
SBOM_LOCK: Final = FOLDER / "sbom.txt"
PIP: Final = ("--require-hashes", "--no-deps", "--only-binary", ":all:")


def create(stack: Stack, platform: str | None, folder: Path, *, bundle: Path | None = None) -> None:
    """Create the environment, or continue an interrupted build; ``bundle`` is a folder that `export` wrote."""
    folder, bundle = folder.absolute(), bundle.absolute() if bundle else None
    chosen = choose_platform(stack, list(stack.locks), platform, "lock")
    locked = read_lock(stack, chosen)
    require_clean()
    _check_space(folder, locked)
    size = format_bytes(sum_sizes(locked)[0])
    _make_venv(folder)
    with timed("packages", f"installing {len(locked)} packages; without a cache, {size} are downloaded"):
        _install(folder, lock_path(stack.stack, chosen), bundle)
    write_text(folder / LOCK, lock_path(stack.stack, chosen).read_text())
    given = make_arguments(stack, chosen, f"requirements/{lock_path(stack.stack, chosen).name}", stack.locks[chosen])
    given |= {
        "PYTHONPATH": "",
        "GPU_PLATFORM": "cuda",
        "PYTHONDONTWRITEBYTECODE": "1",
        "RL_KERNEL_ARCHITECTURES": ARCHITECTURES,
    } | (_use_bundle(stack, folder, bundle) if bundle else {})
    _run_steps(stack, chosen, folder, given)


def _run_steps(stack: Stack, chosen: ImagePlatform, folder: Path, environ: Mapping[str, str]) -> None:
    done = _read_steps(folder)
    for step in STEPS:
        key = _key(stack, chosen, step)
        if done.get(step) == key:
            say(f"{step}: done already")
            continue
        words = "compiling; a lower MAX_JOBS saves memory" if step in {"transformer-engine", "rl-kernel"} else "running"
        # each build step runs modules of this checkout, because the image's record names this checkout's commit
        argv = [str(_python(folder)), "-m", "tools.image_build", step]
        with timed(step, words):
            _require(f"step {step}", _shown(argv, environ))
        if step in KEPT:
            done[step] = key
            write_json(folder / "steps.json", done)


def check(folder: Path, stack: str | None, platform: str | None) -> int:
    """Run the environment's own check; return 0 if the environment matches its record, 1 if it differs."""
    folder = folder.absolute()
    _find_lock(folder)
    named = [*(["--stack", stack] if stack else []), *(["--platform", platform] if platform else [])]
    # the check runs in the caller's folder, because a relative path in --stack is relative to that folder
    argv = ["env", str(_python(folder)), "-P", "-m", "rlk_repro.image_check", *named]
    code = proc.run_shown(argv, timeout_s=TIMEOUT_S)
    if code in {126, 127}:
        raise _no_environment(folder)
    return 1 if code is None else code


def export(stack: Stack, folder: Path, target: Path, *, reuse_torch: bool = False) -> None:
    """Write wheels, sources and checksums to a folder; `create` then works without a network.

    With ``reuse_torch``, write the installed files that a host with this torch lacks.
    """
    folder, target = folder.absolute(), target.absolute()
    lock, wheels = _find_lock(folder), target / "wheels"
    _require_lock(stack, lock)
    if reuse_torch:
        packed.export(folder, target)
        write_checksums(target)
        return
    wheels.mkdir(parents=True, exist_ok=True)
    pip = (str(_python(folder)), "-m", "pip", "--disable-pip-version-check", "download", "--dest", str(wheels))
    for wanted in (lock, SBOM_LOCK):
        _require(f"downloading the wheels of {wanted.name}", _shown([*pip, *PIP, "--requirement", str(wanted)], {}))
    sources = target / "sources.txt"
    write_text(sources, source_requirement(stack))
    words = ("--require-hashes", "--no-deps", "--no-build-isolation", "--no-binary", ":all:")
    _require("downloading sources", _shown([*pip, *words, "--requirement", str(sources)], {}))
    for name, pin in stack.pins.items():
        copy = target / "git" / f"{name}.git"
        copy.mkdir(parents=True, exist_ok=True)
        git.require("git init", git.ask_git(copy, "init", "--quiet", "--bare", timeout_s=TIMEOUT_S))
        git.require(f"git fetch {pin.repository}", git.fetch(copy, pin.repository, pin.commit, timeout_s=TIMEOUT_S))
        done = git.ask_git(copy, "update-ref", "refs/heads/pin", pin.commit, timeout_s=TIMEOUT_S)
        git.require("git update-ref", done)
    shutil.copyfile(lock, target / LOCK)
    write_checksums(target)


def write_checksums(folder: Path) -> None:
    """Write the hashes of all files of a folder, for ``sha256sum -c SHA256SUMS``."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    digests = {path.relative_to(folder).as_posix(): sha256_file(path) for path in files}
    write_bytes(folder / CHECKSUMS, render_checksums(digests))


def source_requirement(stack: Stack) -> str:
    """Return pip's requirement line for ``transformer-engine-torch``, which pip builds from sources."""
    component = stack.components.get("transformer-engine-torch")
    if component is None or component.version is None or component.sha256 is None:
        where = f"stack {stack.stack}: components.transformer-engine-torch"
        raise SpecError(Problem(where, "missing", expected="the version and the sha256 of the sources"))
    return f"transformer-engine-torch=={component.version} --hash=sha256:{component.sha256}\n"


def _find_lock(folder: Path) -> Path:
    lock = folder / LOCK
    if not lock.is_file():
        raise _no_environment(folder)
    return lock


def _no_environment(folder: Path) -> EnvironmentMissing:
    return EnvironmentMissing(Problem(str(folder), "is not an environment of a stack", hint="rlk-repro env create DIR"))


def _require_lock(stack: Stack, lock: Path) -> None:
    found = f"sha256:{sha256_file(lock)}"
    if found not in stack.locks.values():
        expected = " or ".join(stack.locks.values()) or "a stack with a lock"
        hint = "--stack names the stack that the environment was created from"
        raise SpecError(
            Problem(str(lock), f"is not a lock of stack {stack.stack}", got=found, expected=expected, hint=hint)
        )


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


def _install(folder: Path, lock: Path, bundle: Path | None) -> None:
    local = ["--no-index", "--find-links", str(bundle / "wheels")] if bundle else []
    uv = shutil.which("uv")
    argv = [uv, "pip", "install", "--python"] if uv else [str(_python(folder)), "-m", "pip", "install"]
    python = [str(_python(folder))] if uv else []
    _require("installing the packages", _shown([*argv, *python, *PIP, *local, "--requirement", str(lock)], {}))


def _use_bundle(stack: Stack, folder: Path, bundle: Path) -> dict[str, str]:
    """Return variables that make pip and git read only the bundle."""
    origins = {pin.repository: bundle / "git" / f"{name}.git" for name, pin in stack.pins.items()}
    lines = [f'[url "{copy}"]\n\tinsteadOf = {repository}\n' for repository, copy in origins.items()]
    write_text(folder / "config" / "git" / "config", "".join(lines))
    return {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(bundle / "wheels"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "GIT_ALLOW_PROTOCOL": "file",
    }


def _key(stack: Stack, platform: ImagePlatform, step: str) -> str:
    pins = {str(name): pin.commit for name, pin in stack.pins.items()}
    return sha256_bytes(json.dumps([step, stack.locks[platform], source_requirement(stack), pins]).encode())


def _read_steps(folder: Path) -> dict[str, str]:
    path = folder / "steps.json"
    return dict(load_json(path)) if path.is_file() else {}


def _check_space(folder: Path, locked: Sequence[Locked]) -> None:
    """Refuse a disk without space for the packages, unless the packages are already installed."""
    if (folder / LOCK).is_file():
        return
    _, needed = sum_sizes(locked)
    parent = find_existing(folder, os.path.isdir)
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise EnvironmentMissing(
            Problem(
                str(parent), "has too little space", got=format_bytes(free), expected=f"{format_bytes(needed)} free"
            )
        )
    say(f"{folder}: needs about {format_bytes(needed)}; {format_bytes(free)} are free")


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _shown(argv: Sequence[str], environ: Mapping[str, str]) -> int | None:
    """Run a command with output on standard error; return its exit code, or None after a timeout.

    The command's processes end with this process, even a compiler that ninja starts in a new process group.
    """
    # the steps are modules of this checkout, and a package's setup.py may import from its own folder
    words = ["env", f"--chdir={ROOT}", "--unset=PYTHONSAFEPATH"]
    running = Guarded([*words, *argv], os.environ | environ, sys.stderr.fileno())
    try:
        running.poll(TIMEOUT_S)
        return running.code
    finally:
        running.release()


def _require(what: str, code: int | None) -> None:
    if code != 0:
        raise CheckFailed(Problem(what, "did not finish", got=code, hint="run the same command again: it continues"))
