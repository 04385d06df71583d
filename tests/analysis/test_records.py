"""No verdict rests on records that are missing, or that no honest run leaves."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlk_repro import __version__
from rlk_repro.analysis.allocations import find_misfits
from rlk_repro.analysis.analyse import analyse
from rlk_repro.analysis.gates import OWN_GPUS
from rlk_repro.base.files import load_json, write_json, write_text
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.units import format_utc, parse_utc
from rlk_repro.bundle.verify import unpack
from rlk_repro.plan import Plan
from rlk_repro.probes.code import probe_source
from rlk_repro.rundir.manifest import OTHER_RUNS
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import Analysis, Gate, GateStatus, PairStatus, TrialStatus, VerdictWord
from rlk_repro.schedule import make_schedule
from rlk_repro.sources import OURSELVES
from rlk_repro.statistics.stats import STEP_TIME
from tests import ROOT
from tests.support.job_examples import FakeWorkload, make_staged, run_example
from tests.support.make_run import Recipe, finish_run, make_run, reseal, verify_bundle
from tests.support.waiting import is_written, signal_when

SESSIONS = ROOT / "docs" / "evidence" / "qwen3-4b-random-tp2-h100.tgz"
ONE_RANK = ROOT / "docs" / "evidence" / "qwen3-4b-random-027c809-h200.tgz"
TWO_RANKS_OF_VIME = ROOT / "docs" / "evidence" / "glm4-9b-random-h200.tgz"
TWO_RANKS = ROOT / "docs" / "evidence" / "module-qwen3-4b-tp2-h200.tgz"
BASELINE, ENABLED = "00-p1-baseline", "01-p1-enabled"
GAIN = Recipe(speedup=1.2)
SMALL = Recipe(settings=(*GAIN.settings, "measure.pairs=1"))
NOT_COMPARED = "the variants were not compared; missing: "
Change = Callable[[RunDir], None]
Event = dict[str, Any]


def put(key: str, value: str) -> Change:
    """Put another number into step 3 of one trial's log."""

    def apply(run_dir: RunDir) -> None:
        log = run_dir.trial(ENABLED).stdout
        kind = "step" if key.startswith("train/") else "perf"
        pattern = rf"({kind} 3: {{.*'{re.escape(key)}': )[-+.\w]+"
        text, count = re.subn(pattern, rf"\g<1>{value}", log.read_text())
        assert count == 1
        write_text(log, text)

    return apply


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("perf/step_time", value) for value in ("-7198.3", "0", "-0.0", "nan", "inf", "1e999")),
        ("perf/train_time", "-1"),
        ("perf/actor_train_time", "nan"),
        ("perf/update_weights_time", "-0.01"),
        ("perf/actor_train_tok_per_s", "inf"),
        ("rollout/response_len/mean", "-5"),
        ("train/train_rollout_logprob_abs_diff", "-1"),
    ],
)
def test_an_impossible_number_voids_its_step(tmp_path: Path, key: str, value: str) -> None:
    analysis = analyse(make_run(tmp_path / "id", SMALL, put(key, value)))
    trial = analysis.trials[1]
    step = 1 if key.startswith("train/") else 3  # two updates per rollout
    assert (trial.status, trial.num_steps_found) == (TrialStatus.FAILED, 4)
    said = f"ended well, but only 4 of 5 steps are in its log; step {step} is void: {key} "
    assert trial.reason.startswith(said)
    assert trial.rejects == {"steps with an impossible time or another impossible number": 1}
    assert analysis.pairs[0].status is PairStatus.DROPPED
    logged = [item for item in trial.series if item.source.endswith("stdout.log")]
    assert {item.metric for item in logged if item.values[step] is not None} <= {"weight_sync_time_s"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("perf/update_weights_time", "0"),
        ("train/kl_loss", "-0.1"),
        ("train/grad_norm", "nan"),
        ("train/train_rollout_logprob_abs_diff", "nan"),
    ],
)
def test_an_ordinary_log_has_no_void_step(tmp_path: Path, key: str, value: str) -> None:
    """A phase that did not take place takes no time, and a skipped training step prints NaN."""
    trial = analyse(make_run(tmp_path / "id", SMALL, put(key, value))).trials[1]
    assert (trial.status, trial.rejects) == (TrialStatus.OK, {})


