"""Read what a run recorded, and refuse sealed files that changed."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

from rlk_repro import __version__
from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.errors import BundleUnreadable, shorten
from rlk_repro.base.escapes import printable
from rlk_repro.base.files import MAX_ANALYSIS_BYTES, parse_json, read_limited
from rlk_repro.base.findings import Finding, Level, refuse_blocking
from rlk_repro.bundle.seal import is_folder
from rlk_repro.bundle.verify import open_verified
from rlk_repro.plan import Plan
from rlk_repro.probes.code import SECTION, probe_source
from rlk_repro.report import Context
from rlk_repro.rundir.manifest import OWN_PATCH, PATCH_IS_WHOLE, Manifest, Unknown, load_manifests
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import Analysis
from rlk_repro.sources import OURSELVES
from rlk_repro.submit.authored import find_rewritten
from rlk_repro.submit.finishing import report_context

_OUR_CODE: Final = ("version", "package_tree", "commit")


@contextmanager
def open_intact(source: Path) -> Iterator[tuple[RunDir, str | None]]:
    """Yield a run's files with the bundle's id, or None without a seal; a file that differs from the seal is refused.

    Raises:
        CheckFailed: the bundle was sealed and has been changed.
    """
    with open_verified(source) as (run_dir, verification):
        if verification.bundle_id is not None:
            refuse_blocking(verification.findings, CHANGED, under="bundle: ")
        yield run_dir, verification.bundle_id


_COMMIT: Final = re.compile("[0-9a-f]{40}")
CHANGED: Final = "differs from what was sealed"
CONTRADICTS: Final = "has records that contradict each other (rlk-repro report names them)"


def describe_own_patch(bundle: Path, manifests: Sequence[Manifest]) -> list[str]:
    """Describe how to restore rlk-repro's code as it ran; return no line if the code had no changes."""
    own = manifests[0].sections.get(SECTION, {}).get(OURSELVES.section) if manifests else None
    patch = own.get(OWN_PATCH) if isinstance(own, dict) else None
    if not isinstance(own, dict) or patch is None:
        return []
    commit = printable(str(own.get("commit")))[:40]
    if isinstance(patch, Unknown):
        return [f"the bundle lacks rlk-repro's uncommitted changes to commit {commit} ({printable(patch.reason)})"]
    if not _COMMIT.fullmatch(commit):
        return [f"rlk-repro had uncommitted changes, but recorded no commit ({commit}): nothing can restore its code"]
    name = RunDir(Path()).own_patch.name
    held = f"rlk-repro had uncommitted changes to commit {commit}; {name} in {printable(str(bundle))} holds them"
    lines = [f"{held}: code of the bundle's author, to be read before it is applied"]
    kept, _, lacking = str(patch).partition(", ")
    if kept != PATCH_IS_WHOLE:
        lines.append("  secrets were removed from this patch: it may not apply, or may not give the code that ran")
    if lacking:
        lines.append(f"  {printable(lacking)[:200]}")
    return lines


def load_result(source: Path, *, is_linked: bool) -> tuple[Analysis, Context]:
    """Analyse a bundle's logs; return the analysis, and the context that a report shows beside it.

    The analysis is never taken from the bundle, because a forger who computes new checksums could also change the
    verdict.

    Raises:
        CheckFailed: the bundle was sealed and has been changed.
    """
    with open_intact(source) as (run_dir, bundle_id):
        return read_result(run_dir, source, bundle_id, is_linked=is_linked)


def read_result(
    run_dir: RunDir, source: Path, bundle_id: str | None, *, is_linked: bool = False
) -> tuple[Analysis, Context]:
    """Do the work of ``load_result`` for a bundle that is open as ``run_dir`` and whose files were checked."""
    analysis = analyse(run_dir)
    plan = Plan.load(run_dir.plan)
    context = report_context(run_dir, source, is_linked=is_linked)
    found = find_rewritten(plan, run_dir)
    difference = find_difference(run_dir, analysis) if run_dir.is_sealed else None
    if difference is not None:
        expected = "the values computed from the logs, as in this report"
        found.append(Finding(Level.BLOCKING, run_dir.analysis.name, expected, difference))
    findings = (*context.findings, *found)
    return analysis, dataclasses.replace(
        context,
        findings=findings,
        bundle_id=bundle_id or "",
        is_folder=is_folder(source),
    )


def find_difference(run_dir: RunDir, analysis: Analysis) -> str | None:
    """Return the first difference between the sealed analysis and ``analysis``, or None without a difference.

    Sentences of gates, headline and reasons may differ if another version of rlk-repro wrote the sealed analysis.
    """
    sealed = _read_sealed(run_dir)
    again = analysis.content
    if sealed == again or (_without_words(sealed) == _without_words(again) and _is_by_another_version(run_dir)):
        return None
    for number, pair in enumerate(zip(sealed.splitlines(), again.splitlines(), strict=False), start=1):
        if pair[0] != pair[1]:
            was, now = (line.decode(errors="replace").strip().rstrip(",") for line in pair)
            return f"line {number}: sealed {shorten(was)}; the logs give {shorten(now)}"
    return f"the sealed analysis has {len(sealed)} bytes; the logs give an analysis of {len(again)} bytes"


def has_same_bytes(run_dir: RunDir, analysis: Analysis) -> bool:
    return _read_sealed(run_dir) == analysis.content


def _is_by_another_version(run_dir: RunDir) -> bool:
    here = _describe_own_code()
    for manifest in load_manifests(run_dir):
        facts = manifest.sections.get("code", {}).get("rlk_repro")
        if not isinstance(facts, dict):
            continue
        for name in _OUR_CODE:
            was, now = facts.get(name), here.get(name)
            if isinstance(was, str) and isinstance(now, str) and was != now:
                return True
    return False


@cache
def _describe_own_code() -> dict[str, Any]:
    return {**probe_source(OURSELVES, os.environ, {}), "version": __version__}


def _read_sealed(run_dir: RunDir) -> bytes:
    return read_limited(run_dir.analysis, MAX_ANALYSIS_BYTES) if run_dir.analysis.is_file() else b""


def _without_words(data: bytes) -> Any:
    try:
        value = parse_json("", data, max_bytes=len(data))
        gates = [{**gate, "detail": ""} for gate in value["gates"]]
        verdict = {**value["verdict"], "headline": "", "reasons": []}
    except (BundleUnreadable, KeyError, TypeError):
        return data
    return {**value, "gates": gates, "verdict": verdict}
