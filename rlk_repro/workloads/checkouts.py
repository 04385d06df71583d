"""Make checkouts of vime, Megatron-LM and RL-Kernel importable in child processes without installing them.

Child processes find the checkouts by ``PYTHONPATH``, which is not recorded; the manifest records the commits.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from rlk_repro.base.errors import EnvironmentMissing, Problem, SpecError
from rlk_repro.plan import Plan
from rlk_repro.sources import MEGATRON, RL_KERNEL, VIME, CodeSource
from rlk_repro.spec.stack import Pin
from rlk_repro.switches import COMMITS
from rlk_repro.workloads.environment import profile_env

FLAGS: Final[Mapping[CodeSource, str]] = {VIME: "--vime-src", MEGATRON: "--megatron-src", RL_KERNEL: "--rl-kernel-src"}


def use_checkouts(folders: Mapping[CodeSource, Path]) -> None:
    """Put the checkouts first in child processes' ``PYTHONPATH``, and set each checkout's environment variable.

    Raises:
        SpecError: a folder does not hold the expected package.
    """
    problems = [
        Problem(
            f"{FLAGS[source]} or {source.variable}",
            f"holds no package {source.module}",
            got=str(folder),
            expected=f"a folder with {source.module}/",
        )
        for source, folder in folders.items()
        if not (folder / source.module).is_dir()
    ]
    if problems:
        raise SpecError(*problems)
    paths = [str(folder.absolute()) for folder in folders.values()]
    inherited = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in {"", *paths}]
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *inherited])
    os.environ.update({source.variable: path for source, path in zip(folders, paths, strict=True)})


def find_given() -> list[CodeSource]:
    """Return each code base whose environment variable holds a folder that ``PYTHONPATH`` lists too."""
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [source for source in FLAGS if os.environ.get(source.variable) in path and os.environ[source.variable]]


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
                hint=f"give {FLAGS[source]}, or set {source.variable}{_name_clone(pins.get(source.pin))}")
        for source in sources
        if not is_found(source.module, os.environ.get("PYTHONPATH", "") if path is None else path)
    ]  # fmt: skip
    problems += [Problem(f"{COMMITS}/{commit}", "missing", expected=f"a folder with {RL_KERNEL.module}/",
                         hint="docs/own-changes.md says how to install the commit")
                 for commit in commits]  # fmt: skip
    if problems:
        raise EnvironmentMissing(*problems)


def find_missing_commits(plan: Plan) -> list[str]:
    """Return the RL-Kernel commits that the plan compares and that its trainers would not find."""
    plain, named = profile_env(plan)
    parent = plain.get(COMMITS) or os.environ.get(named.get(COMMITS, COMMITS), "")
    commits = filter(None, map(plan.run.rl_kernel.find_commit, plan.variants))
    return [commit for commit in commits if not parent or not (Path(parent) / commit / RL_KERNEL.module).is_dir()]


def _name_clone(pin: Pin | None) -> str:
    if pin is None:
        return ""
    folder = pin.repository.rpartition("/")[2].removesuffix(".git")
    return f": git clone {pin.repository} && git -C {folder} checkout {pin.commit}"


def is_found(module: str, path: str) -> bool:
    folders = [folder for folder in path.split(os.pathsep) if folder]
    return importlib.util.find_spec(module) is not None or PathFinder.find_spec(module, folders) is not None