@pytest.mark.parametrize("duration_s", ["-3.5", "0", "NaN", '"3.5 s"', "1e999"])
def test_an_exit_record_with_an_impossible_duration_is_refused(tmp_path: Path, duration_s: str) -> None:
    def change(run_dir: RunDir) -> None:
        path = run_dir.trial(ENABLED).exit
        write_text(path, path.read_text().replace('"duration_s": 3.5', f'"duration_s": {duration_s}'))

    analysis = analyse(make_run(tmp_path / "id", SMALL, change))
    assert (analysis.trials[1].status, analysis.trials[1].duration_s) == (TrialStatus.INTERRUPTED, None)
    assert "exit record unreadable" in analysis.trials[1].reason
    assert analysis.pairs[0].status is PairStatus.DROPPED


@pytest.mark.parametrize("value", ["-0.1", "NaN", "1e999"])
def test_an_impossible_module_time_is_no_proof(tmp_path: Path, value: str) -> None:
    def change(run_dir: RunDir) -> None:
        path = run_dir.trial(ENABLED).ops_file(0)
        write_text(path, path.read_text().replace('"log_probs_forward":0.1', f'"log_probs_forward":{value}', 1))

    analysis = analyse(make_run(tmp_path / "id", SMALL, change))
    assert analysis.pairs[0].status is PairStatus.VOID
    assert analysis.trials[1].rejects == {"ops: not an event": 1}


def record_version(version: str, **others: str) -> Change:
    def change(run_dir: RunDir) -> None:
        path = run_dir.node("node0").manifest
        value = load_json(path)
        code = {"rlk_repro": {"version": version, **others}}
        write_json(path, {**value, "sections": {**value["sections"], "code": code}})

    return change


def forge_words(run_dir: RunDir) -> str:
    finish_run(run_dir)
    value = load_json(run_dir.analysis)
    value["gates"][4]["detail"] = "checked by an independent laboratory"
    value["verdict"]["reasons"].append("confirmed on eight machines")
    write_json(run_dir.analysis, value)
    return str(reseal(run_dir))


@pytest.mark.parametrize("is_recorded", [False, True])
def test_forged_words_of_this_version_are_refused(call, tmp_path: Path, *, is_recorded: bool) -> None:
    found = probe_source(OURSELVES, {}, {})
    code = {name: value for name, value in found.items() if isinstance(value, str)}
    change = record_version(**code) if is_recorded else None
    bundle = forge_words(make_run(tmp_path / "id", SMALL, change))
    exit_code, _, err = call("replay", bundle, "--analyze-only")
    assert (exit_code, "independent laboratory" in err) == (1, True)
    exit_code, out, _ = call("report", bundle, "-o", str(tmp_path / "out"))
    assert exit_code == 1
    assert "Records of the bundle contradict each other" in " ".join(out.split())
    page = (tmp_path / "out" / "report.md").read_text()
    assert "independent laboratory" not in page.split("## Findings")[0]


@pytest.mark.parametrize(
    "change",
    [
        record_version("0.1.0"),
        # an installed package knows no commit of its own
        record_version(__version__, package_tree="0" * 40),
    ],
)
def test_another_version_may_have_other_words_and_they_are_not_shown(call, tmp_path: Path, change: Change) -> None:
    bundle = forge_words(make_run(tmp_path / "id", SMALL, change))
    code, out, _ = call("replay", bundle, "--analyze-only")
    assert (code, "because another version of rlk-repro sealed it" in " ".join(out.split())) == (0, True)
    assert call("report", bundle, "-o", str(tmp_path / "out"))[0] == 0
    assert "independent laboratory" not in (tmp_path / "out" / "report.md").read_text()


def edit_exit(name: str, **fields: Any) -> Change:
    def apply(run_dir: RunDir) -> None:
        path = run_dir.trial(name).exit
        record = {**load_json(path), **fields}
        write_json(path, {key: value for key, value in record.items() if value is not None})

    return apply


def shift(name: str, seconds: float) -> Change:
    def apply(run_dir: RunDir) -> None:
        record = load_json(run_dir.trial(name).exit)
        later = {key: format_utc(parse_utc(record[key]) + seconds) for key in ("started_at", "ended_at")}
        edit_exit(name, **later)(run_dir)

    return apply


