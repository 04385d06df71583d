"""Install this package into the base image: keep the base's packages, and add missing dependencies by hash."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from rlk_repro.base import proc
from rlk_repro.base.errors import CheckFailed, Problem
from tools.image_build.inputs import ADDED_PACKAGES, Inputs, keep_base_packages, list_packages
from tools.rl_kernel import build

SOURCE: Final = Path(__file__).resolve().parents[2]
LOCK: Final = SOURCE / "requirements" / "base.txt"
BUILD_LOCK: Final = SOURCE / "requirements" / "build.txt"
PIP: Final = (*build.PIP, "--no-cache-dir", "--no-compile", "--no-deps", "--root-user-action=ignore")
TIMEOUT_S: Final = 1800.0
OURS: Final = frozenset({"rlk-repro", "rl-kernel", "rl-engine", "vime"})
_ENTRY: Final = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<rest>(?:.*\\\n)*.*)$", re.MULTILINE)
_MARKER: Final = re.compile(r";\s*sys_platform == 'win32'")


def install_package(_inputs: Inputs) -> None:
    """Install this package and the dependencies that the base lacks; record the base's packages and the added ones."""
    present = list_packages()
    keep_base_packages(present)
    wanted = select_missing(LOCK.read_text(), present)
    with tempfile.TemporaryDirectory(prefix="rlk-repro-build-") as folder:
        if wanted:
            lock = Path(folder) / "missing.txt"
            lock.write_text("\n".join(wanted.values()) + "\n")
            pip_install("--require-hashes", "-r", str(lock))
        tools = Path(folder) / "tools"
        if importlib.util.find_spec("hatchling") is None:
            pip_install("--require-hashes", "--target", str(tools), "-r", str(BUILD_LOCK))
        pip_install("--no-build-isolation", str(SOURCE), path=tools)
    ADDED_PACKAGES.write_text(json.dumps(sorted(wanted)) + "\n")


def select_missing(lock: str, present: Iterable[str]) -> dict[str, str]:
    """Return the entries of a hash lock for packages that are absent; an installed package keeps its version."""
    names = set(present)
    entries = {re.sub(r"[-_.]+", "-", match["name"]).lower(): match[0] for match in _ENTRY.finditer(lock)}
    return {name: text for name, text in entries.items() if name not in names and not _MARKER.search(text)}


def pip_install(*arguments: str, path: Path | None = None, timeout_s: float = TIMEOUT_S) -> None:
    """Run ``pip install`` without dependencies, cache and compiled files.

    Raises:
        CheckFailed: pip failed; the error quotes its output.
    """
    environ = dict(os.environ) | ({"PYTHONPATH": str(path)} if path else {})
    done = proc.run([*PIP, *arguments], env=environ, timeout_s=timeout_s)
    build.require_done(f"pip install {arguments[-1]}", done)


def check_untouched(base: Mapping[str, str], added: Iterable[str]) -> None:
    """Refuse an image in which a package of the base changed, or in which an unexpected package was added.

    Raises:
        CheckFailed: the error lists every such package.
    """
    now, allowed = list_packages(), OURS | set(added)
    problems = []
    for name in sorted(base.keys() | now.keys()):
        if name in allowed or base.get(name) == now.get(name):
            continue
        expected = f"{base[name]}, the version of the base image" if name in base else "absent, as in the base"
        problems.append(Problem(f"package {name}", "was changed by the build", got=now.get(name), expected=expected))
    if problems:
        raise CheckFailed(*problems)
