"""Whole runs of the real trainer, from submission to replay, for all that a run can compare."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlk_repro.agent.preflight.host import check_rl_kernel
from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.files import load_json
from rlk_repro.base.findings import Level
from rlk_repro.bundle.verify import open_verified
from rlk_repro.images.running import find_pinned
from rlk_repro.plan import Plan
from rlk_repro.rundir.differences import Kind
from rlk_repro.rundir.paths import RunDir, runs_root
from rlk_repro.rundir.results import PairStatus, ProofStatus
from rlk_repro.spec.agreement import parse_contract
from rlk_repro.submit.consent import find_foreign, list_what_runs
from rlk_repro.workloads import WORKLOADS
from rlk_repro.workloads.differences import read_differences
from rlk_repro.workloads.environment import find_foreign_switch, resolve_env
from tests import ROOT, SUPPORT
from tests.cli.test_answers import KEYS, check
from tests.conftest import WEIRD_NAMES
from tests.support.job_examples import make_staged_facts
from tests.support.run_plans import make_tier_plan, read_section

Call = Callable[..., tuple[int, str, str]]
GRPO = "workload.grpo"
TINY = ("--set", f"{GRPO}.rollout_batch_size=2", "--set", f"{GRPO}.n_samples_per_prompt=2")
MEASURE = {"pairs": 1, "warmup_steps": 1, "scored_steps": 2}
SWITCH = {"title": "a tree", "baseline": {"NCCL_ALGO": "Ring"}, "enabled": {"NCCL_ALGO": "Tree"}}
OLD, NEW = "1a" * 20, "2b" * 20


def rlk_repro(*arguments: str, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RLK_REPRO_RUNS": str(cwd / "runs")}
    environment["XDG_STATE_HOME"] = str(cwd / "state")
    argv = [sys.executable, "-m", "rlk_repro", *arguments]
    done = subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def submit(*arguments: str, cwd: Path) -> tuple[RunDir, Any]:
    """Run to the end; the run directory and its analysis."""
    answer = json.loads(rlk_repro("submit", *arguments, "--wait", "--json", cwd=cwd))
    assert set(answer) in KEYS["submit"]
    run_dir = RunDir((cwd / answer["bundle"]).parent)
    return run_dir, load_json(run_dir.analysis)


def write_run(folder: Path, name: str = "smoke", **changes: Any) -> str:
    run = yaml.safe_load((ROOT / "jobs" / f"{name}.yaml").read_text())
    run |= {"run": "own", "measure": MEASURE, **changes}
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(run))))
    return str(path)


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, Any]:
    cwd = tmp_path_factory.mktemp("road") / f"{WEIRD_NAMES[1]} {WEIRD_NAMES[3]} ünï"
    cwd.mkdir()
    return submit(write_run(cwd), *TINY, cwd=cwd)


@pytest.fixture
def at_home(sealed: tuple[RunDir, Any], monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Commands of this process stand where the run was submitted."""
    run_dir = sealed[0]
    cwd = run_dir.root.parents[2]
    monkeypatch.chdir(cwd)
    monkeypatch.setenv("RLK_REPRO_RUNS", str(cwd / "runs"))
    monkeypatch.setenv("XDG_STATE_HOME", str(cwd / "state"))
    return run_dir


def test_submit_ends_with_a_sealed_bundle_and_a_report(at_home: RunDir, call: Call) -> None:
    code, out, _ = call("report")
    assert code == 0
    # The second headline follows make demo-rl-kernel, which leaves RL-Kernel in this environment.
    assert any(words in out for words in ("never ran RL-Kernel", "ran as plain PyTorch"))
    assert "every file matches the seal" in call("verify", str(at_home.bundle))[1]
    assert not Path("pwned").exists()


