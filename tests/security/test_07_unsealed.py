"""A bundle without a seal proves nothing: every report and the exit code say so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlk_repro.bundle.seal import pack
from rlk_repro.rundir.paths import RunDir
from tests.support.make_run import finish_run, make_run

CAUTION = "The run is not sealed, so its files may have changed."


@pytest.fixture
def unsealed(tmp_path: Path) -> RunDir:
    """Make an honest run whose enabled times were halved and whose seal was removed."""
    run_dir = make_run(tmp_path / "runs" / "id")
    finish_run(run_dir)
    run_dir.checksums.unlink()
    run_dir.bundle.unlink()
    for trial in run_dir.trial_dirs():
        if trial.name.endswith("enabled"):
            text = trial.stdout.read_text()
            trial.stdout.write_text(
                re.sub(r"'perf/step_time': ([\d.]+)", lambda found: f"'perf/step_time': {float(found[1]) / 2}", text)
            )
    pack(run_dir)
    return run_dir


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_report_of_an_unsealed_run_says_so_and_exits_with_1_by_default(
    call, unsealed: RunDir, tmp_path: Path, *, is_packed: bool
) -> None:
    source = str(unsealed.bundle if is_packed else unsealed.root)
    code, out, _ = call("report", source, "-o", str(tmp_path / "out"))
    assert code == 1
    assert "FASTER" in out
    assert CAUTION in " ".join(out.split())
    head = (tmp_path / "out" / "report.md").read_text().split("\n## ", 1)[0]
    assert CAUTION in head
    assert CAUTION in (tmp_path / "out" / "report.html").read_text()
    code, out, _ = call("report", source, "-o", str(tmp_path / "out"), "--json")
    assert (code, CAUTION in json.loads(out)[0]["cautions"]) == (1, True)
    assert call("report", source, "-o", str(tmp_path / "out"), "--unsealed")[0] == 0


def test_one_unsealed_run_among_several_sets_the_exit_code(call, unsealed: RunDir, tmp_path: Path) -> None:
    sealed = finish_run(make_run(tmp_path / "sealed"))
    arguments = ("report", str(sealed), str(unsealed.bundle), "-o", str(tmp_path / "out"))
    assert call(*arguments)[0] == 1
    code, out, _ = call(*arguments, "--unsealed", "--json")
    assert (code, [CAUTION in item["cautions"] for item in json.loads(out)]) == (0, [False, True])


def test_a_diff_with_an_unsealed_run_names_it_and_exits_with_1_by_default(call, unsealed: RunDir) -> None:
    source = str(unsealed.bundle)
    code, out, _ = call("diff", source, source)
    assert code == 1
    assert f"{source}: not sealed" in out
    assert json.loads(call("diff", source, source, "--json")[1])["unsealed"] == [source, source]
    assert call("diff", source, source, "--unsealed")[0] == 0


def test_a_replay_of_an_unsealed_run_is_refused(call, unsealed: RunDir) -> None:
    code, _, err = call("replay", str(unsealed.bundle), "--analyze-only")
    assert code == 1
    assert "SHA256SUMS" in err


def test_a_report_of_a_sealed_bundle_is_without_that_caution(call, tmp_path: Path) -> None:
    sealed = finish_run(make_run(tmp_path / "sealed"))
    code, out, _ = call("report", str(sealed), "-o", str(tmp_path / "out"))
    assert (code, "Not sealed" in out) == (0, False)


@pytest.mark.parametrize("options", [["--analyze-only"], ["--dry-run"], ["--yes"]])
def test_an_unsealed_run_is_not_replayed(call, unsealed: RunDir, options: list[str]) -> None:
    code, _, err = call("replay", str(unsealed.bundle), *options)
    assert (code, "bundle: SHA256SUMS: differs from what was sealed" in err) == (1, True)
