"""Find which code runs: Python, the installed packages, rlk-repro, and the sources that a stack pins.

This module imports no package that it describes.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

import rlk_repro
from rlk_repro.base.trees import hash_python
from rlk_repro.probes.checkout import (
    NOT_A_CHECKOUT,
    hash_files,
    probe_archive,
    probe_checkout,
    unknown_checkout,
)
from rlk_repro.probes.container import load_provenance
from rlk_repro.probes.installed import build_variables, load_build_record, probe_extension, probe_installed
from rlk_repro.probes.sources import known_or
from rlk_repro.rundir.manifest import Fact, Unknown
from rlk_repro.sources import OURSELVES, PINNED, RL_KERNEL, CodeSource

SECTION: Final = "code"


def probe(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> dict[str, Fact]:
    commits = _recorded_commits(root)
    return {
        "python": platform.python_version(),
        "packages": probe_packages(),
        "rlk_repro": {**probe_source(OURSELVES, environ, commits), "version": rlk_repro.__version__},
        **{source.section: _probe_pinned(source, environ, commits) for source in PINNED},
    }


def _probe_pinned(source: CodeSource, environ: Mapping[str, str], commits: Mapping[str, str]) -> dict[str, Fact]:
    facts = probe_source(source, environ, commits)
    if source is RL_KERNEL:
        facts |= probe_extension(find_package(RL_KERNEL, environ)) | probe_build(environ)
    return facts


def probe_packages() -> dict[str, Fact]:
    """Return the version of each installed package; for two installed copies, the version that Python imports."""
    found: dict[str, Fact] = {}
    for distribution in metadata.distributions():
        facts = distribution.metadata  # parsed at each access
        if facts["Name"]:
            found.setdefault(normalise(facts["Name"]), facts["Version"] or Unknown("its metadata names no version"))
    return dict(sorted(found.items()))


def probe_source(source: CodeSource, environ: Mapping[str, str], commits: Mapping[str, str]) -> dict[str, Fact]:
    """Return version, commit and hashes of the files of one code base.

    The commit comes from the checkout, otherwise from the record of the installation, otherwise from the image's
    record.  ``tree`` is the hash of all sources; ``package_tree`` is the hash of the files that Python imports.
    """
    distribution = find_distribution(source)
    version: Fact = Unknown(f"no distribution named {' or '.join(source.distributions)}")
    if distribution is not None:
        version = distribution.version
    package = find_package(source, environ)
    if isinstance(package, Unknown):
        return {"version": version, "source": package, **unknown_checkout(package.reason), "package_tree": package}
    facts = probe_checkout(package)
    if isinstance(facts["commit"], Unknown) and distribution is not None and _holds(distribution, package):
        facts = probe_installed(distribution, source.module)
    if isinstance(facts["commit"], Unknown):
        facts["commit"] = commits.get(source.pin) or facts["commit"]
    # without git a checkout is read like an archive; ours may hold a whole environment, which takes seconds
    is_archive = facts["tree"] == NOT_A_CHECKOUT or (isinstance(facts["tree"], Unknown) and source is not OURSELVES)
    if is_archive and package.name == source.module:
        facts["tree"] = probe_archive(package.parent)
    origin = _origin(source, package, environ)
    return {"version": version, "source": origin, **facts, "package_tree": hash_files(hash_python, package)}


def probe_build(environ: Mapping[str, str]) -> dict[str, Fact]:
    package, distribution = find_package(RL_KERNEL, environ), find_distribution(RL_KERNEL)
    is_installed = isinstance(package, Path) and distribution is not None and _holds(distribution, package)
    record = load_build_record(distribution)
    if record is None or not is_installed:
        reason = Unknown("RL-Kernel was not installed by make demo-rl-kernel")
        return {"repairs": reason, "build_variables": build_variables(environ)}
    return {
        "repairs": [repair.name for repair in record.repairs],
        "build_variables": build_variables(record.build_variables),
    }


def find_package(source: CodeSource, environ: Mapping[str, str]) -> Path | Unknown:
    """Return the package's folder as a child process imports it, else the one given by ``environ[source.variable]``."""
    folders = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    try:
        spec = PathFinder.find_spec(source.module, folders) or importlib.util.find_spec(source.module)
    except (ImportError, ValueError):  # a module that is only partly imported has no spec
        spec = None
    places = list(spec.submodule_search_locations or []) if spec else []
    if places:
        return Path(places[0])
    named = environ.get(source.variable)
    if not named:
        return Unknown(f"{source.variable} is not set and {source.module} is not installed")
    folder = Path(named)
    for place in (folder / source.module, folder):
        if place.is_dir():
            return place
    return Unknown(f"{source.variable} names no folder")


def _origin(source: CodeSource, package: Path, environ: Mapping[str, str]) -> str:
    named = environ.get(source.variable)
    if named and package.resolve().is_relative_to(Path(named).resolve()):
        return source.variable
    return "installed"


def _holds(distribution: metadata.Distribution, package: Path) -> bool:
    """Whether this copy of the package is the one that pip installed. (Python may import another copy.)"""
    return Path(str(distribution.locate_file(package.name))).resolve() == package.resolve()


def normalise(name: str) -> str:
    """Return a distribution's name in the form that PEP 503 defines for comparisons."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _recorded_commits(root: Path) -> dict[str, str]:
    commits = known_or(load_provenance(root), {}).get("commits")
    return commits if isinstance(commits, dict) else {}


def find_distribution(source: CodeSource) -> metadata.Distribution | None:
    for name in source.distributions:
        try:
            return metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
    return None
