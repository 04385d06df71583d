"""Judge an installed RL-Kernel: the class that every operator uses, its kernels, and its numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlk_repro.base import proc
from rlk_repro.base.errors import CheckFailed, Problem
from rlk_repro.operators import OPERATORS, Implementation, Platform
from rlk_repro.probes.extension import find_extensions, list_device_code
from rlk_repro.probes.sources import derive

CHECK: Final = Path(__file__).with_name("check.py")
TIMEOUT_S: Final = 600.0
MAX_ERROR: Final = 1e-4
SYMBOLS: Final = (
    "fused_logp",
    "fused_logp_forward_fp32",
    "fused_logp_forward_indexed_fp32",
    "fused_logp_forward_online_fp32",
    "fused_logp_forward_online_indexed_fp32",
)
SM90_SYMBOLS: Final = ("fused_linear_logp_sm90", "fused_logp_sm90")
SM90_NEWER_SYMBOLS: Final = ("batch_invariant_logp_sm90",)
# What a failing import or kernel prints, and what it means.
RUN_TROUBLE: Final = (
    ("No module named 'torch'", "install torch first: make demo"),
    ("rl_engine.kernels.registry", "these sources are of another generation of RL-Kernel than this tool knows"),
    ("no kernel image is available", "the extension was built for another GPU: see TORCH_CUDA_ARCH_LIST"),
)


@dataclass(frozen=True, kw_only=True)
class Operator:
    """The class that RL-Kernel's registry chooses for an operator; ``error`` is the largest difference from float64.

    ``registered`` is the name that the registry was asked for, if it is not the operator's own.
    """

    name: str
    class_name: str
    error: float
    registered: str = ""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The facts of RL-Kernel that ``check.py`` found."""

    folder: Path
    symbols: tuple[str, ...]
    extension_error: str
    operators: tuple[Operator, ...]


def ask(question: str) -> dict[str, Any]:
    """Return the answer of ``check.py``, run in a separate process.

    Raises:
        CheckFailed: the process failed.
    """
    done = proc.run([sys.executable, "-P", str(CHECK), question], timeout_s=TIMEOUT_S)
    if not done.is_ok:
        hint = next((hint for needle, hint in RUN_TROUBLE if needle in done.stderr), None)
        raise CheckFailed(Problem(question.replace("_", " "), f"cannot be asked ({done.last_words})", hint=hint))
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def find_rl_kernel() -> Found:
    answer = ask("rl_kernel")
    return Found(
        folder=Path(answer["folder"]),
        symbols=tuple(answer["symbols"]),
        extension_error=answer["extension_error"],
        operators=tuple(Operator(name=name, **facts) for name, facts in sorted(answer["operators"].items())),
    )


def find_problems(found: Found, *, platform: str, installed: Path, is_sm90: bool = False) -> Iterator[Problem]:
    """Yield every problem of the installed RL-Kernel on this platform."""
    if found.folder != installed.resolve():
        hint = "remove the other RL-Kernel from PYTHONPATH"
        yield Problem(
            "rl_engine", "is imported from elsewhere", got=str(found.folder), expected=str(installed), hint=hint
        )
    if platform == Platform.CUDA:
        is_newer = any(operator.registered for operator in found.operators)
        hopper = SM90_SYMBOLS + (SM90_NEWER_SYMBOLS if is_newer else ())
        yield from _extension_problems(found, SYMBOLS + (hopper if is_sm90 else ()))
    for operator in found.operators:
        offered = OPERATORS[operator.name].implementations.get(platform, ())
        accepted = [item for item in offered if item.registered == operator.registered]
        if accepted and find_implementation(operator, platform) is None:
            expected = " or ".join(item.class_name for item in accepted)
            yield Problem(operator.name, "resolves to another class", got=operator.class_name, expected=expected)
        if not operator.error <= MAX_ERROR:
            where = f"{operator.name} ({operator.class_name})"
            yield Problem(where, "computes wrong values", got=operator.error, expected=f"an error up to {MAX_ERROR:g}")


def _extension_problems(found: Found, wanted: tuple[str, ...]) -> Iterator[Problem]:
    missing = [name for name in wanted if name not in found.symbols]
    if found.extension_error:
        hint = "RL-Kernel builds this extension only where torch sees the GPU, and for the present torch only"
        yield Problem("rl_engine._C", f"cannot be imported ({found.extension_error})", hint=hint)
    elif missing:
        yield Problem("rl_engine._C", "lacks operators", got=list(found.symbols), expected=", ".join(missing))


def find_implementation(operator: Operator, platform: str) -> Implementation | None:
    return OPERATORS[operator.name].find_implementation(platform, operator.class_name)


def describe(found: Found, platform: str) -> Iterator[str]:
    """Yield a line for each operator with the implementation that runs here; plain PyTorch is called native."""
    for operator in found.operators:
        implementation = find_implementation(operator, platform)
        is_kernel = implementation is not None and not implementation.is_native
        kind = "kernel" if is_kernel else "native: plain PyTorch"
        yield f"{operator.name:<9} {operator.class_name:<20} {kind}, largest error {operator.error:.1e}"
    if platform == Platform.CPU:
        yield "native operators only: torch sees no GPU here, so RL-Kernel builds no kernels; no speed can be claimed"
    elif platform == Platform.ROCM:
        yield f"{len(found.symbols) or 'no'} compiled symbols: the routes on ROCm need none"
    else:
        code = derive(list_device_code(next(iter(find_extensions(found.folder)))), ", ".join)
        yield f"{len(found.symbols)} compiled symbols, for {code}"
