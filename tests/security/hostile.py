"""Make hostile bundles by name, each from one small honest run and sealed again, as an attacker would do.

``CHANGES`` are made in the run directory; ``WEIGHTS`` names those that take seconds to make or to refuse.
``test_hostile_archives`` has the archives that are hostile as archives.
"""

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

from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.errors import RlkReproError
from rlk_repro.base.files import dump_json, sha256_bytes, write_bytes, write_json
from rlk_repro.bundle.checksums import render_checksums
from rlk_repro.plan import Plan, make_record
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import ReferenceWorkload
from tests.support.make_run import Recipe, finish_run, make_run

RUN_ID: Final = "20260101-000000-smoke"
HONEST: Final = Recipe(settings=("measure.pairs=1", "measure.scored_steps=2", "measure.warmup_steps=0"))
TRIAL: Final = "00-p1-baseline"
MIB: Final = 1 << 20
PREFIX: Final = b"[2026-11-20 13:00:00] x.py:1 - "

Change = Callable[[RunDir], None]


def make_honest(parent: Path) -> RunDir:
    run_dir = make_run(parent / RUN_ID, HONEST)
    submission = {"schema": 1, "cluster": "local", "job_id": "1:1", "submitted_at": "x", "details": {"host": "x"}}
    write_json(run_dir.submission, submission)
    state = {"schema": 1, "phase": "ended", "num_trials": 2, "num_steps": 2, "exit_code": 0}
    write_json(run_dir.state, state)
    finish_run(run_dir)
    return run_dir


def copy_run(run_dir: RunDir, parent: Path) -> RunDir:
    shutil.copytree(run_dir.root, parent / RUN_ID, symlinks=True)
    copy = RunDir(parent / RUN_ID)
    copy.checksums.unlink()
    copy.bundle.unlink()
    return copy


def seal_again(run_dir: RunDir) -> None:
    """Seal by the format's rules, without the product's own code for folders, which refuses many of these cases."""
    digests = {name: sha256_bytes((run_dir.root / name).read_bytes()) for name in list_files(run_dir.root)}
    write_bytes(run_dir.checksums, render_checksums(digests))


def pack_tightly(run_dir: RunDir, target: Path) -> Path:
    """Pack as small as zlib can."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in sorted(list_files(run_dir.root)):
            info = tarfile.TarInfo(name)
            info.size = (run_dir.root / name).stat().st_size
            with (run_dir.root / name).open("rb") as stream:
                archive.addfile(info, stream)
    target.write_bytes(gzip.compress(out.getbuffer(), 9, mtime=0))
    return target


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


def list_files(root: Path) -> Iterator[str]:
    """List the files of a bundle; files of a run directory whose names begin with a dot are not packed."""
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder) / name
            if path.is_file() and not path.is_symlink() and not name.startswith("."):
                yield path.relative_to(root).as_posix()


def change_plan(change: Callable[[dict[str, Any]], None]) -> Change:
    """Change the plan's JSON and make both hashes fit."""

    def apply(run_dir: RunDir) -> None:
        record = json.loads(run_dir.plan.read_bytes())
        change(record)
        experiment = record["experiment"]
        record["experiment_hash"] = sha256_bytes(dump_json(experiment))
        record["plan_hash"] = sha256_bytes(dump_json({"experiment": experiment, "profile": record["profile"]}))
        write_json(run_dir.plan, record)

    return apply


def replan(*, measure: Mapping[str, int] = {}, grpo: Mapping[str, int] = {}) -> Change:
    """Replace the run and its trials, without any check."""

    def apply(run_dir: RunDir) -> None:
        plan = Plan.load(run_dir.plan)
        workload = plan.run.workload
        assert isinstance(workload, ReferenceWorkload)
        workload = workload.model_copy(update={"grpo": workload.grpo.model_copy(update=grpo)})
        rules = plan.run.measure.model_copy(update=measure)
        run = plan.run.model_copy(update={"measure": rules, "workload": workload})
        write_json(run_dir.plan, make_record(replace(plan, run=run), RUN_ID))

    return apply


