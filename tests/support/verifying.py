"""The findings of ``verify`` as a list, for tests that expect no id."""

from __future__ import annotations

from pathlib import Path

from rlk_repro.base.findings import Finding
from rlk_repro.bundle.verify import verify


def verify_bundle(path: Path) -> list[Finding]:
    return list(verify(path).findings)