def merge_logs(run_dir: RunDir) -> None:
    """Merge both agents' logs, so that each allocation is known."""
    edit_exit(ENABLED, allocation="b")(run_dir)
    lines = run_dir.agent_log.read_text()
    write_text(run_dir.agent_log, lines + lines.replace('"allocation":"a"', '"allocation":"b"'))


UNKNOWN = "the agent's log has no allocation "
INCONSISTENT = "its exit record has no consistent allocation and times"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (merge_logs, "its trials ran in two allocations, a and b"),
        (edit_exit(ENABLED, allocation="other"), f"{UNKNOWN}other"),
        (lambda run_dir: run_dir.agent_log.unlink(), f"{UNKNOWN}a"),
        (lambda run_dir: write_text(run_dir.agent_log, "{}\n[]\n{\n"), f"{UNKNOWN}a"),
        (edit_exit(ENABLED, allocation=None), INCONSISTENT),
        (edit_exit(ENABLED, ended_at="soon"), INCONSISTENT),
        (edit_exit(ENABLED, duration_s=100.0), INCONSISTENT),
        (shift(ENABLED, 86400), "01-p1-enabled: ran from "),
        (shift(ENABLED, -20), "01-p1-enabled: began before 00-p1-baseline had ended"),
    ],
)
def test_a_pair_needs_one_agent_in_one_allocation(tmp_path: Path, change: Change, reason: str) -> None:
    analysis = analyse(make_run(tmp_path / "id", SMALL, change))
    assert (analysis.pairs[0].status, reason in analysis.pairs[0].reason) == (PairStatus.VOID, True)
    assert "void: p1" in analysis.verdict.headline


def test_trials_of_two_runs_in_one_bundle_are_no_pairs(call, tmp_path: Path) -> None:
    """The bundle has one run's baseline trials, and the enabled trials of another, faster run."""

    def merge(run_dir: RunDir) -> None:
        other = make_run(tmp_path / "other", GAIN)
        for trial in run_dir.trial_dirs():
            if trial.name.endswith("enabled"):
                shutil.rmtree(trial.path)
                shutil.copytree(other.trial(trial.name).path, trial.path)
                edit_exit(trial.name, allocation="b")(run_dir)

    bundle = finish_run(make_run(tmp_path / "id", Recipe(), merge))
    code, out, _ = call("report", str(bundle), "-o", str(tmp_path / "out"))
    text = " ".join(out.split()) + (tmp_path / "out" / "report.md").read_text()
    expected = ("INCONCLUSIVE", "6 of 6 planned pairs void", f"01-p1-enabled: {UNKNOWN}b")
    assert (code, [words for words in expected if words not in text]) == (0, [])


def copy_pair(run_dir: RunDir) -> None:
    for source, target in ((ENABLED, "02-p2-enabled"), (BASELINE, "03-p2-baseline")):
        shutil.rmtree(run_dir.trial(target).path)
        shutil.copytree(run_dir.trial(source).path, run_dir.trial(target).path)


def copy_times(run_dir: RunDir) -> None:
    """No clock measures one series of times twice."""
    for variant in ("baseline", "enabled"):
        first, *others = [trial for trial in run_dir.trial_dirs() if trial.name.endswith(variant)]
        for other in others:
            shutil.copy(first.stdout, other.stdout)
            shutil.copytree(first.ops, other.ops, dirs_exist_ok=True)


def test_a_copied_pair_and_its_original_are_void(tmp_path: Path) -> None:
    assert analyse(make_run(tmp_path / "honest", GAIN)).verdict.word is VerdictWord.FASTER
    analysis = analyse(make_run(tmp_path / "id", GAIN, copy_pair))
    # nothing tells the copy from the original
    assert [pair.status for pair in analysis.pairs[:3]] == [PairStatus.VOID, PairStatus.VOID, PairStatus.SCORED]
    analysis = analyse(make_run(tmp_path / "times", GAIN, copy_times))
    assert analysis.verdict.word is VerdictWord.INCONCLUSIVE
    assert "have the same step times" in {pair.status: pair.reason for pair in analysis.pairs}[PairStatus.VOID]