def put(relative: str, data: bytes | Callable[[], bytes]) -> Change:
    def apply(run_dir: RunDir) -> None:
        write_bytes(run_dir.root / relative, data if isinstance(data, bytes) else data())

    return apply


def append(relative: str, make: Callable[[], bytes]) -> Change:
    def apply(run_dir: RunDir) -> None:
        with (run_dir.root / relative).open("ab") as stream:
            stream.write(make())

    return apply


def edit(relative: str, change: Callable[[Any], Any]) -> Change:
    """Edit the JSON of one file: the function changes it in place or returns a new value."""

    def apply(run_dir: RunDir) -> None:
        path = run_dir.root / relative
        value = json.loads(path.read_bytes())
        answer = change(value)
        path.write_text(json.dumps(value if answer is None else answer))

    return apply


def many(num_bytes: int, piece: bytes) -> bytes:
    return piece * (num_bytes // len(piece))


def lines(num_bytes: int, make: Callable[[int], bytes]) -> bytes:
    out = bytearray()
    number = 0
    while len(out) < num_bytes:
        out += make(number)
        number += 1
    return bytes(out)


# These are all JSON files of a run directory, by a short name.
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
    "stdout": f"trials/{TRIAL}/stdout.log",
    "ops": f"trials/{TRIAL}/ops/0.jsonl",
    "telemetry": "nodes/node0/telemetry.jsonl",
    "run-yaml": "run.yaml",
    "profile-yaml": "profile.yaml",
    "agent-log": "agent.jsonl",
}
BODIES: Final[Mapping[str, bytes]] = {
    "levels": b"[" * 700 + b"]" * 700,
    "levels-of-objects": b'{"schema":1,"x":' + b'{"a":' * 700 + b"1" + b"}" * 701,
    "levels-without-end": b"[" * 100_000,
    "digits": b'{"schema":1,"duration_s":' + b"9" * 400 + b',"status":"ok"}',
    "digits-of-schema": b'{"schema":' + b"9" * 5000 + b"}",
    "constants": b'{"schema":1,"duration_s":NaN,"x":-Infinity,"status":"ok"}',
    "key-twice": b'{"schema":1,"status":"ok","status":"failed"}',
    "surrogates": b'{"schema":1,"status":"\\ud800","reason":"\\udc80"}',
    "list": b"[]",
    "number": b"1",
    "null": b"null",
    "nothing": b"",
    "utf-16": '{"schema":1}'.encode("utf-16"),
}


def as_folder(relative: str) -> Change:
    def apply(run_dir: RunDir) -> None:
        path = run_dir.root / relative
        if path.is_file():
            path.unlink()
        write_bytes(path / "inner", b"x")

    return apply


def as_pipe(relative: str) -> Change:
    """Put a pipe in place of a file; only a run directory can hold one."""

    def apply(run_dir: RunDir) -> None:
        path = run_dir.root / relative
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)

    return apply


def without(relative: str) -> Change:
    def apply(run_dir: RunDir) -> None:
        (run_dir.root / relative).unlink(missing_ok=True)

    return apply


def as_file(relative: str) -> Change:
    def apply(run_dir: RunDir) -> None:
        shutil.rmtree(run_dir.root / relative, ignore_errors=True)
        write_bytes(run_dir.root / relative, b"a file")

    return apply


def small_changes() -> dict[str, Change]:
    """List the changes that are refused or skipped at once."""
    found: dict[str, Change] = {}
    for name, relative in FILES.items():
        found |= {f"{name}: {what}": put(relative, body) for what, body in BODIES.items()}
    for name, relative in (FILES | OTHERS).items():
        found[f"{name}: a folder"] = as_folder(relative)
        found[f"{name}: missing"] = without(relative)
        found[f"{name}: bytes"] = put(relative, bytes(range(256)) * 8)
    for relative in ("trials", "nodes", f"trials/{TRIAL}", "nodes/node0", "analysis", f"trials/{TRIAL}/ops"):
        found[f"{relative}: a file"] = as_file(relative)
    return found | _number_changes() | _text_changes()


