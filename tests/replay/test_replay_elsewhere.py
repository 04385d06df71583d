"""Published bundles on a machine that cannot run them: the re-analysis first, then what is missing here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_repro.base.findings import Level
from rlk_repro.replay.steps import prepare, reanalyse
from rlk_repro.workloads.checkouts import FLAGS
from tests import ROOT

BUNDLES = sorted((ROOT / "docs" / "evidence").glob("*.tgz"))


@pytest.mark.parametrize("bundle", BUNDLES, ids=lambda path: path.name)
def test_the_analysis_comes_first_and_then_all_that_is_missing(
    bundle: Path, call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in FLAGS:
        monkeypatch.delenv(source.variable, raising=False)
    recorded = reanalyse(bundle)
    blocking = [str(item) for item in prepare(recorded).known_drift if item.level is Level.BLOCKING]
    assert any("gpu.count" in text for text in blocking)
    needed = {*recorded.plan.run.workload.modules, *recorded.identity.sources}
    modules = [source.module for source in FLAGS if source.module in needed]
    for flag in ((), ("--dry-run",)):
        code, out, err = call("replay", str(bundle), *flag)
        lines = out.splitlines()
        assert lines[0].startswith(f"{bundle}: the analysis is reproduced ")
        assert lines[1] == recorded.analysis.verdict.headline
        assert lines[2].startswith("drift of this machine against the recorded one")
        assert lines[3 : 3 + len(blocking)] == [f"  {text}" for text in sorted(blocking)]
        assert code == (0 if flag else 3 if modules else 1)
        said = "missing on this machine: python module {} (give" if flag else "python module {}: missing"
        assert [module for module in modules if said.format(module) not in (out if flag else err)] == []
