"""Define the error of a route whose numbers would differ from the trainer's, and the errors of foreign code."""

from __future__ import annotations

from subprocess import SubprocessError
from typing import Final

# errors that foreign code is known to raise; Triton's own errors are added where it is installed
FAILURES: Final[tuple[type[Exception], ...]] = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, OSError, RuntimeError,
    SubprocessError, TypeError, ValueError,
)  # fmt: skip


class RouteFailed(RuntimeError):
    """An operator's answer, or the trainer's use of it, is not what the route was written for.

    No fallback is possible, so this error is raised in every mode.
    """


def find_failures() -> tuple[type[Exception], ...]:
    """Return ``FAILURES`` and the base of Triton's own errors, where it is installed."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return FAILURES
    return (*FAILURES, TritonError)