def _number_changes() -> dict[str, Change]:
    big = 10**400
    return {
        "exit: duration of 400 digits": edit(FILES["exit"], lambda value: value | {"duration_s": big}),
        "manifest: fact of 400 digits": edit(
            FILES["manifest"], lambda value: value["sections"]["gpu"].update({"count": big})
        ),
        "plan: seed of 400 digits": change_plan(
            lambda value: value["experiment"]["run"]["measure"].update({"seed": big})
        ),
        "ops: memory of 400 digits": append(
            OTHERS["ops"],
            lambda: b'{"event":"step","step":5,"timers":{},"memory":{"peak_allocated_bytes":%d},"calls":{}}\n' % big,
        ),
        "ops: calls of 19 digits": append(
            OTHERS["ops"],
            lambda: b'{"event":"step","step":5,"timers":{},"memory":{},"calls":{"logp":{"calls":%d}}}\n' % (2**63 - 1),
        ),
        "ops: a world of 10^18": append(
            OTHERS["ops"],
            lambda: (
                b'{"event":"install","schema":1,"mode":"off","is_requested":true,"ops":[],"rank":0,'
                b'"world_size":1000000000000000000,"trainer":"x","platform":"cuda"}\n'
            ),
        ),
        "ops: a rank of 200 digits": put(f"trials/{TRIAL}/ops/{'9' * 200}.jsonl", b'{"event":"end"}\n'),
        "ops: times beyond all": append(
            OTHERS["ops"],
            lambda: b'{"event":"step","step":5,"timers":{"a":1e308,"b":1e400},"memory":{},"calls":{}}\n',
        ),
        "telemetry: memory of 400 digits": append(
            OTHERS["telemetry"], lambda: b'{"t":1,"trial":"%s","rss_bytes":%d}\n' % (TRIAL.encode(), big)
        ),
        "telemetry: infinities": append(
            OTHERS["telemetry"], lambda: b'{"t":Infinity,"trial":"a"}\n{"t":1e999,"trial":"a","rss_bytes":NaN}\n'
        ),
        "log: numbers beyond all": append(
            OTHERS["stdout"],
            lambda: b"".join(
                PREFIX + b"perf %d: {'perf/step_time': %s, 'perf/train_time': 1e308}\n" % (step, value)
                for step, value in enumerate((b"1e308", b"nan", b"inf", b"-inf", b"1e-320", b"9" * 64))
            ),
        ),
        "plan: 10^9 optimizer steps a rollout": replan(
            grpo={"num_steps_per_rollout": 10**9, "rollout_batch_size": 10**9, "n_samples_per_prompt": 2}
        ),
        "plan: 256 trials of 110000 steps": replan(
            measure={"pairs": 64, "control_pairs": 64, "scored_steps": 10**5, "warmup_steps": 10**4}
        ),
        "plan: an operator that is none": change_plan(
            lambda value: value["experiment"]["run"]["rl_kernel"].update({"ops": ["logp", "none-such"]})
        ),
        "plan: hardware without a layout": change_plan(
            lambda value: value["experiment"]["hardware"].update({"hardware": "nowhere"})
        ),
        "plan: no rules at all": change_plan(lambda value: value["experiment"]["run"].update({"measure": {}})),
    }


