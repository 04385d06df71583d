"""Install this package into the base image; at last, write the record of the build into the image.

The base keeps its packages, and missing dependencies are added by hash.  The record holds the facts of this container,
as the probes of a job find them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Final

from rlk_repro.base.errors import CheckFailed, Problem
from rlk_repro.base.files import write_json
from rlk_repro.images.match import check_kernels, check_sources, match_operators
from rlk_repro.images.record import Base, ImageRecord
from rlk_repro.images.resolve import ask_registry
from rlk_repro.probes import code
from rlk_repro.probes.container import find_record
from rlk_repro.probes.installed import load_build_record
from rlk_repro.rundir.manifest import Unknown
from tools.image_build.inputs import ADDED_PACKAGES, BASE_PACKAGES, Inputs
from tools.image_build.kernels import stub_environment
from tools.rl_kernel.build import find_distribution, pip_install, refuse

SOURCE: Final = Path(__file__).resolve().parents[2]
LOCK: Final = SOURCE / "requirements" / "base.txt"
BUILD_LOCK: Final = SOURCE / "requirements" / "build.txt"
OURS: Final = frozenset({"rlk-repro", "rl-kernel", "rl-engine", "vime"})
_ENTRY: Final = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<rest>(?:.*\\\n)*.*)$", re.MULTILINE)
_MARKER: Final = re.compile(r";\s*sys_platform == 'win32'")


def install_package(_inputs: Inputs) -> None:
    """Install this package and the dependencies that the base lacks; record the base's packages and the added ones."""
    present = list_packages()
    write_json(BASE_PACKAGES, present)
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
    write_json(ADDED_PACKAGES, sorted(wanted))


def list_packages() -> dict[str, str]:
    return {name: str(version) for name, version in code.probe_packages().items()}


def select_missing(lock: str, present: Iterable[str]) -> dict[str, str]:
    """Return the entries of a hash lock for packages that are absent; an installed package keeps its version."""
    names = set(present)
    entries = {code.normalise(match["name"]): match[0] for match in _ENTRY.finditer(lock)}
    return {name: text for name, text in entries.items() if name not in names and not _MARKER.search(text)}


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


def write_record(inputs: Inputs) -> None:
    """Check the image, and write its record if nothing is wrong.

    Raises:
        CheckFailed: the base's packages were changed, or sources or kernels are wrong.
    """
    added = json.loads(ADDED_PACKAGES.read_text())
    check_untouched(json.loads(BASE_PACKAGES.read_text()), added)
    made = make_record(inputs, tuple(added))
    with tempfile.TemporaryDirectory(prefix="rlk-repro-stub-") as folder:
        answer = ask_registry(stub_environment(os.environ, Path(folder)))
    if isinstance(answer, Unknown):
        raise CheckFailed(Problem("rl_engine", f"cannot be imported ({answer.reason})"))
    refuse(
        [
            *check_sources(made),
            *check_kernels(made),
            *match_operators(made.gpu_platform, made.commits["rl_kernel"], answer),
        ]
    )
    write_json(Path(find_record()), made.to_json())


def make_record(inputs: Inputs, added: tuple[str, ...]) -> ImageRecord:
    """Make the record from the build arguments and the facts of this container."""
    section = code.probe(environ={})
    megatron = section.get("megatron")
    commit = megatron.get("commit") if isinstance(megatron, dict) else None
    built = load_build_record(find_distribution())
    if built is None:
        raise CheckFailed(Problem("RL-Kernel", "was not installed by this build"))
    return ImageRecord(
        stack=inputs.stack,
        platform=inputs.image_platform,
        base=Base(reference=inputs.base_name, digest=inputs.base_digest),
        commits={
            "rlk_repro": inputs.revision,
            "vime": inputs.vime_commit,
            "rl_kernel": inputs.rl_kernel_commit,
            **({"megatron_lm": commit} if isinstance(commit, str) else {}),
        },
        code=section,
        build={
            "source_date_epoch": int(inputs.source_date_epoch),
            "asked_architectures": list(inputs.architectures),
            "rl_kernel": json.loads(json.dumps(asdict(built))),
            "pip": metadata.version("pip"),
        },
        added_packages=added,
    )
