"""Find this process's rank, and check that all ranks have equal settings: otherwise their collectives would hang."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch.distributed import distributed_c10d

from rlk_repro.base.errors import CheckFailed, Problem

WAIT_S: Final = 300.0
_rounds = itertools.count()


def find_rank() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def check_ranks_agree(rank: int, world_size: int, choice: str, *, wait_s: float = WAIT_S) -> None:
    """Compare ``choice`` between the ranks, through the store of their process group.

    A collective could hang, because a rank without the environment variables does not call this function.

    Raises:
        CheckFailed: ranks made different choices, or some ranks did not call this function.
    """
    if world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return
    met_by = distributed_c10d._get_default_store()  # noqa: SLF001 torch has no public function that returns the store
    store = distributed_c10d.PrefixStore(f"rlk_repro/{next(_rounds)}", met_by)
    store.set(str(rank), choice)
    expected, hint = f"the settings of rank {rank}: {choice}", "give every rank the same environment"
    problems = []
    for other in range(world_size):
        try:
            store.wait([str(other)], timedelta(seconds=wait_s))
        except RuntimeError:
            problems.append(Problem(f"rank {other}", "has not reported its settings", expected=expected, hint=hint))
            break
        found = store.get(str(other)).decode()
        if found != choice:
            what = "has other settings"
            problems.append(Problem(f"rank {other}", what, got=found, expected=expected, hint=hint))
    if problems:
        raise CheckFailed(*problems)
