"""Two ranks, each a process of its own, forked from one that has imported torch: to import it takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from typing import Any


def run_ranks(run: Callable[..., None], *arguments: Any) -> None:
    """Call ``run(rank, *arguments)`` in both; both must end well."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    processes = [context.Process(target=run, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
