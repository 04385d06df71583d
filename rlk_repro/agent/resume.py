"""Find the pairs and sessions that an earlier agent completed.

A pair is complete when both trials ran in the same allocation and each ended as ok, failed, out of memory or timeout.
The trials of an incomplete pair or session move to ``interrupted/<n>/`` and run again.
"""

from __future__ import annotations

from typing import Final

from rlk_repro.base.files import write_bytes
from rlk_repro.plan import Plan, Trial
from rlk_repro.rundir.exits import read_exit
from rlk_repro.rundir.paths import NodeDir, RunDir, TrialDir, next_number
from rlk_repro.rundir.results import TrialStatus

# a trial with another status says nothing about its variant
RESULTS: Final = frozenset({TrialStatus.OK, TrialStatus.FAILED, TrialStatus.OUT_OF_MEMORY, TrialStatus.TIMEOUT})


def find_whole_pairs(plan: Plan, run_dir: RunDir) -> set[str]:
    """Return the names of the pairs and sessions that need no second run."""
    whole = set()
    for name, trials in plan.groups().items():
        folders = [run_dir.trial(trial.name) for trial in trials]
        if _is_whole(folders):
            whole.add(name)
    return whole


def find_open_trials(plan: Plan, run_dir: RunDir) -> list[Trial]:
    whole = find_whole_pairs(plan, run_dir)
    return [trial for trial in plan.trials if trial.pair not in whole]


def set_aside(plan: Plan, run_dir: RunDir) -> list[str]:
    folders = [run_dir.trial(trial.name) for trial in find_open_trials(plan, run_dir)]
    attempt = next_number(run_dir.interrupted)
    moves = [(old.path, run_dir.interrupted_trial(attempt, old.name).path) for old in folders if old.path.exists()]
    if moves:
        _rename_in_telemetry(run_dir, {old.name: str(new.relative_to(run_dir.root)) for old, new in moves})
        run_dir.interrupted_trial(attempt, "").path.mkdir(parents=True)
    for old, new in moves:
        old.rename(new)
    return [old.name for old, _ in moves]


def set_node_aside(node: NodeDir) -> NodeDir | None:
    """Move an earlier agent's manifest and preflight record to ``earlier/<n>/``; return that folder, or None."""
    found = [path for path in (node.manifest, node.preflight) if path.exists()]
    if not found:
        return None
    target = NodeDir(node.earlier / str(next_number(node.earlier)))
    target.path.mkdir(parents=True)
    for path in found:
        path.rename(target.path / path.name)
    return target


def _is_whole(folders: list[TrialDir]) -> bool:
    records = [read_exit(folder) for folder in folders]
    return all(record.status in RESULTS for record in records) and len({item.allocation for item in records}) == 1


def _rename_in_telemetry(run_dir: RunDir, names: dict[str, str]) -> None:
    """Rename trials in the telemetry, so that samples of a trial's first run do not count for its second run."""
    for node in run_dir.node_dirs():
        if node.telemetry.is_file():
            data = node.telemetry.read_bytes()
            for old, new in names.items():
                data = data.replace(f'"trial":"{old}"'.encode(), f'"trial":"{new}"'.encode())
            write_bytes(node.telemetry, data)