def test_no_folder_of_the_machine_is_in_the_bundle(at_home: RunDir) -> None:
    places = [str(Path.cwd()), sys.prefix, sys.base_prefix, sys.executable, f"{Path.home()}/"]
    with open_verified(at_home.bundle) as (run_dir, _):
        for path in filter(Path.is_file, run_dir.root.rglob("*")):
            text = path.read_text(errors="replace")
            assert [place for place in places if place in text] == [], path
        command = load_json(run_dir.trial("00-p1-baseline").command)
    assert command["argv"][:3] == ["{python}", "-m", "rlk_repro.refengine"]


def test_both_variants_printed_the_same_losses_from_one_seed(sealed: tuple[RunDir, Any]) -> None:
    losses = []
    for trial in sealed[1]["trials"]:
        losses += [item["values"] for item in trial["series"] if item["metric"] == "loss"]
    baseline, enabled = losses
    assert baseline == enabled


def test_answers_about_a_submission_have_the_keys_of_the_table(at_home: RunDir, call: Call) -> None:
    assert call("status", "--watch", at_home.run_id)[0] == 0
    for line in ("status", "logs", "cancel", "collect", "runs list --submitted"):
        check(call, line)


def test_a_full_replay_on_the_same_machine_is_bitwise(at_home: RunDir, call: Call) -> None:
    shutil.copy(at_home.bundle, "copy.tgz")
    assert check(call, "replay copy.tgz --yes")["level"] == "bitwise"


# A user's own switch compares variables or checkouts, with the same gates and no proof.


def make_switch(name: str, baseline: Any, enabled: Any) -> dict[str, Any]:
    return {"title": "mine", "baseline": {name: baseline}, "enabled": {name: enabled}}


def test_two_checkouts_are_imported_recorded_and_named(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("old", "new")]
    for folder in folders:
        (folder / "vime").mkdir(parents=True)
        (folder / "vime" / "__init__.py").write_text(f"raise ImportError({folder.name!r})\n")
    run_dir, analysis = submit(
        write_run(tmp_path, switch=make_switch("VIME_SRC", *map(str, folders))), *TINY, cwd=tmp_path
    )
    assert {trial["proof"] for trial in analysis["trials"]} == {ProofStatus.NOT_REQUESTED.value}
    assert {pair["status"] for pair in analysis["pairs"]} == {PairStatus.SCORED.value}
    told = [item["status"] for item in analysis["gates"] if "neither uses RL-K" in item["detail"]]
    assert (analysis["switch"], told) == ("mine", ["n/a"])
    plan = Plan.load(run_dir.plan)
    for trial, folder in zip(plan.pairs()["p1"], folders, strict=True):
        command = WORKLOADS["reference"].trainer_command(plan, trial, RunDir(tmp_path))
        env = resolve_env(command, {"PYTHONPATH": "/other"})
        assert env["PYTHONPATH"] == f"{folder}{os.pathsep}/other"
    assert "VIME_SRC" in rlk_repro("report", str(run_dir.bundle), "-o", "r", cwd=tmp_path)
    # for another person, this bundle's switch is not on the list of variables that a run may set
    assert next(str(problem) for problem in find_foreign_switch(plan)).startswith(
        "run own: switch.baseline.VIME_SRC: a run may not set this variable"
    )
    for number, trial in enumerate(plan.trials):
        loaded = {"packages": {}, "sources": {"vime": f"tree {number}"}}
        run_dir.trial(trial.name).libraries_file(0).write_text(json.dumps(loaded))
    found = read_differences(plan, run_dir)
    assert found is not None
    assert ("sources.vime", Kind.SWITCH) in {(item.name, item.kind) for item in found}