def test_folders_of_no_planned_trial_are_findings_up_to_a_limit(tmp_path: Path) -> None:
    def add(run_dir: RunDir) -> None:
        shutil.copytree(run_dir.trial(ENABLED).path, run_dir.trials / "12-p7-enabled")
        (run_dir.trials / "note\x1b.txt").write_text("x")

    expected = "expected only trials of the plan, found not in the plan"
    names = ("12-p7-enabled", r"note\x1b.txt")
    found = analyse(make_run(tmp_path / "id", change=add)).findings
    assert {str(item) for item in found} == {f"warning: trials/{name}: {expected}" for name in names}

    def add_many(run_dir: RunDir) -> None:
        for number in range(100):
            (run_dir.trials / f"x{number:03d}").mkdir()

    found = analyse(make_run(tmp_path / "many", change=add_many)).findings
    assert (len(found), found[-1].found.endswith("and 79 more like this")) == (21, True)


@pytest.mark.parametrize("is_killed", [False, True])
def test_pairs_of_a_run_that_was_stopped_and_resumed_fit(tmp_path: Path, *, is_killed: bool) -> None:
    """Whole pairs are kept, and half pairs run again; a killed agent may not have recorded its last trial."""
    plan, run_dir = make_staged(tmp_path / "run")
    pids = tmp_path / "pids"
    signal_when(lambda: is_written(pids), signal.SIGTERM)
    assert run_example(run_dir, FakeWorkload(by_trial={"03-p2-baseline": [f"child:{pids}", "sleep:60"]})) == 143
    if is_killed:
        lines = run_dir.agent_log.read_text().splitlines()
        known = next(number for number, line in enumerate(lines) if json.loads(line).get("trial") == ENABLED)
        write_text(run_dir.agent_log, "\n".join([*lines[:known], '{"allocation": "torn\n']))
    assert run_example(run_dir) == 0
    allocations = {load_json(run_dir.trial(trial.name).exit)["allocation"] for trial in plan.trials}
    assert len(allocations) == 2
    assert find_misfits(Plan.load(run_dir.plan), run_dir) == {}
    assert verify_bundle(run_dir.bundle) == []


# What is missing.


def gate_of(analysis: Analysis, name: str = "manifests") -> Gate:
    return next(gate for gate in analysis.gates if gate.name == name)


def strip(run_dir: RunDir) -> None:
    """Remove every record of what was started and where."""
    for trial in run_dir.trial_dirs():
        trial.command.unlink()
        trial.env.unlink()
        shutil.rmtree(trial.libraries)
    shutil.rmtree(run_dir.nodes)


def test_a_bundle_without_any_record_is_never_faster_and_its_report_says_what_is_only_planned(
    call, tmp_path: Path
) -> None:
    run_dir = make_run(tmp_path / "id", GAIN, strip)
    analysis = analyse(run_dir)
    gate = gate_of(analysis)
    assert gate.status is GateStatus.UNDECIDED
    assert gate.detail.startswith(f"{NOT_COMPARED}trials/{BASELINE}/command.json, ")
    assert [item.found for item in analysis.findings] == ["missing"] * 20 + ["missing, and 16 more like this"]
    code, out, _ = call("report", str(finish_run(run_dir)), "-o", str(tmp_path / "out"))
    assert (code, "undecided gates: manifests" in " ".join(out.split())) == (0, True)
    page = (tmp_path / "out" / "report.md").read_text()
    assert "are equal outside the declared switches" not in page
    assert "- variants differ in: planned, but not recorded: VIME_RL_KERNEL" in page
    assert "## What differs between the variants, as planned" in page


def remove(name: str) -> Change:
    return lambda run_dir: (run_dir.trial(ENABLED).path / name).unlink()


def tear(name: str, text: str) -> Change:
    return lambda run_dir: write_text(run_dir.trial(BASELINE).path / name, text)


def swap_node(run_dir: RunDir) -> None:
    """Write the manifest of a node that did not take part."""
    path = run_dir.node("node0").preflight
    write_json(path, {**load_json(path), "allocation": "another"})


