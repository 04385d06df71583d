"""Verify and analyse again every bundle below docs/evidence: ``python -m tools.check_evidence``.

One line a bundle: "bytes" if the logs still give the sealed analysis byte for byte, "values" if only sentences differ.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

from rlk_repro.base.errors import RlkReproError
from rlk_repro.replay.steps import reanalyse

FOLDER: Final = Path(__file__).parents[1] / "docs" / "evidence"
# A later version words gates, headline or reasons of these differently; every other one keeps its bytes.
REWORDED: Final = {
    "module-qwen3-4b-pairs-h200.tgz",
    "module-qwen3-4b-replay-h200.tgz",
    "module-qwen3-4b-sessions-h200.tgz",
    "module-qwen3-4b-tp2-h200.tgz",
    "qwen3-4b-random-against-compile-h200.tgz",
}
NUM_PROCESSES: Final = 2


def check_bundle(path: Path) -> str:
    """Return "bytes", "values", or why the bundle no longer gives its analysis."""
    try:
        recorded = reanalyse(path)
    except RlkReproError as error:
        return f"failed: {error}"
    return "values" if recorded.is_reworded else "bytes"


def main() -> int:
    bundles = sorted(FOLDER.rglob("*.tgz"))
    num_wrong = 0
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        for path, found in zip(bundles, pool.map(check_bundle, bundles), strict=True):
            expected = "values" if path.name in REWORDED else "bytes"
            if found == expected:
                print(f"{path.relative_to(FOLDER)}: {found}", flush=True)
            else:
                num_wrong += 1
                print(f"{path.relative_to(FOLDER)}: {found} (expected: {expected})", flush=True)
    missing = REWORDED - {path.name for path in bundles}
    for name in sorted(missing):
        print(f"{name}: missing")
    print(f"{len(bundles)} bundles, {num_wrong + len(missing)} not as expected")
    return 1 if num_wrong or missing or not bundles else 0


if __name__ == "__main__":
    sys.exit(main())