def test_a_session_measures_what_the_record_of_tokens_costs(tmp_path: Path) -> None:
    measure = {"design": "crossover", "sessions": 1, "blocks": 1, "control_blocks": 0}
    switch = make_switch("RLK_REPRO_AGREEMENT_RECORD", "0", "1")
    run = write_run(tmp_path, switch=switch, measure=measure)
    run_dir, analysis = submit(run, *TINY, cwd=tmp_path)
    (session,) = analysis["pairs"]
    assert (session["status"], session["reason"]) == (PairStatus.SCORED.value, "")
    file = next(run_dir.root.glob("trials/*/ops/0.jsonl"))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [(line["variant"], "agreement" in line) for line in lines if line["event"] == "step"]
    assert set(steps) == {("baseline", False), ("enabled", True)}
    for line in lines:
        line.pop("agreement", None)
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (damaged,) = analyse(run_dir).pairs
    assert (damaged.status, "has no record of tokens" in damaged.reason) == (PairStatus.VOID, True)


def test_the_demo_finds_the_wait_that_it_plants(tmp_path: Path) -> None:
    _, analysis = submit("demo", "--sessions", "1", "--exploratory", cwd=tmp_path)
    assert [pair["status"] for pair in analysis["pairs"]] == [PairStatus.SCORED.value]
    ratios = {effect["metric"]: effect["ratio"] for effect in analysis["effects"]}
    # the wait is half of the time in training; bounds for machines that do other work too
    assert 0.2 < ratios["train_time_s"] < 0.9


COMMITS = {"mode": "require", "ops": ["logp"], "commits": {"baseline": OLD, "enabled": NEW}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"switch": SWITCH, "measure": {"design": "crossover"}},
            "measure.design: the switch cannot change within a session: a process reads its var",
        ),
        ({"switch": {**SWITCH, "baseline": {"NCCL_PROTO": "LL"}}}, "enabled.NCCL_PROTO: missing"),
        ({"switch": {**SWITCH, "baseline": SWITCH["enabled"]}}, "switch: is the same in both"),
        ({"switch": {**SWITCH, "enabled": {"NCCL_ALGO": 1}}}, "enabled.NCCL_ALGO: is not a text"),
        ({"switch": make_switch("VIME_RL_KERNEL", "0", "1")}, "KERNEL: is set by the launcher"),
        ({"switch": make_switch("--micro-batch-sise", 1, 2)}, "sise: is no flag that may differ"),
        (
            {"rl_kernel": {**COMMITS, "commits": {"baseline": OLD, "enabled": OLD}}},
            "rl_kernel.commits: is the same in both variants",
        ),
        ({"rl_kernel": {**COMMITS, "mode": "auto"}}, "rl_kernel.mode: allows fallbacks, so a"),
        ({"rl_kernel": {**COMMITS, "commits": {"baseline": "main", "enabled": NEW}}}, "wrong value"),
        (
            {"rl_kernel": COMMITS, "measure": {"design": "crossover"}},
            "measure.design: RL-Kernel's commit cannot change within a session: a process imports one",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_at_its_line(
    changes: dict[str, Any], message: str, tmp_path: Path, call: Call
) -> None:
    code, _, err = call("submit", write_run(tmp_path, **changes), "--dry-run")
    assert (code, message in " ".join(err.split())) == (2, True), err


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("LD_PRELOAD", ("/a b.so", "/c.so"), "LD_PRELOAD: /a b.so in baseline, /c.so in enabled"),
        ("--data-pad-size-multiplier", (128, 512), "multiplier: 128 in baseline, 512 in enabled"),
        ("--overlap-grad-reduce", (False, True), "reduce: not set in baseline, given in enabled"),
        ("--overlap-grad-redoce", (False, True), "--overlap-grad-redoce: is unknown to vime"),
        ("--data-pad-size-multiplier", ("few", "many"), "has a value of the wrong type"),
        ("--eval-interval", (1, 2), "switch.--eval-interval: evaluates between steps"),
        ("--seed", (1, 2), "switch.--seed: follows from other settings"),
    ],
)
def test_any_variable_and_any_flag_of_vime_may_be_the_switch(
    name: str, values: tuple[Any, Any], told: str, tmp_path: Path, call: Call
) -> None:
    run = write_run(tmp_path, "vime-smoke", switch=make_switch(name, *values))
    code, out, err = call("submit", run, "--hardware", "h200", "--stack", "vime-host", "--dry-run")
    assert told in " ".join((out + err).split())
    assert ("no other argument or variable differs between the variants" in out) == (code == 0)
    assert "VIME_RL_KERNEL" not in out


