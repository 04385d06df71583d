from __future__ import annotations

from pathlib import Path

from rlk_repro.base.files import load_json
from rlk_repro.plan import Plan, find_run_id
from tests.support.job_examples import make_staged


def test_the_plan_file_records_the_run_id_outside_the_plan(tmp_path: Path) -> None:
    plan, run_dir = make_staged(tmp_path / "20261120T133000Z-01234567-89ab")
    record = load_json(run_dir.plan)
    assert find_run_id(record, "elsewhere") == run_dir.run_id
    assert Plan.from_json(record) == plan
    assert {**record, "run_id": "other"} == {**plan.to_json(), "run_id": "other"}