def _text_changes() -> dict[str, Change]:
    odd = "\ud800 \x1b[2J\u202e\x00 <b>|`"
    return {
        "manifest: odd facts": edit(
            FILES["manifest"],
            lambda value: value["sections"].update({odd: {odd: odd}, "gpu": {"devices": [{odd: [odd]}, {}]}}),
        ),
        "manifest: node of another type": edit(FILES["manifest"], lambda value: value | {"node": [odd]}),
        "preflight: findings of other types": edit(
            FILES["preflight"],
            lambda value: value | {"findings": [{"level": "warning", "where": [], "expected": {}, "found": 1}]},
        ),
        "preflight: odd findings": edit(
            FILES["preflight"],
            lambda value: value | {"findings": [{"level": "blocking", "where": odd, "expected": odd, "found": odd}]},
        ),
        "exit: odd words": edit(
            FILES["exit"], lambda value: value | {"reason": odd, "allocation": odd, "started_at": odd}
        ),
        "exit: words of other types": edit(
            FILES["exit"], lambda value: value | {"reason": [odd], "allocation": {odd: 1}, "duration_s": [1]}
        ),
        "command: odd words": edit(FILES["command"], lambda _: {"argv": [odd, f"--{odd}", 1, None, [odd]]}),
        "env: odd names": edit(FILES["env"], lambda _: {"schema": 1, "env": {odd: odd, "": 1, "X": [odd]}}),
        "libraries: other types": edit(
            FILES["libraries"], lambda _: {"packages": [1], "sources": {"vime": [1], "rl_engine": odd}, "torch": [odd]}
        ),
        "prepared: other types": put(
            FILES["prepared"],
            b'{"schema":1,"parts":{"model":{"files":{"a":[]},"kind":1,"name":[],"source":{},"made":{}}}}',
        ),
        "submission: other types": put(FILES["submission"], b'{"schema":1,"cluster":[],"details":{"a":1}}'),
        "submission: a cluster that is none": put(
            FILES["submission"],
            b'{"schema":1,"cluster":"moon","job_id":"1","submitted_at":"x","details":{"host":"x"}}',
        ),
        "ops: odd texts": append(
            OTHERS["ops"],
            lambda: json.dumps(
                {"event": "decision", "op": odd, "implementation": odd, "version": odd, "reason": odd,
                 "is_rl_kernel": True}
            ).encode() + b"\n",
        ),
        "log: odd names": append(
            OTHERS["stdout"], lambda: PREFIX + f"perf 0: {{'perf/{odd[1:]}': 1, 'perf/step_time': 1}}\n".encode()
        ),
        "analysis: other types": edit(FILES["analysis"], lambda value: value | {"trials": 1, "gates": [1]}),
        "agent log: other types": put(
            OTHERS["agent-log"],
            b'{"allocation":[],"t":1}\n{"allocation":"a","t":"2026-01-01T00:00:00Z"}\n"allocation"\n'
            + b'["allocation"' * 900,
        ),
    }  # fmt: skip


def heavy_changes() -> dict[str, Change]:
    """List the changes that cost most for their size: below 1 MB each, up to 32 MiB when inflated, or far more."""
    return {**_heavy_json(), **_heavy_logs(), **_heavy_folders()}


