"""Which code runs: Python, installed packages, and the commits of rlk-repro, vime, Megatron-LM and RL-Kernel.

Nothing is imported to learn this.  Which libraries a rank really loaded is written by the trainer itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

import rlk_repro
from rlk_repro.manifest import Fact, Unknown
from rlk_repro.probes.checkout import probe_checkout, unknown_checkout
from rlk_repro.probes.container import load_provenance
from rlk_repro.probes.extension import build_variables, probe_extension

SECTION: Final = "code"


@dataclass(frozen=True, kw_only=True)
class Source:
    """One code base: its name among a stack's pins, its module, its distributions, and what names its checkout."""

    pin: str
    module: str
    distributions: tuple[str, ...]
    variable: str


VIME: Final = Source(pin="vime", module="vime", distributions=("vime",), variable="VIME_SRC")
MEGATRON: Final = Source(
    pin="megatron_lm", module="megatron", distributions=("megatron-core", "megatron-lm"), variable="MEGATRON_SRC"
)
RL_KERNEL: Final = Source(
    pin="rl_kernel", module="rl_engine", distributions=("rl-kernel", "rl-engine"), variable="RLK_SRC"
)
OURSELVES: Final = Source(pin="rlk_repro", module="rlk_repro", distributions=("rlk-repro",), variable="")


def probe(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> dict[str, Fact]:
    """Every fact of the section ``code``."""
    variables = os.environ if environ is None else environ
    commits = _recorded_commits(root)
    return {
        "python": platform.python_version(),
        "python_implementation": platform.python_implementation(),
        "python_kind": _python_kind(),
        "packages": probe_packages(),
        "rlk_repro": {**probe_source(OURSELVES, variables, commits), "version": rlk_repro.__version__},
        "vime": probe_source(VIME, variables, commits),
        "megatron": probe_source(MEGATRON, variables, commits),
        "rl_kernel": {
            **probe_source(RL_KERNEL, variables, commits),
            **probe_extension(find_package(RL_KERNEL, variables)),
            "build_variables": build_variables(variables),
        },
    }


def probe_packages() -> dict[str, Fact]:
    """Version by normalised name of everything installed; of two copies the one that imports win."""
    found: dict[str, Fact] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(normalise(name), distribution.version or Unknown("its metadata names no version"))
    return dict(sorted(found.items()))


def probe_source(source: Source, environ: Mapping[str, str], commits: Mapping[str, str]) -> dict[str, Fact]:
    """Version and commit of one code base: from its checkout, else pip's record of a VCS install, else the image's."""
    distribution = _distribution(source)
    version: Fact = Unknown(f"no distribution named {' or '.join(source.distributions)}")
    if distribution is not None:
        version = distribution.version
    package = find_package(source, environ)
    if isinstance(package, Unknown):
        return {"version": version, "source": package, **unknown_checkout(package.reason)}
    checkout = probe_checkout(package)
    if isinstance(checkout["commit"], Unknown):
        recorded = _installed_commit(distribution) or commits.get(source.pin)
        checkout["commit"] = recorded or checkout["commit"]
    return {"version": version, "source": source.variable if environ.get(source.variable) else "installed", **checkout}


def find_package(source: Source, environ: Mapping[str, str]) -> Path | Unknown:
    """The folder of the module: in the checkout that the variable names, else where Python would import it from."""
    named = environ.get(source.variable)
    if named:
        folder = Path(named)
        inside = folder / source.module
        return (
            inside if inside.is_dir() else folder if folder.is_dir() else Unknown(f"{source.variable} names no folder")
        )
    try:
        spec = importlib.util.find_spec(source.module)
    except (ImportError, ValueError):  # a module that is half imported has no spec
        spec = None
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else Unknown(f"{source.variable} is not set and {source.module} is not installed")


def normalise(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _recorded_commits(root: Path) -> dict[str, str]:
    """Commits by pin from the image's own record."""
    record = load_provenance(root)
    commits = {} if isinstance(record, Unknown) else record.get("commits")
    return commits if isinstance(commits, dict) else {}


def _distribution(source: Source) -> metadata.Distribution | None:
    for name in source.distributions:
        try:
            return metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _installed_commit(distribution: metadata.Distribution | None) -> str | None:
    """The commit that ``pip install git+…`` recorded (PEP 610)."""
    text = distribution.read_text("direct_url.json") if distribution else None
    try:
        commit = json.loads(text or "{}").get("vcs_info", {}).get("commit_id")
    except (ValueError, AttributeError):
        return None
    return commit if isinstance(commit, str) else None


def _python_kind() -> str:
    if (Path(sys.prefix) / "conda-meta").is_dir():
        return "conda"
    return "system" if sys.prefix == sys.base_prefix else "venv"
