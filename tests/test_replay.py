from __future__ import annotations

from pathlib import Path

import pytest

from rlk_repro.errors import CheckFailed
from rlk_repro.files import load_json, write_json, write_text
from rlk_repro.findings import Finding, Level
from rlk_repro.replay import check_drift, prepare, reanalyse
from rlk_repro.rundir import RunDir
from tests.make_run import finish_run, make_run


def reseal(run_dir: RunDir) -> Path:
    """Redo the checksums as a forger would."""
    from rlk_repro.bundle import pack, seal

    run_dir.checksums.unlink()
    run_dir.bundle.unlink()
    seal(run_dir)
    return pack(run_dir)


@pytest.fixture
def sealed(tmp_path: Path) -> RunDir:
    run_dir = make_run(tmp_path / "id")
    finish_run(run_dir)
    return run_dir


def test_an_untouched_bundle_is_reproduced_from_its_logs(sealed: RunDir) -> None:
    recorded = reanalyse(sealed.bundle)
    assert recorded.analysis.run == "smoke"
    assert recorded.inputs.run == sealed.run_yaml.read_bytes()


def test_a_changed_log_with_redone_checksums_is_refused(sealed: RunDir) -> None:
    log = sealed.trial("01-p1-enabled").stdout
    write_text(log, log.read_text().replace("'perf/step_time': 0.", "'perf/step_time': 0.1").replace(
        "'perf/step_time': 1.", "'perf/step_time': 0.9"))  # fmt: skip
    with pytest.raises(CheckFailed) as caught:
        reanalyse(reseal(sealed))
    assert "analysis/analysis.json: the logs do not give the sealed analysis (line" in str(caught.value)


def test_a_changed_verdict_with_redone_checksums_is_refused(sealed: RunDir) -> None:
    value = load_json(sealed.analysis)
    value["verdict"]["word"] = "faster"
    write_json(sealed.analysis, value)
    with pytest.raises(CheckFailed, match="the logs do not give the sealed analysis"):
        reanalyse(reseal(sealed))


def test_a_missing_analysis_is_refused(sealed: RunDir) -> None:
    sealed.analysis.unlink()
    with pytest.raises(CheckFailed, match="the logs do not give the sealed analysis"):
        reanalyse(reseal(sealed))


def test_a_changed_file_is_refused_by_name(sealed: RunDir) -> None:
    path = sealed.trial("01-p1-enabled").stdout
    path.write_text(path.read_text() + "x")
    with pytest.raises(CheckFailed, match=r"trials/01-p1-enabled/stdout\.log"):
        reanalyse(sealed.root)


def test_the_replayed_experiment_is_the_recorded_one(sealed: RunDir) -> None:
    recorded = reanalyse(sealed.bundle)
    prepared = prepare(recorded)
    assert prepared.launch.plan.experiment_hash == recorded.plan.experiment_hash
    assert prepared.launch.run_dir.root != sealed.root
    assert any(finding.where == "gpu.driver" for finding in prepared.drift)


def test_blocking_drift_stops_unless_accepted() -> None:
    drift = (Finding(Level.BLOCKING, "gpu.devices.0.name", "NVIDIA H200", "none"), Finding(Level.INFO, "x", "1", "2"))
    with pytest.raises(CheckFailed) as caught:
        check_drift(drift, is_accepted=False)
    assert str(caught.value) == (
        "gpu.devices.0.name: differs from the recorded machine, got 'none', expected NVIDIA H200\n"
        "  hint: --yes runs it all the same; the comparison will say so"
    )
    check_drift(drift, is_accepted=True)
    check_drift(drift[1:], is_accepted=False)