def _heavy_json() -> dict[str, Change]:
    found: dict[str, Change] = {
        "command: 100 MB of lists": put(FILES["command"], lambda: b'{"argv":[' + many(100 * MIB, b"[],") + b"[]]}"),
    }
    for name, relative in FILES.items():
        found[f"{name}: 30 MB of lists"] = put(relative, lambda: b'{"schema":1,"x":[' + many(30 * MIB, b"[],") + b"0]}")
        found[f"{name}: 4 MB of lists"] = put(
            relative, lambda: b'{"schema":1,"x":[' + many(4 * MIB - 99, b"[],") + b"0]}"
        )
        found[f"{name}: 4 MB of texts"] = put(
            relative, lambda: b'{"schema":1,"x":[' + many(4 * MIB - 99, b'"aaaa",') + b"0]}"
        )
    found |= {
        "analysis: 30 MB of texts": put(
            FILES["analysis"], lambda: b'{"schema":1,"x":[' + many(29 * MIB, b'"aaaa",') + b"0]}"
        ),
        "command: 4 MB of flags": edit(
            FILES["command"], lambda _: {"schema": 1, "argv": [f"--{number:x}" for number in range(370_000)]}
        ),
        "env: 4 MB of variables": edit(
            FILES["env"], lambda _: {"schema": 1, "env": {f"A{number:x}": "1" for number in range(250_000)}}
        ),
        "env: a value that looks like a secret everywhere": edit(
            FILES["env"], lambda value: {"env": value["env"] | {"X": "sk-" * 400_000, "Y": "a." * 400_000 + "@"}}
        ),
        "preflight: 50000 findings": edit(
            FILES["preflight"],
            lambda value: value
            | {"findings": [{"level": "warning", "where": f"{number}", "expected": "", "found": ""}
                            for number in range(50_000)]},
        ),
        "prepared: 30000 files": edit_or_make_prepared,
        "plan: 1 MB of sources": change_plan(
            lambda value: value.update({"sources": {f"a.{number:x}": "--set a" for number in range(40_000)}})
        ),
        "plan: sources that are numbers": change_plan(
            lambda value: value.update({"sources": {f"{number:x}": 1 for number in range(60_000)}})
        ),
        "plan: 9000 claims": change_plan(
            lambda value: value["experiment"]["run"].update({"may_claim": ["x" * 90] * 9_000})
        ),
        "plan: 30000 layouts": change_plan(
            lambda value: value["experiment"]["run"]["layouts"].update(
                {f"a{number}": {} for number in range(30_000)}
            )
        ),
        "plan: 20000 steps in 2 trials": replan(measure={"scored_steps": 10_000, "warmup_steps": 0}),
        "plan: 20000 steps in 256 trials": full_plan,
    }  # fmt: skip
    return found


def full_plan(run_dir: RunDir) -> None:
    """Make a plan with the largest number of trials and steps, each with an empty log."""
    replan(measure={"pairs": 64, "control_pairs": 64, "scored_steps": 78, "warmup_steps": 0})(run_dir)
    _fill_trials(run_dir)


def _fill_trials(run_dir: RunDir) -> None:
    first = run_dir.trial(TRIAL).path
    for trial in json.loads(run_dir.plan.read_bytes())["experiment"]["trials"]:
        target = run_dir.trial(f"{trial['index']:02d}-{trial['pair']}-{trial['variant']}").path
        if not target.exists():
            shutil.copytree(first, target)


def edit_or_make_prepared(run_dir: RunDir) -> None:
    files = {f"{number}": {"size_bytes": 1, "sha256": "", "ends_sha256": ""} for number in range(30_000)}
    parts = {
        "model": {"schema": 1, "kind": "model", "name": "x", "source": {}, "made": {}, "digest": "", "files": files}
    }
    run_dir.prepared.write_text(json.dumps({"schema": 1, "parts": parts}))


