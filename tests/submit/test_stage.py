from __future__ import annotations

from pathlib import Path

import pytest

from rlk_repro.base.errors import EnvironmentMissing
from rlk_repro.base.files import load_json, write_text
from rlk_repro.plan import Plan, find_run_id
from tests.support.job_examples import make_staged


def test_the_plan_file_records_the_run_id_outside_the_plan(tmp_path: Path) -> None:
    plan, run_dir = make_staged(tmp_path / "20261120T133000Z-01234567-89ab")
    record = load_json(run_dir.plan)
    assert find_run_id(record, "elsewhere") == run_dir.run_id
    assert Plan.from_json(record) == plan
    assert {**record, "run_id": "other"} == {**plan.to_json(), "run_id": "other"}


def test_a_run_that_cannot_be_remembered_leaves_no_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(tmp_path / "state", "a file, not a folder")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(EnvironmentMissing, match="export XDG_STATE_HOME"):
        make_staged(tmp_path / "runs" / "run")
    assert list((tmp_path / "runs").iterdir()) == []
