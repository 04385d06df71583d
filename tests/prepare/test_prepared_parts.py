"""What was prepared: recorded at submission, held to on every node before the first trial, compared by a replay."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from rlk_repro.agent.preflight.host import check_prepared
from rlk_repro.base.files import sha256_bytes
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.resources import profile_folders
from rlk_repro.clusters.api import Job
from rlk_repro.plan import Plan, make_plan
from rlk_repro.prepare.contents import Contents, diff_contents, digest_of, load_contents, load_parts
from rlk_repro.prepare.layout import PreparedDir
from rlk_repro.prepare.steps import PrepareRequest, WorkDir, prepare
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec.load import load_hardware, load_profile, load_run, load_stack, parse_overrides
from rlk_repro.submit.stage import AuthorFiles, stage
from rlk_repro.workloads import WORKLOADS, record_prepared
from tests.support.job_examples import make_staged_facts
from tests.support.prepare_examples import BRIDGE, TINY, make_rollout

VIME = WORKLOADS["vime"]
INPUTS = AuthorFiles(run=b"", stack=b"", hardware=b"", profile=b"")
JOB = Job(files={}, command=())
NUM_STEPS = 16  # of the smoke run of vime


def make_vime_plan(*settings: str) -> Plan:
    overrides = parse_overrides([*TINY[1::2], *BRIDGE[1::2], *settings])
    return make_plan(
        run=load_run("vime-smoke", overrides),
        stack=load_stack("vime-host"),
        hardware=load_hardware("h200"),
        profile=load_profile("local", profile_folders("local")),
        overrides=overrides,
        is_exploratory=True,
    )


def prepare_for(plan: Plan, run_dir: RunDir, mirror: Path | None = None) -> dict[str, Path]:
    prepared = PreparedDir.of(plan.profile, run_dir)
    request = PrepareRequest(
        run=plan.run, stack=plan.stack, hardware=plan.hardware, prepared=prepared, mirror=mirror, is_offline=True
    )
    prepare(request, VIME.list_steps(request), lambda _: None, is_live=False)
    return VIME.list_folders(plan.run, plan.stack, prepared)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "runs" / "vime-smoke" / "one")


def staged(plan: Plan, run_dir: RunDir) -> None:
    stage(plan, INPUTS, run_dir, JOB)


def test_prepared_files_are_recorded_in_the_run_directory_by_content(run_dir: RunDir) -> None:
    plan = make_vime_plan()
    folders = prepare_for(plan, run_dir)
    staged(plan, run_dir)
    parts = load_parts(run_dir.prepared)
    assert parts == {kind: load_contents(folder) for kind, folder in folders.items()}
    assert list(diff_contents(parts, parts)) == []
    assert [item.found for item in diff_contents(parts, {"model": parts["model"]})] == ["none"]
    assert str(run_dir.root) not in run_dir.prepared.read_text()
    assert list(check_prepared(make_staged_facts(plan, run_dir))) == []


def test_agents_record_what_the_submitting_machine_cannot_see_beside_their_rollouts(run_dir: RunDir) -> None:
    plan = make_vime_plan()
    folders = prepare_for(plan, run_dir)
    profile = plan.profile.model_copy(update={"cluster": "k8s"})
    staged(dataclasses.replace(plan, profile=profile), run_dir)
    assert not run_dir.prepared.exists()
    run_dir.prepared.write_text(json.dumps({"schema": 1, "rollouts": {"1": {}}}))
    record_prepared(plan, run_dir)
    assert load_parts(run_dir.prepared).keys() == folders.keys()
    assert json.loads(run_dir.prepared.read_text())["rollouts"] == {"1": {}}


def blocking(plan: Plan, run_dir: RunDir) -> list[str]:
    findings = list(check_prepared(make_staged_facts(plan, run_dir)))
    assert all(item.level is Level.BLOCKING for item in findings)
    return [f"{item.where}: {item.expected} / {item.found}" for item in findings]


def test_weights_that_changed_since_block_the_first_trial(run_dir: RunDir) -> None:
    plan = make_vime_plan()
    weights = prepare_for(plan, run_dir)["model"] / "model.safetensors"
    staged(plan, run_dir)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    found = blocking(plan, run_dir)
    assert len(found) == 1
    assert found[0].startswith("prepared.model.model.safetensors: sha256 of its ends ")


def test_another_model_of_the_same_name_blocks_even_when_it_is_whole(run_dir: RunDir) -> None:
    plan = make_vime_plan()
    folder = prepare_for(plan, run_dir)["model"]
    staged(plan, run_dir)
    contents = load_contents(folder)
    assert contents is not None
    record = json.loads((folder.with_name(f"{folder.name}.json")).read_text())
    (folder / "config.json").write_text("{}")
    sha256 = sha256_bytes(b"{}")
    record["files"]["config.json"] = {"size_bytes": 2, "sha256": sha256, "ends_sha256": sha256}
    record["digest"] = digest_of({name: item["sha256"] for name, item in record["files"].items()})
    folder.with_name(f"{folder.name}.json").write_text(json.dumps(record))
    assert blocking(plan, run_dir) == [
        f"prepared.model: {folder.name}, digest {contents.digest} / {folder.name}, digest {record['digest']}"
    ]


def test_a_folder_that_is_gone_or_half_made_blocks(run_dir: RunDir) -> None:
    plan = make_vime_plan()
    folder = prepare_for(plan, run_dir)["data"]
    staged(plan, run_dir)
    folder.rename(WorkDir.of(folder).path)
    assert blocking(plan, run_dir) == [
        "prepared.data: what `rlk-repro prepare` makes with the run and the options of this run's `submit` / "
        f"no complete folder {folder.name}"
    ]


def store(folder: Path, num_files: int) -> str:
    """Rollouts as a run leaves them; what ``sha256sum 0.pt 1.pt … | sha256sum`` says of them."""
    folder.mkdir(parents=True)
    for number in range(num_files):
        (folder / f"{number}.pt").write_bytes(make_rollout(number))
    lines = (f"{sha256_bytes(make_rollout(number))}  {number}.pt\n" for number in range(num_files))
    return f"sha256:{sha256_bytes(''.join(lines).encode())}"


def stored_plan(digest: str, num_files: int, *, is_packed: bool = False) -> Plan:
    rollouts = f"{{name: first, num_files: {num_files}, digest: '{digest}', made_by: a test, is_packed: {is_packed}}}"
    return make_vime_plan(
        "lane=train-only", f"workload.rollouts={rollouts.replace('False', 'false').replace('True', 'true')}"
    )


def test_stored_rollouts_come_from_an_unpacked_bundle_by_their_digest(run_dir: RunDir, tmp_path: Path) -> None:
    plan = stored_plan(store(tmp_path / "mirror" / "rollouts" / "first", NUM_STEPS), NUM_STEPS, is_packed=True)
    folders = prepare_for(plan, run_dir, tmp_path / "mirror")
    assert folders.keys() == {"model", "rollouts"}
    staged(plan, run_dir)
    assert list(check_prepared(make_staged_facts(plan, run_dir))) == []
    record_prepared(plan, run_dir)
    assert sorted(path.name for path in (run_dir.rollouts / "first").iterdir()) == sorted(
        f"{number}.pt" for number in range(NUM_STEPS)
    )


def test_fewer_stored_rollouts_than_steps_block(run_dir: RunDir, tmp_path: Path) -> None:
    plan = stored_plan(store(tmp_path / "mirror" / "rollouts" / "first", 8), 8)
    prepare_for(plan, run_dir, tmp_path / "mirror")
    staged(plan, run_dir)
    assert blocking(plan, run_dir) == [
        f"prepared.rollouts: {NUM_STEPS} files, one per rollout of a trial / {NUM_STEPS - 8} missing, such as 8.pt"
    ]


def test_conversions_of_the_same_weights_by_the_same_tool_are_the_same() -> None:
    source = {"model": "0" * 64, "arguments": ["--swiglu"], "commits": {"vime": "1" * 40}}
    first = Contents(kind="checkpoint", name="x", source=source, files={})
    again = dataclasses.replace(first, made={"duration_s": 1.0})
    assert list(diff_contents({"checkpoint": first}, {"checkpoint": again})) == []
    other = dataclasses.replace(first, source={**source, "model": "1" * 64})
    assert list(diff_contents({"checkpoint": first}, {"checkpoint": other})) == [
        Finding(Level.BLOCKING, "prepared.checkpoint.model", "0" * 64, "1" * 64)
    ]
