"""A user's own switch compares environment variables instead of RL-Kernel, with the same gates and no proof."""

from __future__ import annotations

import json
import re
import shlex
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
from tests.support.how_to import read_section

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


def test_the_variants_were_started_with_their_values_and_the_report_says_so(result: dict[str, Any]) -> None:
    folder = Path(result["bundle"]).parent / "trials"
    values = {path.name[5:]: json.loads((path / "env.json").read_text())["env"] for path in sorted(folder.iterdir())}
    assert {name.partition("-")[2] or name: env["NCCL_ALGO"] for name, env in values.items()} == {
        "baseline": "Ring",
        "enabled": "Tree",
    }
    assert not any("VIME_RL_KERNEL" in env for env in values.values())
    page = Path(result["report"]).read_text()
    assert "NCCL&#x27;s tree enabled against baseline" in page
    assert "off in both variants; they differ in NCCL&#x27;s tree" in page
    assert "RL-Kernel is not proved to have run" not in page


def test_the_next_command_names_the_file_of_a_run_that_is_not_shipped(result: dict[str, Any]) -> None:
    found = re.search(r"what now</dt><dd><code>(rlk-repro submit .*?)  #", Path(result["report"]).read_text())
    if found is None:
        pytest.skip("two pairs found a word")
    assert "--run own.yaml" in found[1]
    run_command(*shlex.split(found[1])[1:], "--dry-run", cwd=result["cwd"])


def test_a_replay_lists_the_variables_before_it_asks(result: dict[str, Any]) -> None:
    out = run_command("replay", result["bundle"], "--dry-run", cwd=result["cwd"])
    assert "reproduced byte for byte" in out
    assert "NCCL_ALGO=Tree" in out


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


@pytest.mark.parametrize("name", ["qwen3-4b-random", "module-smoke"])
def test_the_record_of_tokens_is_no_switch_where_rollouts_hold_no_log_probs(
    name: str, tmp_path: Path, call: Any
) -> None:
    values = [{"RLK_REPRO_AGREEMENT_RECORD": value} for value in "01"]
    switch = {"title": "the record of tokens", "baseline": values[0], "enabled": values[1]}
    code, _, err = call("submit", write_run(tmp_path, name, switch=switch), "--hardware", "h200", "--dry-run")
    assert code == 2
    assert "switch: the rollouts of this run hold no log-probs that the trainer could record" in " ".join(err.split())


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
