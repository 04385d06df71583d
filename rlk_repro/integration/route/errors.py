"""The error of a route that cannot go on, as its numbers would not be the trainer's; and what foreign code raises."""

from __future__ import annotations

from subprocess import SubprocessError
from typing import Final

# What foreign code is known to raise.  Triton's own errors are added where it is installed.
FAILURES: Final[tuple[type[Exception], ...]] = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, OSError, RuntimeError,
    SubprocessError, TypeError, ValueError,
)  # fmt: skip


class RouteFailed(RuntimeError):
    """An operator's answer, or the way a trainer treats it, is not what the route was written for.

    There is nothing to fall back to: it is raised in every mode.
    """


def find_failures() -> tuple[type[Exception], ...]:
    """``FAILURES`` and the base of Triton's own errors, where it is installed."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return FAILURES
    return (*FAILURES, TritonError)
