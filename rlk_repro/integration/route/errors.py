"""Define the error that a route raises instead of a wrong result, and the errors that other packages may raise."""

from __future__ import annotations

from subprocess import SubprocessError
from typing import Final

# errors that RL-Kernel, torch and other packages raise; Triton's own errors are added where it is installed
FAILURES: Final[tuple[type[Exception], ...]] = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, OSError, RuntimeError,
    SubprocessError, TypeError, ValueError,
)  # fmt: skip


class RouteFailed(RuntimeError):
    """An operator's result, or the trainer's use of it, is not what the route expects.

    The error comes too late for a fallback, so every mode raises it.
    """


def find_failures() -> tuple[type[Exception], ...]:
    """Return ``FAILURES``, and the base class of Triton's errors if Triton is installed."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return FAILURES
    return (*FAILURES, TritonError)