@pytest.mark.parametrize(
    ("change", "where"),
    [
        *((remove(name), f"trials/{ENABLED}/{name}") for name in ("command.json", "env.json", "libraries/0.json")),
        (tear("command.json", '{"schema": 1, "argv": ["a"'), f"trials/{BASELINE}/command.json"),
        (tear("command.json", '{"schema": 1, "argv": "a"}'), f"trials/{BASELINE}/command.json"),
        (tear("env.json", '{"schema": 1}'), f"trials/{BASELINE}/env.json"),
        (tear("libraries/0.json", "[]"), f"trials/{BASELINE}/libraries/0.json"),
        (lambda run_dir: run_dir.node("node0").manifest.unlink(), "nodes: allocation a"),
        (swap_node, "nodes: allocation a"),
    ],
)
def test_every_single_record_is_needed(tmp_path: Path, change: Change, where: str) -> None:
    analysis = analyse(make_run(tmp_path / "id", SMALL, change))
    assert analysis.verdict.word is VerdictWord.INCONCLUSIVE
    assert gate_of(analysis).detail == f"{NOT_COMPARED}{where}"
    assert where in {item.where for item in analysis.findings}


def add_other_run(run_dir: RunDir, trial: str, allocation: str = "a", place: str = ".") -> None:
    """Let an agent note, in its latest record or in that of an earlier allocation, a run on the same GPUs."""
    node = run_dir.node_dirs()[0]
    path, record = node.path / place / "preflight.json", load_json(node.preflight)
    found = Finding(Level.WARNING, f"{trial}{OTHER_RUNS}", "no other run", "other runs: theirs")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**record, "allocation": allocation or record["allocation"], "findings": [found.to_json()]})


@pytest.mark.parametrize("place", [".", "earlier/1"])
def test_of_pairs_beside_another_run_the_rewards_stand_and_the_times_do_not(tmp_path: Path, place: str) -> None:
    analysis = analyse(make_run(tmp_path / "id", GAIN, lambda it: add_other_run(it, f"{ENABLED}: ", place=place)))
    gate = gate_of(analysis, OWN_GPUS)
    told = "the times of p1 do not count, because another run could use the same GPUs"
    assert (gate.status, gate.detail) == (GateStatus.UNDECIDED, told)
    assert (analysis.verdict.word, analysis.effects[0].n, analysis.effects[0].metric) == ("inconclusive", 5, STEP_TIME)
    assert gate_of(analysis, "raw_reward").n == 6


@pytest.mark.parametrize(
    ("trial", "allocation"), [(f"{ENABLED}: ", "b"), ("07-p9-enabled: ", "a"), ("", "a")], ids=["gone", "other", "none"]
)
def test_another_run_at_another_time_disturbs_nothing(tmp_path: Path, trial: str, allocation: str) -> None:
    analysis = analyse(make_run(tmp_path / "id", GAIN, lambda it: add_other_run(it, trial, allocation, "earlier/1")))
    assert (analysis.verdict.word, OWN_GPUS in {gate.name for gate in analysis.gates}) == ("faster", False)


def test_sessions_and_pairs_of_stored_rollouts_beside_another_run_are_void(tmp_path: Path) -> None:
    recipe = Recipe(settings=(*GAIN.settings, "lane=train-only"), speedup=1.2)
    of_pairs = make_run(tmp_path / "id", recipe, lambda it: add_other_run(it, f"{ENABLED}: "))
    of_sessions = unpack(ONE_RANK, tmp_path / "sessions")
    add_other_run(of_sessions, "00-s1-crossover: ", allocation="")
    for analysis, trial in ((analyse(of_pairs), ENABLED), (analyse(of_sessions), "00-s1-crossover")):
        void = [pair for pair in analysis.pairs if pair.status is PairStatus.VOID]
        assert [pair.reason for pair in void] == [f"another run could use the same GPUs during {trial}"]


def test_a_pair_that_is_not_scored_needs_no_record(tmp_path: Path) -> None:
    recipe = Recipe(speedup=1.2, failed={ENABLED: "failed"})
    analysis = analyse(make_run(tmp_path / "id", recipe, remove("command.json")))
    assert gate_of(analysis).status is GateStatus.PASSED


def edit_rank(run_dir: RunDir, rank: int, change: Callable[[Event], Event | None]) -> RunDir:
    """Change or leave out events in the ops files of one rank."""
    for trial in run_dir.trial_dirs():
        path = trial.ops_file(rank)
        events = [change(json.loads(line)) for line in path.read_text().splitlines()]
        path.write_text("".join(f"{json.dumps(event)}\n" for event in events if event is not None))
    return run_dir


