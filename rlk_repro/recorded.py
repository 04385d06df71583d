"""Reads back what a run recorded, and refuses what is sealed and not as it was sealed."""

from __future__ import annotations

from pathlib import Path

from rlk_repro.analysis import analyse
from rlk_repro.bundle import open_bundle
from rlk_repro.errors import CheckFailed, Problem
from rlk_repro.files import load_json
from rlk_repro.findings import Level
from rlk_repro.launch import report_context
from rlk_repro.report import Context
from rlk_repro.results import Analysis
from rlk_repro.verify import verify_bundle


def require_verified(source: Path) -> None:
    """Check every file of a bundle or run directory against its seal.

    Raises:
        CheckFailed: naming each file that is not what was sealed, or the missing seal.
        BundleUnreadable: broken or unsafe.
    """
    problems = [
        Problem(f"bundle: {item.where}", "not what was sealed", got=item.found, expected=item.expected)
        for item in verify_bundle(source)
        if item.level is Level.BLOCKING
    ]
    if problems:
        raise CheckFailed(*problems)


def require_intact(source: Path) -> None:
    """The same for what is sealed; a run that was never sealed has nothing to be held to."""
    with open_bundle(source) as run_dir:
        if run_dir.is_sealed:
            require_verified(source)


def load_result(source: Path, *, is_linked: bool) -> tuple[Analysis, Context]:
    """The analysis of a run and what surrounds it; one that was never sealed is analysed now.

    Raises:
        CheckFailed: it was sealed and has been changed.
        BundleUnreadable: broken or unsafe.
    """
    require_intact(source)
    with open_bundle(source) as run_dir:
        context = report_context(run_dir, source, is_linked=is_linked)
        if run_dir.is_sealed and run_dir.analysis.is_file():
            return Analysis.from_json(load_json(run_dir.analysis), str(run_dir.analysis)), context
        return analyse(run_dir), context