def _heavy_logs() -> dict[str, Change]:
    step = b'{"event":"step","step":%d,"timers":{%s},"memory":{%s},"calls":{%s}}\n'
    number_of = b'"%d":0'

    def texts() -> bytes:
        return lines(32_000, lambda number: b'"%d":"",' % number) + b'"a":1'

    return {
        "ops: one line of 100 MB": append(
            OTHERS["ops"], lambda: b'{"event":"kernels","names":[' + many(100 * MIB, b"1,") + b'""]}\n'
        ),
        "ops: one line of 30 MB": append(
            OTHERS["ops"], lambda: b'{"event":"kernels","names":[' + many(30 * MIB, b'"",') + b'""]}\n'
        ),
        "ops: lines of 1 MB": append(
            OTHERS["ops"], lambda: 28 * (b'{"event":"kernels","names":[' + many(MIB - 99, b"1,") + b'""]}\n')
        ),
        "ops: lines of 64 KB": append(
            OTHERS["ops"], lambda: 100 * (step % (5, texts(), b"", many(32_000, b'"x":{},')))
        ),
        "ops: 330000 empty steps": append(
            OTHERS["ops"], lambda: lines(20 * MIB, lambda number: step % (number + 9, b"", b"", b""))
        ),
        "ops: steps full of calls": append(
            OTHERS["ops"],
            lambda: lines(
                28 * MIB,
                lambda number: step % (number + 9, b"", b"", b",".join(b'"%d":{}' % item for item in range(16))),
            ),
        ),
        "ops: steps full of numbers": append(
            OTHERS["ops"],
            lambda: lines(
                28 * MIB,
                lambda number: step
                % (
                    number + 9,
                    b",".join(number_of % item for item in range(64)),
                    b",".join(number_of % (item + number) for item in range(64)),
                    b"",
                ),
            ),
        ),
        "ops: a timer for every line": append(
            OTHERS["ops"],
            lambda: lines(8 * MIB, lambda number: step % (number + 9, b'"%d":1' % number, b'"%d":1' % number, b"")),
        ),
        "ops: 70000 decisions": append(
            OTHERS["ops"],
            lambda: lines(
                10 * MIB,
                lambda number: b'{"event":"decision","op":"%d","implementation":"%d","version":"","reason":"%d",'
                b'"is_rl_kernel":true}\n' % (number, number, number),
            ),
        ),
        "ops: 350000 ends": append(OTHERS["ops"], lambda: many(16 * 350_000, b'{"event":"end"}\n')),
        "ops: 8000 ranks": put_ranks,
        "log: a row that grows with each line": append(
            OTHERS["stdout"],
            lambda: lines(
                9 * MIB, lambda number: PREFIX + b"perf 0: {'perf/%d': %d, 'perf/%d': 0}\n" % (number, number, -number)
            ),
        ),
        "log: a line for each row": append(
            OTHERS["stdout"],
            lambda: lines(9 * MIB, lambda number: PREFIX + b"perf %d: {'perf/x': 1}\n" % (number + 9)),
        ),
        "log: contradictions": append(
            OTHERS["stdout"], lambda: lines(9 * MIB, lambda number: PREFIX + b"perf 9: {'perf/x': %d}\n" % number)
        ),
        "log: one message of 6 MB": append(
            OTHERS["stdout"],
            lambda: PREFIX + b"perf 9: {" + lines(6 * MIB, lambda number: b"'perf/%d': 1, " % number) + b"}\n",
        ),
        "log: one message of 30 MB": append(
            OTHERS["stdout"],
            lambda: PREFIX + b"perf 9: {" + lines(30 * MIB, lambda number: b"'perf/%d': 1, " % (number % 99)) + b"}\n",
        ),
        "log: messages of 1 MB": append(
            OTHERS["stdout"],
            lambda: b"".join(
                PREFIX + b"perf %d: {" % row + lines(MIB - 99, lambda number: b"'perf/%d': 1, " % number) + b"'z': 1}\n"
                for row in range(6)
            ),
        ),
        "log: one line of prefixes": append(OTHERS["stdout"], lambda: many(30 * MIB, PREFIX)),
        "log: lines that look like messages": append(OTHERS["stdout"], lambda: many(395_000 * 7, b"0: {'{\n")),
        "log: one line that looks like messages": append(OTHERS["stdout"], lambda: many(30 * MIB, b"0: {'perf/")),
        "log: brackets": append(
            OTHERS["stdout"], lambda: PREFIX + b"perf 9: {'perf/x': " + many(30 * MIB, b"[(") + b"\n"
        ),
        "log: actors": append(OTHERS["stdout"], lambda: many(30 * MIB, b"(a pid=1) ")),
        "log: memory": append(
            OTHERS["stdout"],
            lambda: many(
                28 * MIB, PREFIX + b"[Rank 0] Memory-Usage a: {'used_GB': 1, 'allocated_GB': 1, 'reserved_GB': 1}\n"
            ),
        ),
        "log: timers": append(
            OTHERS["stdout"],
            lambda: lines(9 * MIB, lambda number: PREFIX + b"Timer a%d end (elapsed: 1.0s)\n" % number),
        ),
        "log: zeros": append(OTHERS["stdout"], lambda: bytes(30 * MIB)),
        "telemetry: a trial a line": append(
            OTHERS["telemetry"], lambda: lines(8 * MIB, lambda number: b'{"t":1,"trial":"%d"}\n' % number)
        ),
        "telemetry: 370000 samples": append(
            OTHERS["telemetry"], lambda: many(370_000 * 31, b'{"t":1,"trial":"%s"}\n' % TRIAL.encode())
        ),
        "telemetry: lines of 1 MB": append(
            OTHERS["telemetry"], lambda: 28 * (b'{"t":1,"gpus":[' + many(MIB - 99, b"{},") + b"{}]}\n")
        ),
        "agent log: 6 MB of events": append(
            OTHERS["agent-log"],
            lambda: lines(6 * MIB, lambda number: b'{"allocation":"%d","t":"%d"}\n' % (number, number)),
        ),
    }  # fmt: skip


