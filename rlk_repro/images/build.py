"""Build a stack's image from this checkout."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlk_repro.base import git, proc
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem, SpecError
from rlk_repro.base.guarded import run_shown
from rlk_repro.base.resources import PACKAGE
from rlk_repro.base.units import format_bytes, format_duration
from rlk_repro.images.stacks import COST, DISK_BYTES, choose_platform, read_lock
from rlk_repro.spec import ImagePlatform, Stack
from rlk_repro.spec.stack import BaseImage

TIMEOUT_S: Final = 24 * 3600.0
ROOT: Final = PACKAGE.parent
CONTEXT: Final = (
    *("LICENSE", "README.md", "docker", "jobs", "k8s", "manifests", "pyproject.toml", "requirements", "rlk_repro"),
    *("slurm", "tools"),
)
"""The files that an image is built from; `.dockerignore` and the Dockerfiles hold the same list."""
ENGINES: Final = ("docker", "buildah", "podman")


@dataclass(frozen=True, kw_only=True)
class Build:
    engine: str
    dockerfile: Path
    arguments: Mapping[str, str]
    tag: str
    num_locked: int = 0

    @property
    def argv(self) -> list[str]:
        given = [f"--build-arg={name}={value}" for name, value in self.arguments.items()]
        epoch = self.arguments["SOURCE_DATE_EPOCH"]
        words = {
            "docker": ["docker", "build"],
            # --timestamp sets the times of all files in the new layers; enroot needs docker's image format
            "podman": ["podman", "build", "--format=docker", f"--timestamp={epoch}"],
            "buildah": ["buildah", "build", "--layers", "--format=docker", f"--timestamp={epoch}"],
        }[self.engine]
        return [*words, f"--file={self.dockerfile}", *given, f"--tag={self.tag}", str(ROOT)]

    def __str__(self) -> str:
        return shlex.join(self.argv)


def make_build(
    stack: Stack, platform: ImagePlatform | None, *, engine: str | None, tag: str | None, base: str | None
) -> Build:
    """Choose engine, Dockerfile and arguments; ``base`` (``NAME@sha256:…``) replaces the stack's base image."""
    chosen = choose_platform(stack, list(stack.bases), platform, "base image")
    is_locked = chosen in stack.locks
    dockerfile = ROOT / "docker" / ("Dockerfile.locked" if is_locked else "Dockerfile.vime")
    if not dockerfile.is_file():
        hint = "images are built from a checkout of rlk-repro"
        raise EnvironmentMissing(Problem(str(dockerfile), "is not there", hint=hint))
    name, digest = _base(stack, chosen, base)
    num_locked = len(read_lock(stack, chosen)) if is_locked else 0
    arguments = make_arguments(stack, chosen, name, digest)
    return Build(engine=_find_engine(engine), dockerfile=dockerfile, arguments=arguments, num_locked=num_locked,
                 tag=tag or f"localhost/rlk-repro:{stack.stack}-{chosen}")  # fmt: skip


def make_arguments(stack: Stack, platform: ImagePlatform, base: str, digest: str) -> dict[str, str]:
    pins = {str(name): pin for name, pin in stack.pins.items()}
    missing = [name for name in ("vime", "rl_kernel") if name not in pins]
    if missing:
        what = "lacks a pin that an image needs"
        raise SpecError(Problem(f"stack {stack.stack}", what, expected=f"pins.{missing[0]}"))
    commit, epoch = _git("log", "-1", "--format=%H %ct").split()
    arguments = {
        "BASE_NAME": base,
        "BASE_DIGEST": digest,
        "IMAGE_PLATFORM": platform,
        "STACK": stack.stack,
        "REVISION": commit,
        "SOURCE_DATE_EPOCH": epoch,
        "VIME_REPOSITORY": pins["vime"].repository,
        "VIME_COMMIT": pins["vime"].commit,
        "RL_KERNEL_REPOSITORY": pins["rl_kernel"].repository,
        "RL_KERNEL_COMMIT": pins["rl_kernel"].commit,
    }
    if os.environ.get("MAX_JOBS"):
        arguments["MAX_JOBS"] = os.environ["MAX_JOBS"]
    return arguments


def run_build(build: Build) -> None:
    """Run the build with its output on standard error; raise CheckFailed if it fails."""
    require_clean()
    if build.num_locked:
        say(f"{build.tag}: {build.num_locked} packages, {COST}; the build takes {format_bytes(2 * DISK_BYTES)}")
    started = time.monotonic()
    code = run_shown(build.argv, timeout_s=TIMEOUT_S, cwd=ROOT)
    if code != 0:
        raise CheckFailed(Problem(f"{build.engine} build", f"ended with exit code {code}"))
    say(f"{build.tag}: {format_duration(time.monotonic() - started)}")


def say(text: str) -> None:
    """Write a progress message to standard error at once, so that it precedes the output of the next command."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@contextmanager
def timed(step: str, what: str) -> Iterator[None]:
    started = time.monotonic()
    say(f"{step}: {what} …")
    yield
    say(f"{step}: {format_duration(time.monotonic() - started)}")


def require_clean(commit: str | None = None) -> None:
    """Refuse a checkout with changed files, or one that has left ``commit``: an image's record names only a commit."""
    changed = _git("status", "--porcelain", "--", *CONTEXT)
    if changed:
        raise SpecError(
            Problem("this checkout", "has changed files, but an image's record names only the commit",
                    got=changed.splitlines()[0].strip(), hint="commit the files, or git stash")
        )  # fmt: skip
    if commit is not None and (now := _git("rev-parse", "HEAD")) != commit:
        raise CheckFailed(Problem("this checkout", "moved to another commit during the build", got=now,
                                  expected=commit, hint="run the same command again: it continues"))  # fmt: skip


def _base(stack: Stack, platform: ImagePlatform, given: str | None) -> tuple[str, str]:
    known: BaseImage = stack.bases[platform]
    if given is not None:
        name, _, digest = given.partition("@")
        if not digest.startswith("sha256:"):
            raise SpecError(Problem("--base", "a tag can move", got=given, expected="NAME@sha256:<64 hex digits>"))
        return name, digest
    if platform.startswith("rocm") or known.digest is None:
        hint = "skopeo inspect docker://NAME prints the digest"
        raise SpecError(
            Problem(f"stack {stack.stack}: bases.{platform}", "has no digest, which a build needs",
                    expected="--base NAME@sha256:…", hint=hint)
        )  # fmt: skip
    return known.reference, known.digest


def _find_engine(name: str | None) -> str:
    """Return the named container engine without a check, or the first installed engine that answers."""
    if name is not None:
        if name not in ENGINES:
            raise SpecError(Problem("--engine", "no such engine", got=name, expected=" or ".join(ENGINES)))
        return name
    installed = [engine for engine in ENGINES if shutil.which(engine)]
    if not installed:
        raise EnvironmentMissing(Problem(", ".join(ENGINES), "are not on PATH", expected="one of them"))
    # docker needs a daemon, which may be absent
    if installed[1:] and installed[0] == "docker" and not proc.run(["docker", "info"]).is_ok:
        return installed[1]
    return installed[0]


def _git(*arguments: str) -> str:
    done = git.ask_git(ROOT, *arguments, timeout_s=30.0)
    if not done.is_ok:
        hint = "build images from a git checkout of rlk-repro; an image names the checkout's commit"
        raise EnvironmentMissing(Problem(str(ROOT), "is not a git checkout", hint=hint))
    return done.stdout.strip()
