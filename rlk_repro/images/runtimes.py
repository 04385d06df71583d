"""Define each container runtime's commands: fetch an image by digest, and run a command in it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlk_repro.base import proc
from rlk_repro.base.errors import BundleUnreadable, CheckFailed, EnvironmentMissing, Problem, SpecError
from rlk_repro.base.findings import Finding, Level
from rlk_repro.images.importing import plan_import
from rlk_repro.images.match import check_kernels, check_sources, match_labels, match_stack, missing_record
from rlk_repro.images.record import parse_record
from rlk_repro.probes.container import PROVENANCE
from rlk_repro.spec import OCI_ARCHITECTURES, Image, Stack

TIMEOUT_S: Final = 6 * 3600.0
ASK_TIMEOUT_S: Final = 900.0
_MACHINES: Final = {name: machine for machine, name in OCI_ARCHITECTURES.items()}
CHECK: Final = ("python3", "-P", "-m", "rlk_repro.image_check", "--json")


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """A container runtime; ``run`` and ``labels`` make a command for an image, given by name or by its file's path."""

    name: str
    run: Callable[[str], list[str]]
    labels: Callable[[str], list[str]] | None = None


def _engine(name: str) -> Runtime:
    return Runtime(
        name=name,
        run=lambda what: [name, "run", "--rm", "--network=none", "--entrypoint=", "--", what],
        labels=lambda what: [name, "image", "inspect", "--format", "{{json .Config.Labels}}", "--", what],
    )


RUNTIMES: Final[Mapping[str, Runtime]] = {
    "podman": _engine("podman"),
    "docker": _engine("docker"),
    "apptainer": Runtime(
        name="apptainer", run=lambda what: ["apptainer", "exec", "--cleanenv", "--contain", "--", what]
    ),
    "enroot": Runtime(name="enroot", run=lambda what: ["enroot", "start", "--rw", what]),
}


def find_runtime(name: str | None) -> Runtime:
    """Return the named runtime, or the first runtime on PATH.

    Raises:
        SpecError: no runtime has this name.
        EnvironmentMissing: no runtime is found.
    """
    if name is not None and name not in RUNTIMES:
        raise SpecError(Problem("--runtime", "unknown", got=name, expected=f"one of {', '.join(RUNTIMES)}"))
    for runtime in RUNTIMES.values() if name is None else [RUNTIMES[name]]:
        if shutil.which(runtime.name):
            return runtime
    wanted = name or ", ".join(RUNTIMES)
    raise EnvironmentMissing(Problem(wanted, "is not on PATH", hint="install a container runtime"))


def pull_image(image: Image, platform: str, runtime: Runtime, folder: Path | None) -> str:
    """Fetch an image by digest; return its name in the runtime, or the path of its file."""
    machine = _MACHINES.get(platform.rpartition("-")[2], "any")
    wanted = None if folder is None else plan_import(runtime.name, image, machine, str(folder.absolute()))
    if wanted is None:
        _stream([runtime.name, "pull", "--quiet", "--", image.pinned])
        return image.pinned
    file = Path(wanted.file)
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_file():
        return str(file)
    partial = file.with_name(f".partial-{os.getpid()}-{file.name}")
    try:
        _stream([*wanted.command, str(partial), wanted.uri])
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return str(file)


def check_in_runtime(what: str, runtime: Runtime, stack: Stack | None, platform: str | None) -> list[Finding]:
    """Check the image's record and labels in this process, and its content by a check that runs inside the image."""
    done = proc.run([*runtime.run(what), "cat", PROVENANCE], timeout_s=ASK_TIMEOUT_S)
    if not done.is_ok:
        if "No such file" in done.stderr and PROVENANCE in done.stderr:
            return [missing_record("missing")]
        # docker's last line only names its help
        own = (line for line in done.stderr.splitlines() if line.startswith(f"{runtime.name}: "))
        raise EnvironmentMissing(Problem(f"{runtime.name} run {what}", next(own, done.last_words)[:300]))
    try:
        record = parse_record(done.stdout.encode())
    except BundleUnreadable as error:
        return [missing_record(str(error.problems[0]))]
    labels = _ask_labels(what, runtime)
    findings = [] if labels is None else list(match_labels(record, labels))
    findings += [*check_sources(record), *check_kernels(record)]
    if stack is not None:
        findings += match_stack(record, stack, platform)
    return findings + _ask_image(what, runtime)


def _ask_labels(what: str, runtime: Runtime) -> dict[str, str] | None:
    if runtime.labels is None:
        return None
    done = proc.run(runtime.labels(what), timeout_s=ASK_TIMEOUT_S)
    if not done.is_ok:
        raise EnvironmentMissing(Problem(f"{runtime.name} image inspect {what}", done.stderr.strip()[-300:]))
    return {str(name): str(value) for name, value in (json.loads(done.stdout) or {}).items()}


def _ask_image(what: str, runtime: Runtime) -> list[Finding]:
    done = proc.run([*runtime.run(what), *CHECK], timeout_s=ASK_TIMEOUT_S)
    try:
        return [Finding.from_json(item) for item in json.loads(done.stdout)["findings"]]
    except (ValueError, KeyError, TypeError):
        return [Finding(Level.BLOCKING, "rlk_repro.image_check", "a list of findings in JSON", done.last_words[:300])]


def _stream(argv: list[str]) -> None:
    code = proc.run_shown(argv, timeout_s=TIMEOUT_S)
    if code != 0:
        raise CheckFailed(
            Problem(" ".join(argv[:3]), f"ended with exit code {code}",
                    hint="run the same command again: it continues the pull")
        )  # fmt: skip
