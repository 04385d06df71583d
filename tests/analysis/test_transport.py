"""TCP on nodes that have a fabric, and variants that used different networks, prevent a verdict."""

from __future__ import annotations

from pathlib import Path

from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.files import load_json, write_json
from rlk_repro.base.findings import Level
from rlk_repro.replay.identity import compare_identities, read_identity
from rlk_repro.rundir.paths import RunDir, TrialDir
from rlk_repro.rundir.results import Analysis, VerdictWord
from tests.support.make_run import Recipe, make_plan_for, make_run

TWO_NODES = Recipe(settings=("measure.scored_steps=4", "measure.warmup_steps=1", "layouts.h200.num_nodes=2"))
IB = {"network": "IB", "paths": ["NET/IB/GDRDMA"], "nvls": True, "mnnvl": False}
TCP = {**IB, "network": "Socket", "paths": ["NET/Socket"]}


def plant(run_dir: RunDir, *, state: str = "ACTIVE", enabled: object = IB, baseline: object = IB) -> None:
    path = run_dir.node("node0").manifest
    value = load_json(path)
    value["sections"]["network"] = {"rdma_devices": {"mlx5_0": {"ports": {"1": {"state": state}}}}}
    write_json(path, value)
    for folder in run_dir.trial_dirs():
        set_transport(folder, enabled if folder.name.endswith("enabled") else baseline)


def set_transport(folder: TrialDir, transport: object) -> None:
    write_json(folder.libraries_file(0), {**load_json(folder.libraries_file(0)), "transport": transport})


def blocking(analysis: Analysis) -> list[str]:
    return [finding.where for finding in analysis.findings if finding.level is Level.BLOCKING]


def test_tcp_beside_an_active_port_is_blocking(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "id", TWO_NODES, lambda made: plant(made, enabled=TCP, baseline=TCP))
    analysis = analyse(run_dir)
    wheres = [f"{folder.name}.libraries.transport" for folder in run_dir.trial_dirs()]
    assert blocking(analysis) == wheres
    told = next(item for item in analysis.findings if item.where == wheres[0])
    assert (told.expected, told.found) == ("RDMA over 1 active port of the nodes", "Socket, on rank 0")
    assert analysis.verdict.word is VerdictWord.NOT_COMPARABLE


def test_variants_over_different_networks_are_not_comparable(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "id", change=lambda made: plant(made, enabled={**IB, "nvls": False}))
    analysis = analyse(run_dir)
    assert blocking(analysis)[0] == "p1.libraries.0.transport"
    assert analysis.verdict.word is VerdictWord.NOT_COMPARABLE


def test_a_used_or_absent_fabric_gives_no_finding(tmp_path: Path) -> None:
    used = make_run(tmp_path / "used", TWO_NODES, plant)
    down = make_run(tmp_path / "down", TWO_NODES, lambda made: plant(made, state="DOWN", enabled=TCP, baseline=TCP))
    one = make_run(tmp_path / "one", change=lambda made: plant(made, enabled=TCP, baseline=TCP))
    assert [blocking(analyse(run_dir)) for run_dir in (used, down, one)] == [[], [], []]


def test_a_replay_over_another_network_is_reported(tmp_path: Path) -> None:
    plan = make_plan_for(TWO_NODES)
    old, new, early = (
        read_identity(make_run(tmp_path / name, TWO_NODES, change), plan)
        for name, change in {
            "old": plant, "new": lambda made: plant(made, enabled=TCP, baseline=TCP), "early": None,
        }.items()
    )  # fmt: skip
    found = {item.where: (item.level, item.expected, item.found) for item in compare_identities(old, new)}
    assert found["transport"] == (Level.BLOCKING, "IB", "Socket")
    assert "transport" not in {item.where for item in compare_identities(early, new)}