@pytest.mark.parametrize(
    ("title", "told"),
    [
        ("Compare a switch of your own", "--micro-batch-size: 128 in baseline, 16 in enabled"),
        ("Compare two commits of RL-Kernel",
         "VIME_RL_KERNEL_COMMIT: 27e3695cba39c02608d86342ba51aae95235e19c in baseline"),
    ],
)  # fmt: skip
def test_the_how_to_makes_a_run_that_is_planned(
    title: str, told: str, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = read_section("own-changes.md", title)
    (block,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    ((source, target),) = re.findall(r"cp (\S+) (\S+)\n", page)
    run = yaml.safe_load((ROOT / source).read_text()) | yaml.safe_load(textwrap.dedent(block))
    (tmp_path / target).write_text(yaml.safe_dump(run))
    (show,) = re.findall(r"rlk-repro (submit .* --dry-run)\n", page)
    monkeypatch.chdir(tmp_path)
    out = call(*show.split())[1]
    assert told in out
    assert "no other argument or variable differs between the variants" in out


# Two commits of RL-Kernel in real processes; each trial imports its own and proves which.


def install(parent: Path, commit: str) -> None:
    """Write what pip leaves: the package, and a record of its origin."""
    folder = parent / commit
    shutil.copytree(SUPPORT / "fake_rl_engine" / "rl_engine", folder / "rl_engine")
    info = folder / "rl_kernel-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: RL-Kernel\nVersion: 0.1.0\n")
    origin = {"vcs_info": {"vcs": "git", "commit_id": commit}}
    (info / "direct_url.json").write_text(json.dumps(origin))


@pytest.mark.real
def test_each_trial_runs_its_commit(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for commit in (OLD, NEW):
        install(tmp_path / "commits", commit)
    monkeypatch.setenv("RLK_COMMITS", str(tmp_path / "commits"))
    run = write_run(tmp_path, rl_kernel={**COMMITS, "ops": ["logp", "ratio_kl"]})
    run_dir, analysis = submit(run, *TINY, cwd=tmp_path)
    assert {trial["proof"] for trial in analysis["trials"]} == {ProofStatus.NATIVE.value}
    assert {pair["status"] for pair in analysis["pairs"]} == {PairStatus.SCORED.value}
    assert {gate["name"]: gate["status"] for gate in analysis["gates"]}["manifests"] == "passed"
    plan = Plan.load(run_dir.plan)
    for trial, commit in zip(plan.trials, (OLD, NEW), strict=True):
        lines = map(json.loads, run_dir.trial(trial.name).ops_file(0).read_text().splitlines())
        versions = {line["version"] for line in lines if line["event"] == "decision"}
        assert versions
        assert all(version.startswith(f"0.1.0 at {commit[:12]} ") for version in versions)
    out = call("submit", run, *TINY, "--dry-run")[1]
    assert f"VIME_RL_KERNEL_COMMIT: {OLD} in baseline, {NEW} in enabled" in out
    assert "no other argument or variable differs between the variants" in out
    shown = list_what_runs(plan, plan.profile)
    assert "named code" not in shown
    assert [item.value for item in find_foreign(plan)] == [OLD, NEW]
    assert shown["FOREIGN 2 of 2"] == f"rl_kernel.commits {NEW} (needs --trust)"

    shutil.rmtree(tmp_path / "commits" / NEW)
    (finding,) = check_rl_kernel(make_staged_facts(plan))
    assert (finding.where, finding.level) == (f"RLK_COMMITS/{NEW}", Level.BLOCKING)
    code, _, err = call("submit", run, *TINY)
    assert (code, f"RLK_COMMITS/{NEW}: missing" in err) == (3, True)


def test_a_plan_of_commits_asks_for_them_and_not_for_the_pinned_one() -> None:
    settings = ("measure.design=parallel", f"rl_kernel.commits={{baseline: {OLD}, enabled: {NEW}}}")
    plan = make_tier_plan("module-qwen3-4b", *settings, hardware="h200", stack="vime-host")
    assert "rl_kernel" not in find_pinned(plan).pins
    assert "vime" in find_pinned(plan).pins
    assert dataclasses.replace(plan, variants=("baseline",)).needs_rl_kernel


# ``agreement`` compares engines: sealed, read elsewhere, judged by the contract.


def test_the_engines_of_a_sealed_run_agree_here_and_elsewhere(call: Call, tmp_path: Path) -> None:
    code, _, error = call("submit", "agreement-smoke", "--cluster", "local", "--wait")
    assert code == 0, error
    elsewhere = str(tmp_path / "elsewhere.tgz")
    shutil.copy(next(runs_root().glob("agreement-smoke/*/bundle.tgz")), elsewhere)
    code, told, error = call("agreement", elsewhere, "--fail-on", "outside")
    assert (code, error) == (0, "")
    assert told.splitlines()[0].endswith("could not be measured")
    assert "Whether engines agree" in told
    answer = json.loads(call("agreement", elsewhere, "--json")[1])
    checks = answer["checks"]
    assert answer["is_other_contract"] is False
    assert {item["word"] for item in checks} == {"pass", "not measured"}
    assert {item["variant"] for item in checks} == {"baseline", "enabled", "both"}
    assert call("agreement", elsewhere, "--fail-on", "not-measured")[0] == 1

    result = json.loads(call("replay", elsewhere, "--analyze-only", "--json")[1])
    assert result["headline"] == f"engines agree within the contract: {answer['summary']}"
    out = call("diff", elsewhere, elsewhere)[1]
    assert f"engines: 0 of {len(checks)} checks changed their result" in out
    assert call("report", elsewhere, "-o", str(tmp_path / "report"))[0] == 0
    page = next((tmp_path / "report").glob("*.html")).read_text()
    assert "an agreement run measures no time" in page
    assert 'id="effects"' not in page
    assert call("index", elsewhere, "-o", str(tmp_path / "site"))[0] == 0
    assert "pass: " in (tmp_path / "site" / "index.html").read_text()


def test_stored_rollouts_record_the_weights_of_training_and_another_contract_is_told(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, error = call("submit", "agreement-smoke", "--wait", "--lane", "train-only")
    assert code == 0, error
    run_dir = next(runs_root().glob("agreement-smoke/*/plan.json")).parent
    assert len(list(run_dir.glob("rollouts/1234/*.pt"))) == 2
    for path in run_dir.glob("trials/*/engines/0.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert {line["engine"] for line in lines if line["event"] == "weights"} == {"training"}
    told = "the bundle records another contract than this version's"
    assert told not in call("agreement", str(run_dir))[1]
    shipped = parse_contract("agreement.yaml", "bounds: []")
    monkeypatch.setattr("rlk_repro.analysis.checks.load_contract", lambda: shipped)
    code, out, _ = call("agreement", str(run_dir))
    assert (code, told in out) == (1, True)
    assert call("replay", str(run_dir), "--analyze-only")[0] == 1


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        (("--pairs", "6"), "measure.pairs: a run with what_for: agreement measures no time"),
        (
            ("--set", "measure.design=crossover", "--set", "measure.warmup_steps=2", "--exploratory"),
            "measure.design: a run with what_for: agreement measures no time",
        ),
    ],
)
def test_agreement_needs_few_pairs(call: Call, settings: tuple[str, ...], found: str) -> None:
    code, _, error = call("submit", "agreement-smoke", "--cluster", "local", "--dry-run", *settings)
    assert (code, found in error) == (2, True), error
