"""Two commits of RL-Kernel run against each other in real processes; each trial imports its own and proves which."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlk_repro.agent.preflight.code import check_rl_kernel
from rlk_repro.base.findings import Level
from rlk_repro.images.pins import find_pinned
from rlk_repro.plan import Plan
from rlk_repro.rundir.results import PairStatus, ProofStatus
from rlk_repro.submit.consent import find_foreign, list_what_runs
from rlk_repro.submit.show import plan_summary
from tests import ROOT, SUPPORT
from tests.cli.test_road import rlk_repro as run_command
from tests.support.job_examples import make_staged_facts
from tests.support.run_plans import make_tier_plan, read_section

OLD, NEW = "1a" * 20, "2b" * 20
TINY = ("--set", "workload.grpo.rollout_batch_size=2", "--set", "workload.grpo.n_samples_per_prompt=2")
MEASURE = {"pairs": 1, "warmup_steps": 1, "scored_steps": 2}


def install(parent: Path, name: str, commit: str) -> None:
    """Write what pip leaves: the package, and a record of its origin."""
    folder = parent / name
    shutil.copytree(SUPPORT / "fake_rl_engine" / "rl_engine", folder / "rl_engine")
    info = folder / "rl_kernel-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: RL-Kernel\nVersion: 0.1.0\n")
    (info / "direct_url.json").write_text(json.dumps({"vcs_info": {"vcs": "git", "commit_id": commit}}))


def write_run(folder: Path, **rl_kernel: Any) -> str:
    run = yaml.safe_load((ROOT / "jobs" / "smoke.yaml").read_text())
    run |= {"run": "two", "measure": MEASURE}
    run["rl_kernel"] |= {"mode": "require", "commits": {"baseline": OLD, "enabled": NEW}} | rl_kernel
    path = folder / "two.yaml"
    path.write_text(yaml.safe_dump(run))
    return str(path)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cwd = tmp_path_factory.mktemp("two")
    for commit in (OLD, NEW):
        install(cwd / "commits", commit, commit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLK_COMMITS", str(cwd / "commits"))
        answer = run_command("submit", write_run(cwd), *TINY, "--wait", "--json", cwd=cwd)
    return {**json.loads(answer), "cwd": cwd}


@pytest.mark.real
def test_each_trial_ran_the_commit_of_its_variant(result: dict[str, Any]) -> None:
    run_dir = Path(result["bundle"]).parent
    analysis = json.loads((run_dir / "analysis" / "analysis.json").read_text())
    assert {trial["proof"] for trial in analysis["trials"]} == {ProofStatus.NATIVE.value}
    assert {pair["status"] for pair in analysis["pairs"]} == {PairStatus.SCORED.value}
    for trial in sorted((run_dir / "trials").iterdir()):
        lines = map(json.loads, (trial / "ops" / "0.jsonl").read_text().splitlines())
        versions = {line["version"] for line in lines if line["event"] == "decision"}
        expected = OLD if trial.name.endswith("baseline") else NEW
        assert all(version.startswith(f"0.1.0 at {expected[:12]} ") for version in versions)
        assert versions


@pytest.mark.real
def test_the_variants_differ_in_the_commit_and_in_nothing_else(result: dict[str, Any]) -> None:
    out = run_command("submit", str(result["cwd"] / "two.yaml"), *TINY, "--dry-run", cwd=result["cwd"])
    assert f"VIME_RL_KERNEL_COMMIT: {OLD} in baseline, {NEW} in enabled" in out
    assert "no other argument or variable differs between the variants" in out
    gates = {gate["name"]: gate["status"] for gate in _read_analysis(result)["gates"]}
    assert gates["manifests"] == "passed"


def _read_analysis(result: dict[str, Any]) -> Any:
    return json.loads((Path(result["bundle"]).parent / "analysis" / "analysis.json").read_text())


@pytest.mark.real
def test_a_missing_commit_is_named_before_the_first_trial(result: dict[str, Any], tmp_path: Path, call: Any) -> None:
    install(tmp_path / "commits", OLD, OLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLK_COMMITS", str(tmp_path / "commits"))
        plan = Plan.load(Path(result["bundle"]).parent / "plan.json")
        (finding,) = check_rl_kernel(make_staged_facts(plan))
        code, _, err = call("submit", write_run(tmp_path), *TINY)
    assert (finding.where, finding.level) == (f"RLK_COMMITS/{NEW}", Level.BLOCKING)
    assert code == 3
    assert f"RLK_COMMITS/{NEW}: missing, expected a folder with rl_engine/" in " ".join(err.split())


@pytest.mark.real
def test_commits_of_a_bundle_that_no_shipped_stack_pins_are_foreign_code(result: dict[str, Any]) -> None:
    plan = Plan.load(Path(result["bundle"]).parent / "plan.json")
    assert [str(item) for item in find_foreign(plan)] == [f"rl_kernel.commits {commit}" for commit in (OLD, NEW)]
    shown = list_what_runs(plan, plan.profile)
    assert "named code" not in shown
    for number, commit in enumerate((OLD, NEW), start=1):
        assert shown[f"FOREIGN {number} of 2"] == f"rl_kernel.commits {commit} (needs --trust)"


def test_a_plan_of_commits_asks_for_them_and_not_for_the_pinned_one() -> None:
    settings = ("measure.design=parallel", f"rl_kernel.commits={{baseline: {OLD}, enabled: {NEW}}}")
    plan = make_tier_plan("module-qwen3-4b", *settings, hardware="h200", stack="vime-host")
    assert "rl_kernel" not in find_pinned(plan).pins
    assert "vime" in find_pinned(plan).pins
    assert "other_design" not in plan_summary(plan)
    assert dataclasses.replace(plan, variants=("baseline",)).needs_rl_kernel


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"commits": {"baseline": OLD, "enabled": OLD}}, "rl_kernel.commits: is the same in both variants"),
        ({"mode": "auto"}, "rl_kernel.mode: allows fallbacks, so a trial might not run its commit"),
        ({"commits": {"baseline": "main", "enabled": NEW}}, "rl_kernel.commits.baseline"),
    ],
)
def test_commits_that_cannot_be_compared_are_refused_at_their_line(
    changes: dict[str, Any], message: str, tmp_path: Path, call: Any
) -> None:
    code, _, err = call("submit", write_run(tmp_path, **changes), "--dry-run")
    assert code == 2
    assert message in " ".join(err.split())


def test_sessions_cannot_compare_commits(tmp_path: Path, call: Any) -> None:
    code, _, err = call("submit", write_run(tmp_path), "--set", "measure.design=crossover", "--dry-run")
    assert code == 2
    assert "measure.design: RL-Kernel's commit cannot change within a session: a process imports one" in " ".join(
        err.split()
    )


def test_the_how_to_makes_a_run_that_is_planned(tmp_path: Path) -> None:
    page = read_section("own-changes.md", "Compare two commits of RL-Kernel")
    (block,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    copy = re.findall(r"cp (\S+) (\S+)\n", page)
    ((source, target),) = copy
    run = yaml.safe_load((ROOT / source).read_text()) | yaml.safe_load(textwrap.dedent(block))
    (tmp_path / target).write_text(yaml.safe_dump(run))
    (show,) = re.findall(r"rlk-repro (submit .* --dry-run)\n", page)
    out = run_command(*show.split(), cwd=tmp_path)
    assert "VIME_RL_KERNEL_COMMIT: 27e3695cba39c02608d86342ba51aae95235e19c in baseline" in out
    assert "no other argument or variable differs between the variants" in out
