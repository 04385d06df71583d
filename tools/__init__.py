"""Tools that the Makefile runs; they are not part of the installed package."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rlk_repro.base.errors import RlkReproError


def finish(work: Callable[[], object]) -> int:
    """Run ``work`` and return 0; after an RlkReproError, print it and return its exit code."""
    try:
        work()
    except RlkReproError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0
