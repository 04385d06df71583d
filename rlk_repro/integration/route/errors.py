"""Define the error that a route raises instead of a wrong result, and the errors that RL-Kernel and torch may raise."""

from __future__ import annotations

from subprocess import SubprocessError
from typing import Final

FAILURES: Final[tuple[type[Exception], ...]] = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, OSError, RuntimeError,
    SubprocessError, TypeError, ValueError,
)  # fmt: skip


class RouteFailed(RuntimeError):
    """An operator's result, or the trainer's use of it, is not what the route expects; every mode raises this error."""


def find_failures() -> tuple[type[Exception], ...]:
    try:
        from triton.errors import TritonError
    except ImportError:
        return FAILURES
    return (*FAILURES, TritonError)
