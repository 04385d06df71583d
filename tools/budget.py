"""Print how many lines the files named on standard input have of each kind, and the most they may have."""

from __future__ import annotations

import re
import sys
from pathlib import Path

BUDGET = {
    "source": (51_000, r"rlk_repro/.*\.(py|j2)|slurm/templates/.*|tools/.*\.(py|sh)|benchmarks/.*\.py"),
    "tests": (38_000, r"tests/.*\.py"),
    "Markdown": (5_000, r"(?!CHANGELOG).*\.md"),
    "data": (9_000, r"manifests/.*|(slurm|k8s)/examples/.*"),
}
MOST_FILES = 800

if __name__ == "__main__":
    files = [name for name in sys.stdin.read().splitlines() if Path(name).is_file()]
    for kind, (most, pattern) in BUDGET.items():
        lines = sum(Path(name).read_bytes().count(b"\n") for name in files if re.fullmatch(pattern, name))
        print(f"{kind:<9} {lines:>7,} of {most:>6,}")
    print(f"{'files':<9} {len(files):>7,} of {MOST_FILES:>6,}")
