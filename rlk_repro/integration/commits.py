"""Select one of several installed RL-Kernel commits, so that two trials can run different commits.

``RLK_COMMITS`` names a folder with one subfolder per commit, which has the commit's 40 digits as its name.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

from rlk_repro.base.errors import EnvironmentMissing, Problem
from rlk_repro.integration.route.rl_kernel import PACKAGE, find_commit
from rlk_repro.switches import COMMITS

SOURCE: Final = "git+https://github.com/RL-Align/RL-Kernel"


def use_commit(commit: str) -> None:
    """Put the folder of an RL-Kernel commit first on this process's ``sys.path``.

    Raises:
        EnvironmentMissing: the folder is absent or holds another commit, or RL-Kernel is already imported.
    """
    folder = Path(os.environ.get(COMMITS, "")) / commit
    if str(folder) in sys.path:
        return
    found = {find_commit(item) for item in distributions(path=[str(folder)])}
    if not os.environ.get(COMMITS) or commit not in found or not (folder / PACKAGE).is_dir():
        hint = f"pip install --no-deps --no-build-isolation --target {COMMITS}/{commit} {SOURCE}@{commit}"
        raise EnvironmentMissing(
            Problem(f"{COMMITS}/{commit}", "is not an installed RL-Kernel of this commit",
                    got=str(folder) if os.environ.get(COMMITS) else f"no variable {COMMITS}", hint=hint)
        )  # fmt: skip
    if PACKAGE in sys.modules:
        raise EnvironmentMissing(Problem(PACKAGE, "is already imported from elsewhere", expected=str(folder)))
    sys.path.insert(0, str(folder))