def without(event: Event, *keys: str) -> Event:
    return {key: value for key, value in event.items() if key not in keys}


def without_one(event: Event) -> Event:
    return {**event, "counts": without(event["counts"], "compilations")} if "counts" in event else event


def without_comparison(event: Event) -> Event | None:
    return None if event["event"] == "shadow" else event


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("blocks", lambda event: without(event, "counts"), "has no counts of compilations"),
        ("blocks", without_one, "has no counts of compilations"),
        ("sessions", lambda event: without(event, "calls"), "called on 1 of 2 ranks in step"),
        ("same_numbers", without_comparison, "no comparison"),
    ],
)
def test_records_of_every_rank_are_needed(tmp_path: Path, name: str, change: Any, words: str, rank: int) -> None:
    """Proof, calls, counts and comparisons are conditions of each rank."""
    analysis = analyse(edit_rank(unpack(SESSIONS, tmp_path / "sessions"), rank, change))
    gate = gate_of(analysis, name)
    assert (analysis.verdict.word, gate.status) == (VerdictWord.INCONCLUSIVE, GateStatus.UNDECIDED)
    assert words in gate.detail + analysis.pairs[0].reason


def test_libraries_and_kernels_of_every_rank_are_needed_and_compared(tmp_path: Path) -> None:
    two_ranks = unpack(TWO_RANKS, tmp_path / "two-ranks")
    assert analyse(two_ranks).verdict.word is VerdictWord.FASTER
    path = two_ranks.trial(BASELINE).libraries_file(1)
    libraries = load_json(path)
    path.unlink()
    analysis = analyse(two_ranks)
    assert analysis.verdict.word is VerdictWord.INCONCLUSIVE
    assert gate_of(analysis).detail == f"{NOT_COMPARED}trials/{BASELINE}/libraries/1.json"
    write_json(path, {**libraries, "torch": "another"})
    analysis = analyse(two_ranks)
    assert analysis.verdict.word is VerdictWord.NOT_COMPARABLE
    assert "p1.libraries.1.torch" in {item.where for item in analysis.findings}
    write_json(path, libraries)
    edit_rank(two_ranks, 1, lambda event: None if event["event"] == "kernels" else event)
    analysis = analyse(two_ranks)
    assert analysis.verdict.word is VerdictWord.INCONCLUSIVE
    assert all("ops/1.jsonl: has no list of kernels" in trial.proof_reason for trial in analysis.trials)


def test_a_switch_in_one_trial_of_a_control_pair_is_a_difference(tmp_path: Path) -> None:
    def switch_on(run_dir: RunDir) -> None:
        path = min(run_dir.trials.glob("*-c1-baseline/env.json"))
        value = load_json(path)
        write_json(path, {**value, "env": {**value["env"], "VIME_RL_KERNEL": "1"}})

    recipe = Recipe(speedup=1.2, settings=(*GAIN.settings, "measure.control_pairs=1"))
    analysis = analyse(make_run(tmp_path / "id", recipe, switch_on))
    assert analysis.verdict.word is VerdictWord.NOT_COMPARABLE
    found = [(item.where, item.expected, item.found) for item in analysis.findings if item.level is Level.BLOCKING]
    assert found == [("c1.environment.VIME_RL_KERNEL", "1", "not set")]


def find_scored(run_dir: RunDir, variant: str) -> int:
    """A scored step of the first comparison block of the first session."""
    plan = Plan.load(run_dir.plan)
    schedule = make_schedule(plan.run.measure, plan.trials[0].seed)
    block = next(number for number, item in enumerate(schedule.blocks) if not item.is_control)
    steps = schedule.steps_of_blocks[block]
    return next(step for step in steps if schedule.is_scored(step) and schedule.variant_of(step) == variant)


CALLS = {"logp": {"calls": 1, "tokens": 9, "fallbacks": 0}}


