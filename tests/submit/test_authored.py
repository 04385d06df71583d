"""A plan whose rules come neither from the author's files nor from recorded flags is found."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.files import load_json, write_json, write_text
from rlk_repro.base.resources import profile_folders
from rlk_repro.base.yamlfile import MAX_BYTES
from rlk_repro.bundle import seal
from rlk_repro.bundle.archive import ArchiveReader
from rlk_repro.clusters.api import Job
from rlk_repro.plan import Plan, make_plan, make_record
from rlk_repro.replay.steps import prepare, reanalyse
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import Margins, Measure
from rlk_repro.spec.load import load_hardware, load_profile, load_run, load_stack, parse_overrides
from rlk_repro.submit.authored import describe_rule_changes, find_flags, find_rewritten, list_overrides
from rlk_repro.submit.stage import AuthorFiles, stage
from tests.security.hostile import edit
from tests.support.make_run import Recipe, finish_run, make_run

WIDE = Margins(raw_reward=1e12, logprob_abs_diff_ratio=1e12, peak_memory_ratio=1e12, response_length_pct=1e12)


def rewrite(run_dir: RunDir, sources: dict[str, str] | None = None, **rules: Any) -> None:
    """Write other measurement rules, with hashes that fit them."""
    plan = Plan.load(run_dir.plan)
    measure = plan.run.measure.model_copy(update=rules)
    run = plan.run.model_copy(update={"measure": measure})
    plan = dataclasses.replace(plan, run=run, sources={**plan.sources, **(sources or {})})
    write_json(run_dir.plan, make_record(plan, run_dir.run_id))


def test_rewritten_rules_are_found_by_report_and_replay(call, tmp_path: Path) -> None:
    def change(run_dir: RunDir) -> None:
        rewrite(run_dir, alpha=0.49, margins=WIDE)

    bundle = finish_run(make_run(tmp_path / "id", Recipe(reward_drop=0.2, speedup=1.2), change))
    code, out, _ = call("report", str(bundle), "-o", str(tmp_path / "out"))
    text = " ".join(out.split())
    expected = (
        "Records of the bundle contradict each other",
        "plan.json: run.measure.alpha: expected 0.05, found 0.49",
        "alpha 0.49 instead of 0.05",
        "margins.raw_reward 1e+12 instead of 0.05",
    )
    assert (code, [words for words in expected if words not in text]) == (1, [])
    for page in ("report.md", "report.html"):
        assert "alpha 0.49 instead of 0.05" in (tmp_path / "out" / page).read_text()
    code, _, err = call("replay", str(bundle), "--analyze-only")
    assert code == 1
    assert "plan.json: run.measure.alpha" in err


def test_a_flag_that_is_invented_for_it_makes_the_plan_exploratory_or_is_found(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "id")
    submit(run_dir)
    rewrite(run_dir, sources={"measure.alpha": "--set measure.alpha"}, alpha=0.49)
    (found,) = find_rewritten(Plan.load(run_dir.plan), run_dir)
    assert found.where == "plan.json: --set measure.alpha"
    assert found.expected == "a plan that is marked exploratory"


def test_rules_are_compared_with_the_shipped_run_or_with_the_defaults(tmp_path: Path) -> None:
    plan = submit(RunDir(tmp_path / "id"))
    rules = plan.run.measure.model_copy(update={"alpha": 0.49})
    own = Measure(scored_steps=20, alpha=0.49)
    texts = []
    for changes in ({}, {"measure": rules}, {"measure": own, "run": "my-own"}):
        run = plan.run.model_copy(update=changes)
        texts.append(describe_rule_changes(dataclasses.replace(plan, run=run)))
    change, unknown = "alpha 0.49 instead of 0.05.", "rlk-repro ships no run named my-own"
    assert texts == [
        "",
        f"Measurement rules differ from the shipped run smoke: {change}",
        f"Measurement rules differ from the defaults ({unknown}): {change}",
    ]


@pytest.mark.parametrize(
    ("part", "text"),
    [("run.yaml", None), ("stack.yaml", "{"), ("hardware.yaml", "schema: 1\n"),
     ("profile.yaml", "&a [*a]"), ("run.yaml", "[" * 2000)],
)  # fmt: skip
def test_an_authors_file_of_another_kind_is_found(tmp_path: Path, part: str, text: str | None) -> None:
    run_dir = RunDir(tmp_path / "id")
    submit(run_dir)
    (run_dir.root / part).unlink()
    if text is not None:
        write_text(run_dir.root / part, text)
    assert {item.where.partition(":")[0] for item in find_rewritten(Plan.load(run_dir.plan), run_dir)} == {part}


@pytest.mark.parametrize(
    ("place", "where"),
    [("experiment.stack.stack", "stack.stack"), ("experiment.hardware.title", "hardware.title"),
     ("profile.profile", "profile.profile")],
)  # fmt: skip
def test_every_file_is_compared_with_the_plan(tmp_path: Path, place: str, where: str) -> None:
    run_dir = RunDir(tmp_path / "id")
    submit(run_dir)
    edit("plan.json", {place: "another"})(run_dir)
    assert [item.where for item in find_rewritten(rehash(load_json(run_dir.plan)), run_dir)] == [f"plan.json: {where}"]


def rehash(record: Any) -> Plan:
    """The plan of a record whose hashes are not those of its content."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlk_repro.plan._check_record", lambda *_: None)
        return Plan.from_json(record)


