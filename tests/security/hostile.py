"""Make hostile bundles, each from one small honest run and sealed again, as an attacker would do."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml

from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.errors import RlkReproError
from rlk_repro.base.files import dump_json, sha256_bytes, write_bytes, write_json, write_text
from rlk_repro.bundle.checksums import render_checksums
from rlk_repro.bundle.verify import unpack
from rlk_repro.plan import Plan, make_record
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import Profile, ReferenceWorkload
from tests import ROOT
from tests.support.make_run import Recipe, finish_run, make_plan_for, make_run

RUN_ID: Final = "20260101-000000-smoke"
HONEST: Final = Recipe(settings=("measure.pairs=1", "measure.scored_steps=2", "measure.warmup_steps=0"))
TRIAL: Final = "00-p1-baseline"
MIB: Final = 1 << 20
BIG: Final = 10**400
ODD: Final = "\ud800 \x1b[2J\u202e\x00 <b>|`"
PREFIX: Final = b"[2026-11-20 13:00:00] x.py:1 - "
EVIDENCE: Final = ROOT / "docs" / "evidence" / "vime-agreement-h200.tgz"

Change = Callable[[RunDir], None]
Data = bytes | Callable[[], bytes]

# All JSON files of a run directory, then its other files, by the short name that rows begin with.
FILES: Final[dict[str, str]] = {
    "plan": "plan.json",
    "analysis": "analysis/analysis.json",
    "submission": "submission.json",
    "prepared": "prepared.json",
    "manifest": "nodes/node0/manifest.json",
    "preflight": "nodes/node0/preflight.json",
    "command": f"trials/{TRIAL}/command.json",
    "env": f"trials/{TRIAL}/env.json",
    "exit": f"trials/{TRIAL}/exit.json",
    "libraries": f"trials/{TRIAL}/libraries/0.json",
    "state": ".state.json",
}
OTHERS: Final[dict[str, str]] = {
    "log": f"trials/{TRIAL}/stdout.log",
    "ops": f"trials/{TRIAL}/ops/0.jsonl",
    "telemetry": "nodes/node0/telemetry.jsonl",
    "run-yaml": "run.yaml",
    "profile-yaml": "profile.yaml",
    "agent-log": "agent.jsonl",
}
PATHS: Final = FILES | OTHERS | {"checksums": "SHA256SUMS", "engines": f"trials/{TRIAL}/engines/0.jsonl"}


def make_honest(parent: Path) -> RunDir:
    run_dir = make_run(parent / RUN_ID, HONEST)
    submission = {"schema": 1, "cluster": "local", "job_id": "1:1", "submitted_at": "x", "details": {"host": "x"}}
    write_json(run_dir.submission, submission)
    state = {"schema": 1, "phase": "ended", "num_trials": 2, "num_steps": 2, "exit_code": 0}
    write_json(run_dir.state, state)
    finish_run(run_dir)
    return run_dir


def make_agreement(parent: Path) -> RunDir:
    """Unpack sealed evidence that compared engines, without Ray's logs; a trial's record has one name for all rows."""
    run_dir = unpack(EVIDENCE, parent / RUN_ID)
    shutil.rmtree(run_dir.nodes / "vm" / "ray")
    engines = run_dir.root / PATHS["engines"]
    next(engines.parent.iterdir()).rename(engines)
    return run_dir


def make_bundle(honest: RunDir, parent: Path, change: Change, *, is_sealed: bool = True) -> tuple[RunDir, Path]:
    """Return the changed run directory, and its bundle beside it.

    The bundle is sealed with the analysis of the changed logs where they give one, so that a replay continues.  An
    unsealed bundle is not verified, and its readers meet what verification would have refused.
    """
    run_dir = copy_run(honest, parent)
    before = run_dir.analysis.read_bytes()
    change(run_dir)
    if is_sealed and not run_dir.checksums.exists():
        if run_dir.analysis.is_file() and run_dir.analysis.read_bytes() == before:
            with suppress(RlkReproError):
                write_json(run_dir.analysis, analyse(run_dir).to_json())
        seal_again(run_dir)
    return run_dir, pack_tightly(run_dir, parent / "hostile.tgz")


def copy_run(run_dir: RunDir, parent: Path) -> RunDir:
    shutil.copytree(run_dir.root, parent / RUN_ID, symlinks=True)
    copy = RunDir(parent / RUN_ID)
    copy.checksums.unlink()
    copy.bundle.unlink(missing_ok=True)
    return copy


def seal_again(run_dir: RunDir) -> None:
    """Seal by the format's rules, without the product's own code for folders, which refuses many of these cases."""
    digests = {name: sha256_bytes((run_dir.root / name).read_bytes()) for name in list_files(run_dir.root)}
    write_bytes(run_dir.checksums, render_checksums(digests))


def pack_tightly(run_dir: RunDir, target: Path) -> Path:
    """Pack as small as zlib can."""
    files = {name: (run_dir.root / name).read_bytes() for name in list_files(run_dir.root)}
    target.write_bytes(gzip.compress(pack(files), 9, mtime=0))
    return target


def pack(files: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, data in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def list_files(root: Path) -> Iterator[str]:
    """List the files of a bundle; files of a run directory whose names begin with a dot are not packed."""
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder) / name
            if path.is_file() and not path.is_symlink() and not name.startswith("."):
                yield path.relative_to(root).as_posix()


def fit_hashes(record: dict[str, Any]) -> None:
    """Make both hashes of a plan fit, as an attacker would; limits of version 0.2's all-reduce are not part of it."""
    experiment = record["experiment"]
    hardware = {key: value for key, value in experiment["hardware"].items() if key != "all_reduce"}
    record["experiment_hash"] = sha256_bytes(dump_json({**experiment, "hardware": hardware}))
    record["plan_hash"] = sha256_bytes(dump_json({"experiment": experiment, "profile": record["profile"]}))


