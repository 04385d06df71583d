"""Which pairs are whole, and where the rest goes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_repro.agent.resume import RESULTS, find_open_trials, find_whole_pairs, set_aside, set_node_aside
from rlk_repro.base.files import load_json, write_json, write_text
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import TrialStatus
from tests.support.job_examples import make_example_plan, make_staged

PLAN = make_example_plan()[0]
NAMES = [trial.name for trial in PLAN.trials]


def write_exit(run_dir: RunDir, name: str, status: str = "ok", allocation: str = "a") -> None:
    write_json(run_dir.trial(name).exit, {"schema": 1, "status": status, "allocation": allocation})


def test_a_pair_needs_both_exit_records_of_one_allocation(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    write_exit(run_dir, NAMES[0])
    assert find_whole_pairs(PLAN, run_dir) == set()
    write_exit(run_dir, NAMES[1], allocation="b")
    assert find_whole_pairs(PLAN, run_dir) == set()
    write_exit(run_dir, NAMES[1], status="failed")
    assert find_whole_pairs(PLAN, run_dir) == {"p1"}
    assert [trial.name for trial in find_open_trials(PLAN, run_dir)] == NAMES[2:]


def test_a_session_is_whole_by_itself(tmp_path: Path) -> None:
    sessions = make_example_plan(("measure.design=crossover", "measure.sessions=2"))[0]
    run_dir = RunDir(tmp_path)
    write_exit(run_dir, "00-s1-crossover")
    write_exit(run_dir, "01-s2-crossover", status="interrupted", allocation="b")
    assert find_whole_pairs(sessions, run_dir) == {"s1"}
    assert set_aside(sessions, run_dir) == ["01-s2-crossover"]


@settings(max_examples=25)
@given(st.lists(st.one_of(st.none(), st.sampled_from(TrialStatus)), min_size=4, max_size=4))
def test_only_pairs_that_ended_by_themselves_stay(
    tmp_path_factory: pytest.TempPathFactory, states: list[TrialStatus | None]
) -> None:
    run_dir = RunDir(tmp_path_factory.mktemp("run"))
    for name, status in zip(NAMES, states, strict=True):
        write_text(run_dir.trial(name).stdout, name)
        if status is not None:
            write_exit(run_dir, name, status.value)
    set_aside(PLAN, run_dir)
    kept = {folder.name for folder in run_dir.trial_dirs()}
    whole = [all(state in RESULTS for state in states[first : first + 2]) for first in (0, 2)]
    assert kept == {name for index, name in enumerate(NAMES) if whole[index // 2]}
    moved = [path.name for path in run_dir.interrupted.glob("1/*")]
    assert sorted(moved) == sorted(set(NAMES) - kept)


def test_half_a_pair_is_moved_and_its_samples_are_renamed(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for name in NAMES[:3]:
        write_exit(run_dir, name)
    telemetry = run_dir.node("node-0").telemetry
    lines = [f'{{"t":{index},"trial":"{name}"}}\n' for index, name in enumerate(NAMES)]
    write_text(telemetry, "".join(lines))
    assert set_aside(PLAN, run_dir) == [NAMES[2]]
    assert [folder.name for folder in run_dir.trial_dirs()] == NAMES[:2]
    assert load_json(run_dir.interrupted_trial(1, NAMES[2]).exit)["status"] == "ok"
    assert telemetry.read_text() == "".join(lines).replace(NAMES[2], f"interrupted/1/{NAMES[2]}")
    assert set_aside(PLAN, run_dir) == []
    write_exit(run_dir, NAMES[3])
    assert set_aside(PLAN, run_dir) == [NAMES[3]]
    assert run_dir.interrupted_trial(2, NAMES[3]).exit.is_file()


def test_a_torn_exit_record_counts_as_missing(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    write_exit(run_dir, NAMES[0])
    for text in ('{"schema": 1, "sta', '{"schema": 1}', '{"schema": 1, "status": "odd", "allocation": "a"}', "[]"):
        write_text(run_dir.trial(NAMES[1]).exit, text)
        assert find_whole_pairs(PLAN, run_dir) == set()


def test_records_of_an_earlier_agent_about_a_node_are_kept(tmp_path: Path) -> None:
    _, run_dir = make_staged(tmp_path / "run")
    node = run_dir.node("node-0")
    assert set_node_aside(node) is None
    for number in (1, 2):
        write_text(node.manifest, f"manifest {number}")
        write_text(node.preflight, "preflight")
        earlier = set_node_aside(node)
        assert earlier is not None
        assert earlier.path == node.earlier / str(number)
        assert earlier.manifest.read_text() == f"manifest {number}"
        assert not node.manifest.exists()
