"""Pack a run directory that killed agents may have left, and print the bundle's checksum as ``sha256sum`` does.

``python -m rlk_repro.job.pack RUN_DIR``; a sealed run's bundle stays as it is.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rlk_repro.base.errors import finish
from rlk_repro.base.files import sha256_file
from rlk_repro.bundle.seal import pack
from rlk_repro.rundir.paths import RunDir


def main() -> None:
    run_dir = RunDir(Path(sys.argv[1]).absolute())
    if not (run_dir.is_sealed and run_dir.bundle.is_file()):
        pack(run_dir)
    sys.stdout.write(f"{sha256_file(run_dir.bundle)}  {run_dir.bundle.name}\n")


if __name__ == "__main__":
    sys.exit(finish(main))
