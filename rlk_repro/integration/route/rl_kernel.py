"""Find the installed RL-Kernel: its registry, its operators, and whether the table lists them.

RL-Kernel's registry returns a native operator for an unknown name, and does not report an absent extension.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from subprocess import SubprocessError
from typing import Any, Final

from rlk_repro.operators import BATCH_INVARIANT_LOGP, OPERATORS, Reason, Refusal

PACKAGE: Final = "rl_engine"
EXTENSION: Final = "rl_engine._C"
REGISTRIES: Final = ("rl_engine.runtime.registry", "rl_engine.kernels.registry")
"""Modules of RL-Kernel's registry, newest first: the first that exists is imported, and no other if that fails."""
_DISTRIBUTIONS: Final = ("RL-Kernel", "rl-engine")
FAILURES: Final[tuple[type[Exception], ...]] = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError,
    OSError, RuntimeError, SubprocessError, TypeError, ValueError,
)  # fmt: skip


class RouteFailed(RuntimeError):
    """An operator's result, or the trainer's use of it, is not as expected; all modes raise it."""


def find_failures() -> tuple[type[Exception], ...]:
    """Return the errors that RL-Kernel, torch and Triton may raise."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return FAILURES
    return (*FAILURES, TritonError)


@dataclass(frozen=True, kw_only=True)
class LoadedOperator:
    op: Any
    implementation: str
    version: str


def load_batch_invariant(name: str, platform: str) -> LoadedOperator | Refusal | None:
    """Load the newer log-prob for the calls of ``name``; return None if this RL-Kernel lacks it."""
    found = _find_registry()
    if isinstance(found, Refusal):
        return found
    backends = getattr(getattr(found[0], "OpBackend", None), "__members__", {})
    registered = OPERATORS[name].find_registered(backends)
    return load_operator(name, platform, registered) if registered == BATCH_INVARIANT_LOGP else None


def load_operator(name: str, platform: str, registered: str = "") -> LoadedOperator | Refusal:
    """Load the operator that RL-Kernel's registry has under ``registered``, or else under its own name."""
    found = Refusal(Reason.PLATFORM, platform) if platform not in OPERATORS[name].implementations else _find_registry()
    if isinstance(found, Refusal):
        return found
    module, registry_name = found
    try:
        op = module.kernel_registry.get_op(registered or name)
    except (ImportError, AttributeError, RuntimeError) as error:
        return Refusal(Reason.NOT_IMPORTABLE, f"{registry_name}: {name}: {error}")
    refusal = _find_class_refusal(name, platform, type(op).__name__)
    version = f"{find_version()} ({registry_name})"
    return refusal or LoadedOperator(op=op, implementation=type(op).__name__, version=version)


def _find_class_refusal(name: str, platform: str, class_name: str) -> Refusal | None:
    implementation = OPERATORS[name].find_implementation(platform, class_name)
    if implementation is not None:
        absent = find_absent_symbols(implementation.symbols)
        what = f"{class_name}: {EXTENSION} lacks {', '.join(absent)}"
        return Refusal(Reason.NOT_ACCEPTED, what) if absent else None
    compiled = next((item for item in OPERATORS[name].implementations[platform] if item.symbols), None)
    if compiled is None:
        why = "RL-Kernel's kernels cannot be loaded on this machine"
    elif isinstance(extension := _load_extension(), str):
        why = f"{EXTENSION} cannot be imported: {extension}"
    elif absent := find_absent_symbols(compiled.symbols):
        why = f"{EXTENSION} lacks {', '.join(absent)}"
    else:
        why = "RL-Kernel's registry chose this class"
    return Refusal(Reason.NOT_ACCEPTED, f"{class_name}, because {why}")


def find_absent_symbols(symbols: tuple[str, ...]) -> list[str]:
    """Return the symbols that the compiled extension lacks; return all of them if the extension cannot be imported."""
    extension = _load_extension() if symbols else None
    return [symbol for symbol in symbols if isinstance(extension, str) or not hasattr(extension, symbol)]


def _load_extension() -> Any | str:
    """Return RL-Kernel's compiled extension, or the error of its import."""
    try:
        return importlib.import_module(EXTENSION)
    except ImportError as error:
        return str(error)


def find_version() -> str:
    """Return RL-Kernel's version with its recorded commit, if any; ``unversioned`` for a source tree on the path."""
    for name in _DISTRIBUTIONS:
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue
        commit = find_commit(installed)
        return f"{installed.version} at {commit[:12]}" if commit else installed.version
    return "unversioned"


def find_commit(installed: Distribution) -> str | None:
    """Return the commit that this tool's installer recorded, otherwise the commit that pip recorded (PEP 610)."""
    ours = json.loads(installed.read_text("rlk_repro_build.json") or "{}")
    pip = json.loads(installed.read_text("direct_url.json") or "{}")
    commit = ours.get("commit") or pip.get("vcs_info", {}).get("commit_id")
    return str(commit) if commit else None


def _find_registry() -> tuple[Any, str] | Refusal:
    if find_spec(PACKAGE) is None:
        return Refusal(Reason.NOT_IMPORTABLE)
    for name in REGISTRIES:
        try:
            return importlib.import_module(name), name
        except ImportError as error:
            if error.name is None or not name.startswith(f"{error.name}."):
                return Refusal(Reason.NOT_IMPORTABLE, f"{name}: {error}")
    return Refusal(Reason.NOT_IMPORTABLE, f"absent: {', '.join(REGISTRIES)}")
