"""The leader compares what all nodes of its job wrote of themselves."""

from __future__ import annotations

from pathlib import Path

from rlk_repro.agent.node import find_unlike_nodes
from rlk_repro.agent.parts import make_place
from rlk_repro.base.files import write_json
from rlk_repro.base.findings import Finding, Level
from rlk_repro.rundir.manifest import Manifest
from rlk_repro.rundir.paths import RunDir
from tests.support.job_examples import make_staged

PLACE = make_place("a", ("a", "b", "c"), "job-7")


def write_node(run_dir: RunDir, name: str, machine: str) -> None:
    write_json(run_dir.node(name).manifest, Manifest(node=name, sections={"host": {"machine": machine}}).to_json())


def test_nodes_are_compared_with_the_leader(tmp_path: Path) -> None:
    plan, run_dir = make_staged(tmp_path / "run")
    for name, machine in (("a", "x86_64"), ("b", "x86_64"), ("c", "aarch64")):
        write_node(run_dir, name, machine)
    expected = Finding(Level.BLOCKING, "nodes.c.host.machine", "the same as on a: x86_64", "aarch64")
    assert find_unlike_nodes(plan, run_dir, PLACE) == [expected]


def test_a_node_that_wrote_nothing_is_not_judged_twice(tmp_path: Path) -> None:
    plan, run_dir = make_staged(tmp_path / "run")
    write_node(run_dir, "a", "x86_64")
    run_dir.node("b").manifest.parent.mkdir(parents=True)
    run_dir.node("b").manifest.write_text("{")
    assert find_unlike_nodes(plan, run_dir, PLACE) == []