@pytest.mark.parametrize(
    ("variant", "change", "reason"),
    [
        ("enabled", {"variant": "baseline"}, "step {} is planned as enabled and recorded as baseline"),
        ("baseline", {"variant": None}, "step {} is planned as baseline and recorded as neither variant"),
        ("enabled", None, "step {} is planned as enabled and recorded as neither variant"),
        ("enabled", {"calls": {}}, "never called in step {}"),
        ("baseline", {"calls": CALLS}, "called in step {}, which is baseline"),
        ("baseline", {"counts": {"compilations": 2}}, "2 compilations in step {}, which is scored"),
        ("enabled", {"counts": {"kernel_compilations": 1}}, "1 kernel compilation in step {}, which is scored"),
    ],
)
def test_one_wrong_step_voids_its_block_by_name(
    tmp_path: Path, variant: str, change: Event | None, reason: str
) -> None:
    run_dir = unpack(ONE_RANK, tmp_path / "sessions")
    step = find_scored(run_dir, variant)
    path = run_dir.trial("00-s1-crossover").ops_file(0)
    events = []
    for event in map(json.loads, path.read_text().splitlines()):
        if (event["event"], event.get("step")) != ("step", step):
            events.append(event)
        elif change is not None:
            events.append({**event, **{key: change[key] for key in change if key != "counts"}})
            events[-1]["counts"] |= change.get("counts", {})
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    analysis = analyse(run_dir)
    assert [block.reason for block in analysis.blocks if block.reason] == [reason.format(step)]
    assert reason.format(step) in gate_of(analysis, "blocks").detail
    assert {pair.status for pair in analysis.pairs} == {PairStatus.SCORED}


# What ranks record of their routers; layers that are DENSE have none.
WHOLE = {"routers": 12, "routers_replayed": 12}
ONE_NOT = {"routers": 12, "routers_replayed": 11}
DENSE = {"routers": 0, "routers_replayed": 0}


@pytest.mark.parametrize(
    ("counts", "fact", "reason"),
    [
        ((WHOLE, WHOLE), "all 12 of a GPU, in each step that counts", ""),
        ((DENSE, WHOLE), "all 12 of a GPU, in each step that counts", ""),
        ((WHOLE, {}), "", "step N, which is scored, has no counts of routers"),
        (({"routers": 12}, WHOLE), "", "step N, which is scored, has no counts of routers"),
        ((ONE_NOT, ONE_NOT), "", "rank 0: 11 of 12 routers replayed the rollout's"),
    ],
)
def test_every_rank_shows_that_its_routers_replayed_the_rollouts_experts(
    tmp_path: Path, counts: Sequence[dict[str, int]], fact: str, reason: str
) -> None:
    run_dir = unpack(TWO_RANKS_OF_VIME, tmp_path / "sessions")
    for folder in run_dir.trials.iterdir():
        for rank, more in enumerate(counts):
            path = run_dir.trial(folder.name).ops_file(rank)
            added = json.dumps(more)[1:-1] + "," if more else ""
            path.write_text(path.read_text().replace('"counts":{', f'"counts":{{{added}'))
    analysis = analyse(run_dir)
    assert analysis.facts.get("routers that replay the rollout's experts (R3)", "") == fact
    for block in analysis.blocks:
        found = re.sub("step [0-9]+", "step N", block.reason)
        assert found.startswith(reason)
        assert bool(found) is bool(reason)


def test_a_fallback_a_killed_session_and_a_missing_step_time_void_or_drop_their_sessions(tmp_path: Path) -> None:
    run_dir = unpack(ONE_RANK, tmp_path / "sessions")
    first, second, third = (run_dir.trial(f"0{number}-s{number + 1}-crossover") for number in range(3))
    ops = first.ops_file(0)
    ops.write_text(ops.read_text().replace('"fallbacks":0', '"fallbacks":1', 1))
    write_json(second.exit, {**load_json(second.exit), "status": "interrupted", "reason": "killed"})
    lines = third.stdout.read_text().splitlines(keepends=True)
    third.stdout.write_text("".join(line for line in lines if " perf 9:" not in line))
    analysis = analyse(run_dir)
    assert [pair.status for pair in analysis.pairs[:3]] == [PairStatus.VOID, PairStatus.DROPPED, PairStatus.DROPPED]
    assert "1 calls fell back" in analysis.pairs[0].reason
    assert analysis.trials[2].status is TrialStatus.INTERRUPTED
    assert analysis.trials[4].reason.startswith("ended well, but only ")
    assert not {block.session for block in analysis.blocks} & {"s2", "s3"}
