"""Reads back what a run recorded, and refuses what is sealed and not as it was sealed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rlk_repro.analysis import analyse
from rlk_repro.bundle import open_bundle
from rlk_repro.errors import CheckFailed, Problem
from rlk_repro.files import dump_json
from rlk_repro.findings import Finding, Level
from rlk_repro.launch import report_context
from rlk_repro.report import Context
from rlk_repro.results import Analysis
from rlk_repro.rundir import RunDir
from rlk_repro.verify import Verification, verify


def require_verified(source: Path) -> None:
    """Check every file of a bundle or run directory against its seal.

    Raises:
        CheckFailed: naming each file that is not what was sealed, or the missing seal.
        BundleUnreadable: broken or unsafe.
    """
    _refuse(verify(source))


def require_intact(source: Path) -> None:
    """The same for what is sealed; a run that was never sealed has nothing to be held to."""
    verification = verify(source)
    if verification.bundle_id is not None:
        _refuse(verification)


def _refuse(verification: Verification) -> None:
    problems = [
        Problem(f"bundle: {item.where}", "not what was sealed", got=item.found, expected=item.expected)
        for item in verification.findings
        if item.level is Level.BLOCKING
    ]
    if problems:
        raise CheckFailed(*problems)


def load_result(source: Path, *, is_linked: bool) -> tuple[Analysis, Context]:
    """The analysis that the logs give, and what surrounds it.

    Computed here and now, never taken from the bundle: whoever can redo checksums can also write a verdict.  A sealed
    analysis that says something else becomes a blocking finding of the context.

    Raises:
        CheckFailed: it was sealed and has been changed.
        BundleUnreadable: broken or unsafe.
    """
    require_intact(source)
    with open_bundle(source) as run_dir:
        analysis = analyse(run_dir)
        context = report_context(run_dir, source, is_linked=is_linked)
        difference = find_difference(run_dir, analysis) if run_dir.is_sealed else None
    if difference is None:
        return analysis, context
    forged = Finding(Level.BLOCKING, run_dir.analysis.name, "what the logs give, shown here", difference)
    return analysis, dataclasses.replace(context, findings=(*context.findings, forged))


def find_difference(run_dir: RunDir, analysis: Analysis) -> str | None:
    """Where the sealed analysis differs from ``analysis``, None where the bytes are the same.

    The words of gates and reasons are another version's to choose: they follow from numbers that are compared, and a
    report shows this version's.
    """
    sealed = _read_sealed(run_dir)
    again = dump_json(analysis.to_json())
    if sealed == again or _without_words(sealed) == _without_words(again):
        return None
    for number, pair in enumerate(zip(sealed.splitlines(), again.splitlines(), strict=False), start=1):
        if pair[0] != pair[1]:
            was, now = (line.decode(errors="replace").strip().rstrip(",") for line in pair)
            return f"line {number}: sealed {was}; the logs give {now}"
    return f"sealed {len(sealed)} bytes; the logs give {len(again)}"


def has_same_bytes(run_dir: RunDir, analysis: Analysis) -> bool:
    """Whether the sealed analysis is ``analysis`` to the last byte, its words included."""
    return _read_sealed(run_dir) == dump_json(analysis.to_json())


def _read_sealed(run_dir: RunDir) -> bytes:
    return run_dir.analysis.read_bytes() if run_dir.analysis.is_file() else b""


def _without_words(data: bytes) -> Any:
    """The values of an analysis, without what its gates and reasons say of them; ``data`` itself where it is none."""
    try:
        value = json.loads(data)
        gates = [{**gate, "detail": ""} for gate in value["gates"]]
        verdict = {**value["verdict"], "reasons": []}
    except (ValueError, KeyError, TypeError):
        return data
    return {**value, "gates": gates, "verdict": verdict}