def edit(relative: str, values: Mapping[str, Any]) -> Change:
    """Set values of a JSON file by their paths; the plan's hashes are made to fit."""

    def apply(run_dir: RunDir) -> None:
        path = run_dir.root / relative
        record = json.loads(path.read_bytes())
        for place, value in values.items():
            *parents, last = place.split(".")
            part = record
            for key in parents:
                part = part[key]
            part[last] = value
        if path == run_dir.plan:
            fit_hashes(record)
        path.write_text(json.dumps(record))

    return apply


def replan(*, measure: Mapping[str, int] = {}, grpo: Mapping[str, int] = {}, has_logs: bool = False) -> Change:
    """Replace the run and its trials, without any check; ``has_logs`` gives each trial the first one's folder."""

    def apply(run_dir: RunDir) -> None:
        plan = Plan.load(run_dir.plan)
        workload = plan.run.workload
        assert isinstance(workload, ReferenceWorkload)
        workload = workload.model_copy(update={"grpo": workload.grpo.model_copy(update=grpo)})
        rules = plan.run.measure.model_copy(update=measure)
        run = plan.run.model_copy(update={"measure": rules, "workload": workload})
        write_json(run_dir.plan, make_record(replace(plan, run=run), RUN_ID))
        trials = json.loads(run_dir.plan.read_bytes())["experiment"]["trials"] if has_logs else []
        for trial in trials:
            target = run_dir.trial(f"{trial['index']:02d}-{trial['pair']}-{trial['variant']}").path
            if not target.exists():
                shutil.copytree(run_dir.trial(TRIAL).path, target)

    return apply


def put(relative: str, data: Data, mode: str = "wb") -> Change:
    def apply(run_dir: RunDir) -> None:
        path = run_dir.root / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode) as stream:
            stream.write(data if isinstance(data, bytes) else data())

    return apply


def append(relative: str, data: Data) -> Change:
    return put(relative, data, "ab")


def become(relative: str, kind: str) -> Change:
    """Put something else in place of a file or folder; only a run directory can hold a pipe."""

    def apply(run_dir: RunDir) -> None:
        path = run_dir.root / relative
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "a pipe":
            os.mkfifo(path)
        elif kind == "a folder":
            write_bytes(path / "inner", b"x")
        elif kind == "a file":
            write_bytes(path, b"a file")

    return apply


def put_files(num_files: int, name: str, data: Data = b"") -> Change:
    """Write many files; # in the name and the data is the number."""

    def apply(run_dir: RunDir) -> None:
        text = data if isinstance(data, bytes) else data()
        for number in range(num_files):
            put(name.replace("#", str(number)), text.replace(b"#", b"%d" % number))(run_dir)

    return apply


def put_nodes(num_nodes: int, num_first: int, num_other: int, *, is_known: bool = True) -> Change:
    """Write ``num_nodes`` manifests, the first with many facts of a kind that matters."""

    def apply(run_dir: RunDir) -> None:
        for number in range(num_nodes):
            fact: Any = number if is_known else {"unknown": "x"}
            facts = {f"A{item}": fact for item in range(num_other if number else num_first)}
            content = {"schema": 1, "sections": {"environment": facts}}
            write_json(run_dir.node(f"n{number:04}").manifest, content, is_durable=False)

    return apply


def fill(num_bytes: int, line: bytes, head: bytes = b"", tail: bytes = b"") -> Callable[[], bytes]:
    """Repeat a line up to a size, when it is asked for; # in it is a number that grows."""

    def make() -> bytes:
        if b"#" not in line:
            return head + line * (num_bytes // len(line)) + tail
        out, number = bytearray(head), 9
        while len(out) < num_bytes:
            out += line.replace(b"#", b"%d" % number)
            number += 1
        return bytes(out + tail)

    return make


def times(count: int, make: Callable[[], bytes]) -> Callable[[], bytes]:
    return lambda: count * make()


def step(timers: bytes = b"", memory: bytes = b"", calls: bytes = b"", number: bytes = b"#") -> bytes:
    return b'{"event":"step","step":%s,"timers":{%s},"memory":{%s},"calls":{%s}}\n' % (number, timers, memory, calls)


def engine(event: str, **values: Any) -> bytes:
    names = {"step": 0, "engine": "training", "case": "", "dtype": "float32"}
    return json.dumps({"event": event, **names, **values}).encode() + b"\n"


def begin(contract: str) -> bytes:
    return json.dumps({"event": "begin", "schema": 1, "contract": contract}).encode() + b"\n"


CPU: Final = replace(HONEST, hardware="cpu", is_routed=False)


def pack_stranger(root: Path, *, profile: dict[str, Any] | None = None, change: Change = lambda _: None) -> Path:
    """Return a bundle of the smoke run on this machine, with the stranger's profile where one is given."""

    def alter(run_dir: RunDir) -> None:
        if profile is not None:
            site = Profile.model_validate_json(json.dumps({"profile": "theirs", **profile}))
            plan = replace(make_plan_for(CPU), profile=site)
            write_json(run_dir.plan, make_record(plan, run_dir.run_id))
            write_text(run_dir.profile_yaml, yaml.safe_dump({"profile": "theirs", **profile}))
        change(run_dir)

    return finish_run(make_run(root, CPU, alter))