def submit(
    run_dir: RunDir, *settings: str, name: str = "smoke", stack_name: str = "host", is_exploratory: bool = False
) -> Plan:
    """Plan and stage a shipped run as ``submit`` does."""
    overrides = parse_overrides(settings)
    run = load_run(name, overrides)
    stack, hardware = load_stack(stack_name), load_hardware("h200")
    profile = load_profile("local", profile_folders("local"))
    plan = make_plan(run=run, stack=stack, hardware=hardware, profile=profile, overrides=overrides,
                     is_exploratory=is_exploratory)  # fmt: skip
    inputs = AuthorFiles(run=run.data, stack=stack.data, hardware=hardware.data, profile=profile.data)
    stage(plan, inputs, run_dir, Job(files={"command.json": "{}\n"}, command=("true",)))
    return Plan.load(run_dir.plan)


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("measure.pairs=8", "time_limit_min=7", "rl_kernel.ops=[logp]"),
        ("layouts={h200: {gpus_per_node: 1}}", "expected_trial_minutes={h200: 1}"),
        ("layouts.h200={gpus_per_node: 1}", "expected_trial_minutes={}"),
        ("measure={pairs: 3, scored_steps: 4}",),
        ('purpose="It is \U0001f600, `x` and $(x)"', "measure.pairs=9"),
        ("measure.margins={raw_reward: 0.5}", "measure.margins.peak_memory_ratio=1.5"),
    ],
)
def test_an_honest_plan_is_what_its_files_and_flags_give(tmp_path: Path, settings: tuple[str, ...]) -> None:
    run_dir = RunDir(tmp_path / "id")
    plan = submit(run_dir, *settings, is_exploratory=True)
    assert find_rewritten(plan, run_dir) == []
    found = find_flags(plan)
    assert found is not None
    flags = shlex.split(" ".join(found))
    again = parse_overrides([flag for flag in flags if "=" in flag] + [f"measure.pairs={plan.run.measure.pairs}"])
    assert load_run("smoke", again).model == plan.run
    assert flags.count("--exploratory") == plan.is_exploratory
    assert find_flags(dataclasses.replace(plan, run=plan.run.model_copy(update={"gc_freeze": True}))) is None


def test_later_keys_are_recorded_and_a_design_without_a_recorded_flag_is_the_submitters_choice(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "id")
    plan = submit(run_dir, "measure.design=parallel", name="module-qwen3-4b", stack_name="vime-host")
    assert plan.sources["measure.design"] == "--set measure.design"
    assert find_rewritten(plan, run_dir) == []
    sources = {path: flag for path, flag in plan.sources.items() if path != "measure.design"}
    assert find_rewritten(dataclasses.replace(plan, sources=sources), run_dir) == []
    (override,) = parse_overrides(["workload.rollouts_seed=null"])
    run = load_run("qwen3-4b-random", [override])
    assert run.sources["workload.rollouts_seed"] == "--set workload.rollouts_seed"
    assert override in list_overrides(run.model, run.sources)


def test_a_plan_that_a_replay_fitted_to_one_node_says_so(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "id")
    recorded = reanalyse(finish_run(run_dir))
    layouts = {**recorded.plan.run.layouts, "h200": recorded.plan.layout.model_copy(update={"num_nodes": 2})}
    larger = recorded.plan.run.model_copy(update={"layouts": layouts})
    sources = {**recorded.plan.sources, "layouts.h200.num_nodes": "--set layouts.h200.num_nodes"}
    recorded = dataclasses.replace(recorded, plan=dataclasses.replace(recorded.plan, run=larger, sources=sources))
    fitted = prepare(recorded, cluster="local").launch.plan
    assert fitted.layout.num_nodes == 1
    assert find_rewritten(fitted, run_dir) == []


READING = [("report", "-o", "out"), ("index", "-o", "out"), ("replay", "--analyze-only"), ("diff",), ("agreement",),
           ("combine",), ("verify",), ("inspect",)]  # fmt: skip


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    forged = make_run(folder / "forged", Recipe(speedup=9))
    return finish_run(make_run(folder / "id")), finish_run(forged)


@pytest.mark.parametrize("command", READING)
def test_a_bundle_is_read_once(
    call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundles: tuple[Path, Path], command: tuple[str, ...]
) -> None:
    """What is analysed is what was verified, also where another process exchanges the file meanwhile."""
    honest, forged = bundles
    started = []

    class Exchanging(ArchiveReader):
        def __init__(self, stream: BinaryIO, archive: str) -> None:
            super().__init__(stream, archive)
            started.append(archive)
            shutil.copy(forged, tmp_path / "copy")
            (tmp_path / "copy").replace(archive)  # a reader that opens the name again reads the forgery

    monkeypatch.setattr(seal, "ArchiveReader", Exchanging)
    name, *options = [str(tmp_path / word) if word == "out" else word for word in command]
    names = ["a.tgz", "b.tgz"][: 2 if name == "diff" else 1]
    given = [str(shutil.copy(honest, tmp_path / copy)) for copy in names]
    call(name, *given, *options)
    assert started == given


@pytest.mark.parametrize("name", ["run.yaml", "profile.yaml"])
def test_an_authors_file_beyond_its_size_is_refused_unread(tmp_path: Path, name: str) -> None:
    run_dir = make_run(tmp_path / "id")
    (run_dir.root / name).write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(BundleUnreadable, match=rf"{name}: too large, expected at most 64.0 KiB"):
        reanalyse(finish_run(run_dir))
