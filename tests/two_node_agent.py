"""The node agent for a run of the reference trainer on two nodes, which the trainer itself refuses.

Node 0 trains, the other one describes and watches itself: all that agents do across nodes, but for Ray.
"""

from __future__ import annotations

import sys

import pytest

from rlk_repro.job.__main__ import main
from rlk_repro.workloads import reference


def allow_nodes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reference, "find_problems", lambda _: [])


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        allow_nodes(patch)
        sys.exit(main(sys.argv[3:]))  # after -m rlk_repro.job