def put_ranks(run_dir: RunDir) -> None:
    line = run_dir.trial(TRIAL).ops_file(0).read_bytes()
    for rank in range(8000):
        (run_dir.trial(TRIAL).ops / f"{rank}.jsonl").write_bytes(line.replace(b'"rank":0', b'"rank":%d' % rank))


def put_nodes(num_nodes: int, num_first: int, num_other: int, *, is_known: bool = True) -> Change:
    """Write ``num_nodes`` manifests, the first with many facts of a kind that matters."""

    def apply(run_dir: RunDir) -> None:
        for number in range(num_nodes):
            num_facts = num_other if number else num_first
            fact: Any = number if is_known else {"unknown": "x"}
            facts = {f"A{item}": fact for item in range(num_facts)}
            write_json(run_dir.node(f"n{number:04}").manifest, {"schema": 1, "sections": {"environment": facts}},
                       is_durable=False)  # fmt: skip

    return apply


def put_files(num_files: int, name: Callable[[int], str]) -> Change:
    def apply(run_dir: RunDir) -> None:
        for number in range(num_files):
            path = run_dir.root / name(number)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")

    return apply


def _heavy_folders() -> dict[str, Change]:
    return {
        "nodes: 20000 facts, 2000 others": put_nodes(2000, 20_000, 1),
        "nodes: 5000 facts, 4000 others": put_nodes(4000, 5000, 1),
        "nodes: 5000 unknown facts, 4000 others": put_nodes(4000, 5000, 1, is_known=False),
        "nodes: 80 of 5000 facts": put_nodes(80, 5000, 5000),
        "manifest: 4 MB of facts": edit(
            FILES["manifest"],
            lambda value: value["sections"]["gpu"].update({f"{item:x}": 0 for item in range(250_000)}),
        ),
        "manifest: a text of 4 MB": edit(
            FILES["manifest"], lambda value: value["sections"]["gpu"].update({"topology_text": "x" * (4 * MIB - 999)})
        ),
        "trials: 9000 that are not planned": put_files(9000, lambda number: f"trials/{number + 50}-p9-enabled"),
        "libraries: 9000 ranks": put_files(9000, lambda number: f"trials/{TRIAL}/libraries/{number}.json"),
        "9500 files": put_files(9500, lambda number: f"scheduler/{number}"),
        "50000 files": put_files(50_000, lambda number: f"scheduler/{number}"),
        "5000 files 480 folders deep": put_files(5000, lambda number: "a/" * 480 + str(number)),
        "checksums: empty lines": put("SHA256SUMS", lambda: many(350_000, b"\n")),
        "checksums: 180000 files that are not there": put(
            "SHA256SUMS", lambda: lines(13 * MIB, lambda number: b"%064x  %08d\n" % (number, number))
        ),
    }
