"""Pack, without a seal, a run directory whose agents were killed: ``python -m rlk_repro.job.pack RUN_DIR``."""

from __future__ import annotations

import sys
from pathlib import Path

from rlk_repro.base.errors import finish
from rlk_repro.bundle.seal import pack
from rlk_repro.rundir.paths import RunDir


def main() -> None:
    pack(RunDir(Path(sys.argv[1]).absolute()))


if __name__ == "__main__":
    sys.exit(finish(main))
