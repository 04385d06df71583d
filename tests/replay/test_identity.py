"""The code that ran is read from a run directory and compared with another run's code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlk_repro.base.files import dump_json_line, load_json, write_json
from rlk_repro.base.findings import Finding, Level
from rlk_repro.cli import app
from rlk_repro.plan import Plan
from rlk_repro.replay.compare import Differences, Match, diff_bundles
from rlk_repro.replay.identity import read_identity
from rlk_repro.rundir.paths import RunDir
from rlk_repro.sources import RL_KERNEL
from tests.support.make_run import Recipe, finish_run, make_run

TREE, OTHER = "5" * 40, "6" * 40


def change_libraries(sources: dict[str, object]) -> Callable[[RunDir], None]:
    def change(run_dir: RunDir) -> None:
        for trial in Plan.load(run_dir.plan).trials:
            path = run_dir.trial(trial.name).libraries_file(0)
            write_json(path, {**load_json(path), "sources": sources})

    return change


def change_decisions(key: str, value: str) -> Callable[[RunDir], None]:
    def change(run_dir: RunDir) -> None:
        for trial in Plan.load(run_dir.plan).trials:
            path = run_dir.trial(trial.name).ops_file(0)
            events = [load_event(line) for line in path.read_text().splitlines()]
            changed = [{**event, key: value} if event["event"] == "decision" else event for event in events]
            path.write_text("".join(f"{dump_json_line(event)}\n" for event in changed))

    return change


def load_event(line: str) -> dict[str, object]:
    event: dict[str, object] = json.loads(line)
    return event


def diff(
    tmp_path: Path, change: Callable[[RunDir], None], first: Callable[[RunDir], None] | None = None
) -> Differences:
    bundles = [finish_run(make_run(tmp_path / side / "id", change=how)) for side, how in (("a", first), ("b", change))]
    return diff_bundles(*bundles)


def test_what_the_ranks_loaded_and_resolved_is_read_back(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "id")
    found = read_identity(run_dir, Plan.load(run_dir.plan))
    assert found.sources == {RL_KERNEL.module: frozenset({TREE})}
    assert {op: {name for name, _ in resolved} for op, resolved in found.decisions.items()} == {
        "logp": {"FusedLogpGenericOp"},
        "ratio_kl": {"TritonRatioKLOp"},
    }


def test_other_sources_are_blocking_and_never_match(tmp_path: Path) -> None:
    difference = diff(tmp_path, change_libraries({"rl_engine": OTHER}))
    assert Finding(Level.BLOCKING, "sources.rl_engine", TREE, OTHER) in difference.findings
    assert difference.comparison is not None
    assert difference.comparison.level is Match.NOT_COMPARABLE
    assert difference.comparison.obstacles == (f"sources.rl_engine: recorded {TREE}, now {OTHER}",)


def test_sources_that_are_missing_leave_the_level_undecided(tmp_path: Path) -> None:
    unknown = change_libraries({"rl_engine": {"unknown": "Permission denied"}})
    difference = diff(tmp_path, unknown, unknown)
    assert difference.findings == (Finding(Level.WARNING, "sources.rl_engine", "not recorded", "not recorded"),)
    assert difference.comparison is not None
    assert difference.comparison.level is Match.UNDECIDED
    assert not difference.comparison.is_ok
    assert difference.comparison.lines()[:2] == [
        "replay level: undecided (hashes are missing, so nothing proves that the same code ran)",
        "  sources.rl_engine: not recorded in the old bundle, not recorded in the new bundle",
    ]
    assert difference.comparison.unidentified


@pytest.mark.parametrize(
    ("key", "value"), [("implementation", "NativeRatioKLOp2"), ("version", "2.0 (rl_engine.runtime.registry)")]
)
def test_another_implementation_or_version_is_another_experiment(tmp_path: Path, key: str, value: str) -> None:
    unknown = change_libraries({})

    def change(run_dir: RunDir) -> None:
        unknown(run_dir)
        change_decisions(key, value)(run_dir)

    difference = diff(tmp_path, change, unknown)
    places = {item.where for item in difference.findings if item.level is Level.BLOCKING}
    assert places == {f"decisions.logp.{key}", f"decisions.ratio_kl.{key}"}
    assert difference.comparison is not None
    assert difference.comparison.level is Match.NOT_COMPARABLE


def record_early(version: str) -> Callable[[RunDir], None]:
    """Change the record to the form of the earliest bundles, in which no rank hashes what it loaded."""

    def change(run_dir: RunDir) -> None:
        change_decisions("version", version)(run_dir)
        for trial in Plan.load(run_dir.plan).trials:
            path = run_dir.trial(trial.name).libraries_file(0)
            record = load_json(path)
            del record["sources"]
            write_json(path, record)

    return change


def record_now(run_dir: RunDir) -> None:
    change_decisions("version", "0.1.0 at 202f0e30e567 (rl_engine.kernels.registry)")(run_dir)
    log = run_dir.trial("00-p1-baseline").stdout
    log.write_text(log.read_text().replace("'train/loss': 0.1", "'train/loss': 0.1000001"))


def finish(root: Path, ratio: float, change: Callable[[RunDir], None]) -> Path:
    return finish_run(make_run(root / "id", Recipe(speedup=1 / ratio, noise=0.0006), change))


def test_a_bundle_of_an_earlier_format_is_reproduced_with_a_caution(tmp_path: Path) -> None:
    """Two H200 gave almost the same result; since then versions name a commit and ranks hash what they load."""
    recorded = finish(tmp_path / "a", 0.2267, record_early("0.1.0 (rl_engine.kernels.registry)"))
    new = finish(tmp_path / "b", 0.2251, record_now)
    comparison = diff_bundles(recorded, new).comparison
    assert comparison is not None
    assert (comparison.level, comparison.is_ok) == (Match.REPRODUCED, True)
    lines = comparison.lines()
    assert re.fullmatch(
        r"replay level: reproduced within 1 %, with 3 cautions \(step time ratio 0\.2266 recorded, 0\.225 now; "
        r"difference -0\.\d\d %, 95 % interval -0\.\d\d to -0\.\d\d %\)",
        lines[0],
    )
    not_yet = "not recorded by this older format in the old bundle"
    assert lines[1:4] == [
        f"  caution: sources.rl_engine: {not_yet}, {TREE} in the new bundle",
        f"  caution: decisions.logp.commit: {not_yet}, 202f0e30e567 in the new bundle",
        f"  caution: decisions.ratio_kl.commit: {not_yet}, 202f0e30e567 in the new bundle",
    ]
    assert list(comparison.cautions) == [line.removeprefix("  caution: ") for line in lines[1:4]]
    result = CliRunner().invoke(app, ["diff", str(recorded), str(new)])
    assert (result.exit_code, lines[0] in result.stdout) == (0, True)
