"""Make checkouts of vime, Megatron-LM and RL-Kernel importable in child processes, and try the imports.

Child processes find the checkouts by ``PYTHONPATH``, which is not recorded; the manifest records the commits.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from rlk_repro.base import proc
from rlk_repro.base.errors import EnvironmentMissing, Problem, SpecError
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.places import hide_places
from rlk_repro.plan import Plan
from rlk_repro.sources import MEGATRON, RL_KERNEL, VIME, CodeSource
from rlk_repro.spec.stack import Pin
from rlk_repro.spec.values import BASELINE, ENABLED
from rlk_repro.switches import COMMITS
from rlk_repro.workloads.environment import find_checkouts, find_trainer_path, profile_env

SOURCES: Final = (VIME, MEGATRON, RL_KERNEL)
# importing torch and Megatron-LM from a cold file system takes minutes
IMPORT_TIMEOUT_S: Final = 600.0
IMPORT_MAX_CHARS: Final = 300


def use_checkouts() -> None:
    """Put the checkouts that VIME_SRC, MEGATRON_SRC and RLK_SRC name first in child processes' ``PYTHONPATH``.

    Raises:
        SpecError: a folder does not hold the expected package.
    """
    named = {item: Path(os.environ[item.variable]) for item in SOURCES if os.environ.get(item.variable)}
    refuse_missing((item.variable, item.module, str(folder)) for item, folder in named.items())
    paths = [str(folder.absolute()) for folder in named.values()]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if paths:
        paths += [folder for folder in inherited if folder not in {"", *paths}]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    for item, folder in named.items():
        os.environ[item.variable] = str(folder.absolute())


def refuse_missing(folders: Iterable[tuple[str, str, str]]) -> None:
    """Raise SpecError for folders without their package: where each is named, its package, and the folder."""
    problems = [
        Problem(where, f"holds no package {module}", got=folder, expected=f"a folder with {module}/")
        for where, module, folder in folders
        if not (Path(folder) / module).is_dir()
    ]
    if problems:
        raise SpecError(*problems)


@contextmanager
def trainer_path(plan: Plan) -> Iterator[None]:
    """Inside the ``with`` block, give child processes the ``PYTHONPATH`` that the profile sets for the trainer."""
    before, path = os.environ.get("PYTHONPATH"), profile_env(plan)[0].get("PYTHONPATH")
    if path is None:
        yield
        return
    os.environ["PYTHONPATH"] = path
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def require_importable(
    *sources: CodeSource,
    path: str | None = None,
    pins: Mapping[Any, Pin] = MappingProxyType({}),
    commits: Iterable[str] = (),
) -> None:
    """Raise EnvironmentMissing for packages that a child process with this PYTHONPATH would not find."""
    problems = [
        Problem(f"python module {source.module}", "missing", expected="an installed package or a checkout",
                hint=f"set {source.variable}{_name_clone(pins.get(source.pin))}")
        for source in sources
        if not is_found(source.module, os.environ.get("PYTHONPATH", "") if path is None else path)
    ]  # fmt: skip
    problems += [Problem(f"{COMMITS}/{commit}", "missing", expected=f"a folder with {RL_KERNEL.module}/",
                         hint=f"pip install --no-deps --target DIR/{commit} git+URL@{commit}, and set {COMMITS} to DIR")
                 for commit in commits]  # fmt: skip
    if problems:
        raise EnvironmentMissing(*problems)


def find_missing_commits(plan: Plan) -> list[str]:
    """Return the RL-Kernel commits that the plan compares and that its trainers would not find."""
    plain, named = profile_env(plan)
    parent = plain.get(COMMITS) or os.environ.get(named.get(COMMITS, COMMITS), "")
    commits = filter(None, map(plan.run.rl_kernel.find_commit, plan.variants))
    return [commit for commit in commits if not parent or not (Path(parent) / commit / RL_KERNEL.module).is_dir()]


def find_missing_checkouts(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Yield each folder of the user's switch that lacks its package: where it stands, the package, and the folder."""
    for variant in (BASELINE, ENABLED):
        for source, folder in find_checkouts(plan, variant).items():
            if not (Path(folder) / source.module).is_dir():
                yield f"run {plan.run.run}: switch.{variant}.{source.variable}", source.module, folder


def _name_clone(pin: Pin | None) -> str:
    if pin is None:
        return ""
    folder = pin.repository.rpartition("/")[2].removesuffix(".git")
    return f": git clone {pin.repository} && git -C {folder} checkout {pin.commit}"


def is_found(module: str, path: str) -> bool:
    folders = [folder for folder in path.split(os.pathsep) if folder]
    return importlib.util.find_spec(module) is not None or PathFinder.find_spec(module, folders) is not None


def try_imports(plan: Plan) -> Iterator[Finding]:
    """Import the trainer's modules in a child process, which may fail in any way."""
    names = ", ".join(plan.run.workload.imports)
    if not names:
        return
    where, env = f"import {names}", {**os.environ, **profile_env(plan)[0]}
    env["PYTHONPATH"] = find_trainer_path(plan, os.environ.get("PYTHONPATH", ""))
    done = proc.run([sys.executable, "-P", "-c", f"import {names}"], env=env, timeout_s=IMPORT_TIMEOUT_S)
    if done.is_timeout:
        yield Finding(Level.WARNING, where, f"imported within {IMPORT_TIMEOUT_S:g} s", "not imported yet")
    elif not done.is_ok:
        yield Finding(Level.BLOCKING, where, "no error", hide_places(done.last_words)[:IMPORT_MAX_CHARS])
