"""A user's own switch compares environment variables instead of RL-Kernel, with the same gates and no proof."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlk_repro.analysis.analyse import analyse
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import PairStatus, ProofStatus
from tests import ROOT
from tests.cli.test_road import rlk_repro as run_command
from tests.support.run_plans import read_section

TINY = ("--set", "workload.grpo.rollout_batch_size=2", "--set", "workload.grpo.n_samples_per_prompt=2")
SWITCH = {"title": "NCCL's tree", "baseline": {"NCCL_ALGO": "Ring"}, "enabled": {"NCCL_ALGO": "Tree"}}


def write_run(folder: Path, name: str = "smoke", **changes: Any) -> str:
    run = yaml.safe_load((ROOT / "jobs" / f"{name}.yaml").read_text())
    run |= {"run": "own", "switch": SWITCH, **changes}
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(run))))
    return str(path)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cwd = tmp_path_factory.mktemp("own")
    run = write_run(cwd, measure={"pairs": 2, "warmup_steps": 1, "scored_steps": 2})
    return {**json.loads(run_command("submit", run, *TINY, "--wait", "--json", cwd=cwd)), "cwd": cwd}


def test_both_variants_run_without_rl_kernel_and_every_pair_is_scored(result: dict[str, Any]) -> None:
    (found,) = json.loads(run_command("report", result["bundle"], "--json", "-o", "r", cwd=result["cwd"]))
    analysis = json.loads(
        (Path(result["cwd"]) / Path(result["bundle"]).parent / "analysis" / "analysis.json").read_text()
    )
    assert analysis["switch"] == SWITCH["title"]
    assert {trial["proof"] for trial in analysis["trials"]} == {ProofStatus.NOT_REQUESTED.value}
    assert {pair["status"] for pair in analysis["pairs"]} == {PairStatus.SCORED.value}
    gates = {gate["name"]: gate for gate in analysis["gates"]}
    active = next(gate for gate in gates.values() if "neither uses RL-Kernel" in gate["detail"])
    assert (active["status"], active["detail"]) == (
        "n/a",
        "the variants differ in NCCL's tree; neither uses RL-Kernel",
    )
    assert found["gates"]


def test_a_session_measures_what_the_record_of_tokens_costs(tmp_path: Path) -> None:
    values = [{"RLK_REPRO_AGREEMENT_RECORD": value} for value in "01"]
    switch = {"title": "the record of tokens", "baseline": values[0], "enabled": values[1]}
    measure = {"design": "crossover", "sessions": 1, "blocks": 1, "control_blocks": 0, "warmup_steps": 2}
    run = write_run(tmp_path, switch=switch, measure=measure)
    result = json.loads(run_command("submit", run, *TINY, "--wait", "--json", cwd=tmp_path))
    folder = tmp_path / Path(result["bundle"]).parent
    (session,) = json.loads((folder / "analysis" / "analysis.json").read_text())["pairs"]
    assert (session["status"], session["reason"]) == (PairStatus.SCORED.value, "")
    file = next(folder.glob("trials/*/ops/0.jsonl"))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [(line["variant"], "agreement" in line) for line in lines if line["event"] == "step"]
    assert set(steps) == {("baseline", False), ("enabled", True)}
    for line in lines:
        line.pop("agreement", None)
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (damaged,) = analyse(RunDir(folder)).pairs
    assert damaged.status is PairStatus.VOID
    assert re.search(r"step \d+, which is enabled, has no record of tokens", damaged.reason)


def test_the_demo_finds_the_wait_that_it_plants(tmp_path: Path) -> None:
    measure = ("--set", "measure.sessions=1", "--set", "measure.blocks=2", "--set", "measure.control_blocks=0")
    result = json.loads(run_command("submit", "demo", *measure, "--exploratory", "--wait", "--json", cwd=tmp_path))
    folder = tmp_path / Path(result["bundle"]).parent
    analysis = json.loads((folder / "analysis" / "analysis.json").read_text())
    assert [pair["status"] for pair in analysis["pairs"]] == [PairStatus.SCORED.value]
    ratio = next(effect["ratio"] for effect in analysis["effects"] if effect["metric"] == "step_time_s")
    assert 0.3 < ratio < 0.75


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"measure": {"design": "crossover"}},
            "measure.design: the switch cannot change within a session: a process reads its variables when it starts, "
            "got 'crossover', expected parallel, or a switch with only the variable "
            'RLK_REPRO_AGREEMENT_RECORD ("0" in baseline, "1" in enabled)',
        ),
        ({"switch": {**SWITCH, "baseline": {"NCCL_PROTO": "LL"}}}, "switch.enabled.NCCL_PROTO: missing"),
        ({"switch": {**SWITCH, "baseline": SWITCH["enabled"]}}, "switch: is the same in both variants"),
        (
            {"switch": {**SWITCH, "baseline": {"LD_PRELOAD": "a"}, "enabled": {"LD_PRELOAD": "b"}}},
            "switch.baseline.LD_PRELOAD: a run may not set this variable",
        ),
        ({"switch": {**SWITCH, "enabled": {"NCCL_ALGO": "a b; c"}}}, "switch.enabled.NCCL_ALGO: wrong value"),
    ],
)
def test_an_impossible_switch_is_refused_at_its_line(
    changes: dict[str, Any], message: str, tmp_path: Path, call: Any
) -> None:
    code, _, err = call("submit", write_run(tmp_path, **changes), "--dry-run")
    assert code == 2
    assert message in " ".join(err.split())


def test_a_run_of_vime_is_planned_without_rl_kernel(tmp_path: Path, call: Any) -> None:
    run = write_run(tmp_path, "vime-smoke")
    code, out, _ = call("submit", run, "--hardware", "h200", "--stack", "vime-host", "--dry-run")
    assert code == 0
    assert "NCCL_ALGO: Ring in baseline, Tree in enabled" in out
    assert "VIME_RL_KERNEL" not in out


def test_the_how_to_makes_a_run_that_is_planned(tmp_path: Path) -> None:
    page = read_section("own-changes.md", "Compare a switch of your own")
    (block,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    copy, show, *_ = re.findall(r"```sh\n\s*(.*?)\n", page)
    source, target = copy.split()[1:]
    run = yaml.safe_load((ROOT / source).read_text()) | yaml.safe_load(textwrap.dedent(block))
    (tmp_path / target).write_text(yaml.safe_dump(run))
    out = run_command(*show.split()[1:], cwd=tmp_path)
    assert "NCCL_ALGO: Ring in baseline, Tree in enabled" in out
    assert "no other argument or variable differs between the variants" in out
