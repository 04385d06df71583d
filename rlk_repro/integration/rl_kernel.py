"""RL-Kernel as it is installed: which generation, which operator object, and whether that is one that counts.

Its registry answers an unknown name with a native operator and says nothing where its extension is absent, so nothing
it says is taken on trust: the class is held against our own table, and the compiled symbols are looked up.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Final

from rlk_repro.operators import OPERATORS, Reason, Refusal

PACKAGE: Final = "rl_engine"
EXTENSION: Final = "rl_engine._C"
REGISTRIES: Final = ("rl_engine.runtime.registry", "rl_engine.kernels.registry")
"""One module per generation, newest first.  The newer one resolves the same operators to the same classes."""
_DISTRIBUTIONS: Final = ("RL-Kernel", "rl-engine")


@dataclass(frozen=True, kw_only=True)
class LoadedOperator:
    """An operator object of RL-Kernel whose class counts on this platform."""

    op: Any
    implementation: str
    version: str


def load_operator(name: str, platform: str) -> LoadedOperator | Refusal:
    """Resolve one operator of our table, or say why that cannot be done."""
    registry = _find_registry()
    if isinstance(registry, Refusal):
        return registry
    module, registry_name = registry
    try:
        op = module.kernel_registry.get_op(name)
    except (ImportError, AttributeError, RuntimeError) as error:
        return Refusal(Reason.NOT_IMPORTABLE, f"{registry_name}: {name}: {error}")
    implementation = OPERATORS[name].find_implementation(platform, type(op).__name__)
    if implementation is None:
        why = f"{type(op).__name__}, because {_explain(name, platform)}"
        return Refusal(Reason.NOT_ACCEPTED, why)
    absent = find_absent_symbols(implementation.symbols)
    if absent:
        return Refusal(Reason.NOT_ACCEPTED, f"{type(op).__name__}: {EXTENSION} lacks {', '.join(absent)}")
    return LoadedOperator(op=op, implementation=type(op).__name__, version=f"{find_version()} ({registry_name})")


def find_absent_symbols(symbols: tuple[str, ...]) -> list[str]:
    """Those that the compiled extension does not have; all of them where it cannot be imported."""
    if not symbols:
        return []
    try:
        extension = importlib.import_module(EXTENSION)
    except ImportError:
        return list(symbols)
    return [symbol for symbol in symbols if not hasattr(extension, symbol)]


def find_version() -> str:
    """The installed distribution's version; ``unversioned`` for a source tree on the path."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unversioned"


def _find_registry() -> tuple[Any, str] | Refusal:
    if find_spec(PACKAGE) is None:
        return Refusal(Reason.NOT_IMPORTABLE)
    errors = []
    for name in REGISTRIES:
        try:
            return importlib.import_module(name), name
        except ImportError as error:
            if error.name is None or not name.startswith(error.name):
                errors.append(f"{name}: {error}")
    return Refusal(Reason.NOT_IMPORTABLE, "; ".join(errors) or f"none of {', '.join(REGISTRIES)}")


def _explain(name: str, platform: str) -> str:
    """Why the registry may have chosen something else than a kernel, as far as that can be told."""
    wanted = [item for item in OPERATORS[name].implementations[platform] if item.symbols]
    if not wanted:
        return "its kernels cannot be loaded here"
    try:
        importlib.import_module(EXTENSION)
    except ImportError as error:
        return f"{EXTENSION} cannot be imported: {error}"
    absent = find_absent_symbols(wanted[0].symbols)
    return f"{EXTENSION} lacks {', '.join(absent)}" if absent else "its registry chose so"
