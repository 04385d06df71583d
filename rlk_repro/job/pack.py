"""Pack a run directory that killed agents may have left: ``python -m rlk_repro.job.pack RUN_DIR [ANSWER_FILE]``.

A sealed run's bundle stays as it is.  The answer tells a pod's reader how large the bundle is, and its checksum.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rlk_repro.base.errors import finish
from rlk_repro.base.files import dump_json, sha256_file
from rlk_repro.bundle.seal import pack
from rlk_repro.rundir.paths import RunDir


def main() -> None:
    run_dir = RunDir(Path(sys.argv[1]).absolute())
    if not (run_dir.is_sealed and run_dir.bundle.is_file()):
        pack(run_dir)
    for answer in map(Path, sys.argv[2:]):
        size_bytes = run_dir.bundle.stat().st_size
        answer.write_bytes(dump_json({"bytes": size_bytes, "sha256": sha256_file(run_dir.bundle)}))


if __name__ == "__main__":
    sys.exit(finish(main))
