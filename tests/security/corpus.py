"""The corpus: each change that a stranger makes to an honest bundle by name, and files of theirs for other readers.

The part of a name before the colon says which file is changed.  ``test_hostile_archives`` has what is hostile as an
archive.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from rlk_repro.base.resources import data_dir
from tests.security.hostile import (
    BIG,
    FILES,
    MIB,
    ODD,
    OTHERS,
    PATHS,
    PREFIX,
    TRIAL,
    Change,
    Data,
    append,
    become,
    begin,
    edit,
    engine,
    fill,
    put,
    put_files,
    put_nodes,
    replan,
    step,
    times,
)

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
RUN: Final = "experiment.run"
READERS: Final = (("verify",), ("inspect",), ("report", "-o", "{out}"), ("replay", "--analyze-only"),
                  ("replay", "--dry-run"), ("diff", "{other}"), ("index", "-o", "{out}"))  # fmt: skip
JUDGES: Final = (("agreement",), ("combine",),
                 ("predict", "qwen3-4b", "--hardware", "h200"))  # fmt: skip
"""These read bundles, too, and want more of a bundle than that it is valid; ``OF_AUTHORS`` reads other files."""
SITE: Final = ("--cluster", "slurm", "--profile", "generic-h200", "--hardware", "h200")
OF_AUTHORS: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "jobs": (("submit", "--dry-run", "--run", "{file}"), ("prepare", "{file}", "--dry-run", "--hardware", "h200"),
             ("runs", "show", "{file}"), ("predict", "{file}", "--hardware", "h200")),
    "manifests/stacks": (("submit", "--dry-run", "--run", "vime-smoke", *SITE, "--stack", "{file}"),),
    "jobs/hardware": (("submit", "--dry-run", "--run", "smoke", *SITE[:4], "--hardware", "{file}"),
                      ("predict", "qwen3-4b", "--hardware", "{file}")),
    "slurm/profiles": (("submit", "--dry-run", "--run", "smoke", *SITE[:2], "--profile", "{file}"),
                       ("profile", "show", "{file}")),
}  # fmt: skip
# For a valid file these start programs.
STARTING: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "manifests/stacks": (("images", "build", "--stack", "{file}"),
                         ("env", "create", "{out}", "--stack", "{file}"), ("tools.rl_kernel", "--stack", "{file}")),
    "slurm/profiles": (("profile", "check", "{file}"),),
}  # fmt: skip
EDITED: Final[Mapping[str, Mapping[str, Any]]] = {
    "exit: duration of 400 digits": {"duration_s": BIG},
    "exit: odd words": {"reason": ODD, "allocation": ODD, "started_at": ODD},
    "exit: words of other types": {"reason": [ODD], "allocation": {ODD: 1}, "duration_s": [1]},
    "manifest: fact of 400 digits": {"sections.gpu.count": BIG},
    "manifest: odd facts": {f"sections.{ODD}": {ODD: ODD}, "sections.gpu": {"devices": [{ODD: [ODD]}, {}]}},
    "manifest: node of another type": {"node": [ODD]},
    "plan: seed of 400 digits": {f"{RUN}.measure.seed": BIG},
    "plan: an operator that is none": {f"{RUN}.rl_kernel.ops": ["logp", "none-such"]},
    "plan: hardware without a layout": {"experiment.hardware.hardware": "nowhere"},
    "plan: no rules at all": {f"{RUN}.measure": {}},
    "preflight: findings of other types": {"findings": [{"level": "warning", "where": [], "expected": {}, "found": 1}]},
    "preflight: odd findings": {"findings": [{"level": "blocking", "where": ODD, "expected": ODD, "found": ODD}]},
    "command: odd words": {"argv": [ODD, f"--{ODD}", 1, None, [ODD]]},
    "env: odd names": {"env": {ODD: ODD, "": 1, "X": [ODD]}},
    "libraries: other types": {"packages": [1], "sources": {"vime": [1], "rl_engine": ODD}, "torch": [ODD]},
    "analysis: other types": {"trials": 1, "gates": [1]},
}
PARTS: Final = b'{"schema":1,"parts":{"model":{"files":{"a":[]},"kind":1,"name":[],"source":{},"made":{}}}}'
PUT: Final[Mapping[str, bytes]] = {
    "prepared: other types": PARTS,
    "submission: other types": b'{"schema":1,"cluster":[],"details":{"a":1}}',
    "submission: a cluster that is none": b'{"schema":1,"cluster":"moon","job_id":"1","submitted_at":"x","details":{}}',
    "agent-log: other types": b'{"allocation":[],"t":1}\n{"allocation":"a","t":"2026-01-01T00:00:00Z"}\n"allocation"\n'
    + b'["allocation"' * 900,
}
WORLD: Final = b'"rank":0,"world_size":1000000000000000000,"trainer":"x","platform":"cuda"}\n'
APPENDED: Final[Mapping[str, bytes]] = {
    "ops: memory of 400 digits": step(memory=b'"peak_allocated_bytes":%d' % BIG, number=b"5"),
    "ops: calls of 19 digits": step(calls=b'"logp":{"calls":%d}' % (2**63 - 1), number=b"5"),
    "ops: a world of 10^18": b'{"event":"install","schema":1,"mode":"off","is_requested":true,"ops":[],' + WORLD,
    "ops: times beyond all": step(b'"a":1e308,"b":1e400', number=b"5"),
    "ops: odd texts": engine("decision", op=ODD, implementation=ODD, version=ODD, reason=ODD, is_rl_kernel=True),
    "telemetry: memory of 400 digits": b'{"t":1,"trial":"%s","rss_bytes":%d}\n' % (TRIAL.encode(), BIG),
    "telemetry: infinities": b'{"t":Infinity,"trial":"a"}\n{"t":1e999,"trial":"a","rss_bytes":NaN}\n',
    "log: numbers beyond all": b"".join(
        PREFIX + b"perf %d: {'perf/step_time': %s, 'perf/train_time': 1e308}\n" % (number, value)
        for number, value in enumerate((b"1e308", b"nan", b"inf", b"-inf", b"1e-320", b"9" * 64))
    ),
    "log: odd names": PREFIX + f"perf 0: {{'perf/{ODD[1:]}': 1, 'perf/step_time': 1}}\n".encode(),
}
# Records of engines, which only the base with engines has.
CONTRACT: Final = (data_dir("manifests") / "contracts" / "agreement.yaml").read_text()
ENGINES: Final[Mapping[str, bytes]] = {
    **{f"engines: {what}": body for what, body in BODIES.items()},
    "engines: a contract that is none": begin("- [" * 20_000),
    "engines: a contract of aliases": begin("schema: 1\na: &a [x]\nbounds: [*a, *a]\n"),
    "engines: a contract of numbers": begin("schema: 1\nbounds: [{compares: 1, dtype: .inf, within: -.nan}]\n"),
    "engines: two contracts": begin(CONTRACT) + begin("schema: 1\nbounds: []\n"),
    "engines: a step that is not planned": begin(CONTRACT) + engine("log_probs", step=10**6, values=[]),
    "engines: other engines": begin(CONTRACT) + engine("log_probs", engine=ODD, case=ODD, values=[[0.5]]),
    "engines: other types": begin(CONTRACT)
    + b"".join(engine(event, values={}, norms=1, rows="x", tokens=[ODD], experts=[[BIG]], sha256=[])
               for event in ("inputs", "weights", "routing", "layers", "log_probs", "skipped", "row")),
    "engines: numbers beyond all": begin(CONTRACT)
    + b"".join(engine("log_probs", engine=name, values=[[1e308, -1e308, BIG]]) for name in ("training", "rollout")),
}  # fmt: skip
CALLS: Final = b",".join(b'"%d":{}' % number for number in range(16))
NUMBERS: Final = b",".join(b'"%d":0' % number for number in range(14))
ROW: Final = PREFIX + b"perf #: {'perf/x': 1}\n"
HEAVY_PUT: Final[Mapping[str, Data]] = {
    "command: 100 MB of lists": fill(100 * MIB, b"[],", b'{"argv":[', b"[]]}"),
    "command: 4 MB of flags": fill(4 * MIB - 99, b'"--#",', b'{"schema":1,"argv":[', b'""]}'),
    "env: 4 MB of variables": fill(4 * MIB - 99, b'"A#":"1",', b'{"schema":1,"env":{', b'"B":"1"}}'),
    "analysis: 30 MB of texts": fill(29 * MIB, b'"aaaa",', b'{"schema":1,"x":[', b"0]}"),
    "checksums: empty lines": b"\n" * 350_000,
    "checksums: 180000 files that are not there": fill(13 * MIB, b"0" * 64 + b"  #\n"),
    "engines: 100 MB of lists": fill(100 * MIB, b"[],", begin(CONTRACT) + b'{"event":"log_probs","values":[', b"0]}"),
    "engines: rows of one number": fill(20 * MIB, engine("log_probs", values=[[0.5]], case="#"), begin(CONTRACT)),
    "engines: empty tensors": fill(20 * MIB, engine("log_probs", values=[], case="#"), begin(CONTRACT)),
    "engines: inputs without end": fill(20 * MIB, engine("inputs", engine="#", samples=[[]] * 9), begin(CONTRACT)),
}
TEXTS: Final = fill(32_000, b'"#":"",', b"", b'"a":1')
HEAVY_APPENDED: Final[Mapping[str, Data]] = {
    "ops: one line of 100 MB": fill(100 * MIB, b"1,", b'{"event":"kernels","names":[', b'""]}\n'),
    "ops: one line of 30 MB": fill(30 * MIB, b'"",', b'{"event":"kernels","names":[', b'""]}\n'),
    "ops: lines of 1 MB": times(28, fill(MIB - 99, b"1,", b'{"event":"kernels","names":[', b'""]}\n')),
    "ops: lines of 64 KB": times(100, lambda: step(TEXTS(), calls=b'"x":{},' * 4571 + b'"y":{}', number=b"5")),
    "ops: 330000 empty steps": fill(20 * MIB, step()),
    "ops: steps full of calls": fill(28 * MIB, step(calls=CALLS)),
    "ops: steps full of numbers": fill(28 * MIB, step(NUMBERS, NUMBERS.replace(b'":', b'x":'))),
    "ops: a timer for every line": fill(8 * MIB, step(b'"#":1', b'"#":1')),
    "ops: 70000 decisions": fill(10 * MIB, engine("decision", op="#", implementation="#", version="", reason="#")),
    "ops: 350000 ends": b'{"event":"end"}\n' * 350_000,
    "log: a row that grows with each line": fill(4 * MIB, PREFIX + b"perf 0: {'perf/#': #, 'perf/-#': 0}\n"),
    "log: a line for each row": fill(9 * MIB, ROW),
    "log: contradictions": fill(9 * MIB, PREFIX + b"perf 9: {'perf/x': #}\n"),
    "log: one message of 6 MB": fill(6 * MIB, b"'perf/#': 1, ", PREFIX + b"perf 9: {", b"}\n"),
    "log: one message of 30 MB": fill(30 * MIB, b"'perf/x': 1, ", PREFIX + b"perf 9: {", b"}\n"),
    "log: messages of 1 MB": times(6, fill(MIB - 99, b"'perf/#': 1, ", PREFIX + b"perf 9: {", b"'z': 1}\n")),
    "log: one line of prefixes": fill(30 * MIB, PREFIX),
    "log: lines that look like messages": b"0: {'{\n" * 395_000,
    "log: one line that looks like messages": fill(30 * MIB, b"0: {'perf/"),
    "log: brackets": fill(30 * MIB, b"[(", PREFIX + b"perf 9: {'perf/x': ", b"\n"),
    "log: actors": fill(30 * MIB, b"(a pid=1) "),
    "log: memory": fill(28 * MIB, PREFIX + b"[Rank 0] Memory-Usage a: {'used_GB': 1, 'allocated_GB': 1}\n"),
    "log: timers": fill(9 * MIB, PREFIX + b"Timer a# end (elapsed: 1.0s)\n"),
    "log: zeros": bytes(30 * MIB),
    "telemetry: a trial a line": fill(8 * MIB, b'{"t":1,"trial":"#"}\n'),
    "telemetry: 370000 samples": b'{"t":1,"trial":"%s"}\n' % TRIAL.encode() * 370_000,
    "telemetry: lines of 1 MB": times(28, fill(MIB - 99, b"{},", b'{"t":1,"gpus":[', b"{}]}\n")),
    "agent-log: 6 MB of events": fill(6 * MIB, b'{"allocation":"#","t":"#"}\n'),
}
FINDING: Final = {"level": "warning", "where": "x", "expected": "", "found": ""}
FILE: Final = {"size_bytes": 1, "sha256": "", "ends_sha256": ""}


def small_changes() -> dict[str, Change]:
    """List the changes that are refused or skipped at once."""
    found = {f"{name}: {what}": put(path, body) for name, path in FILES.items() for what, body in BODIES.items()}
    for name, path in (FILES | OTHERS).items():
        found |= {f"{name}: {kind}": become(path, kind) for kind in ("a folder", "missing")}
        found[f"{name}: bytes"] = put(path, bytes(range(256)) * 8)
    for path in ("trials", "nodes", f"trials/{TRIAL}", "nodes/node0", "analysis", f"trials/{TRIAL}/ops"):
        found[f"{path}: a file"] = become(path, "a file")
    return found | {
        **{name: edit(_path(name), values) for name, values in EDITED.items()},
        **{name: put(_path(name), data) for name, data in PUT.items()},
        **{name: append(_path(name), data) for name, data in APPENDED.items()},
        "ops: a rank of 200 digits": put(f"trials/{TRIAL}/ops/{'9' * 200}.jsonl", b'{"event":"end"}\n'),
        "plan: 10^9 optimizer steps a rollout": replan(
            grpo={"num_steps_per_rollout": 10**9, "rollout_batch_size": 10**9, "n_samples_per_prompt": 2}
        ),
        "plan: 256 trials of 110000 steps": replan(
            measure={"pairs": 64, "control_pairs": 64, "scored_steps": 10**5, "warmup_steps": 10**4}
        ),
    }


def engine_changes() -> dict[str, Change]:
    """List the changes to records of engines; the last ones are heavy."""
    found = {name: put(PATHS["engines"], data) for name, data in ENGINES.items()}
    found |= {f"engines: {kind}": become(PATHS["engines"], kind) for kind in ("a folder", "missing")}
    heavy = {name: data for name, data in HEAVY_PUT.items() if name.startswith("engines")}
    return found | {name: put(PATHS["engines"], data) for name, data in heavy.items()}


def heavy_changes() -> dict[str, Change]:
    """List the changes that cost most for their size: below 1 MB each, up to 32 MiB when inflated, or far more."""
    found: dict[str, Change] = {}
    for name, path in FILES.items():
        for what, size, item in (
            ("30 MB of lists", 30, b"[],"),
            ("4 MB of lists", 4, b"[],"),
            ("texts", 4, b'"aaaa",'),
        ):
            found[f"{name}: {what}"] = put(path, fill(size * MIB - 99, item, b'{"schema":1,"x":[', b"0]}"))
    found |= {name: put(_path(name), data) for name, data in HEAVY_PUT.items() if not name.startswith("engines")}
    found |= {name: append(_path(name), data) for name, data in HEAVY_APPENDED.items()}
    secret = {"X": "sk-" * 400_000, "Y": "a." * 400_000 + "@"}
    files = {str(number): FILE for number in range(30_000)}
    part = {"schema": 1, "kind": "model", "name": "x", "source": {}, "made": {}, "digest": "", "files": files}
    line = b'{"event":"install","schema":1,"mode":"off","is_requested":true,"ops":[],"rank":#,"world_size":8000}\n'
    return found | {
        "env: a value that looks like a secret": edit(FILES["env"], {"env": secret}),
        "preflight: 50000 findings": edit(FILES["preflight"], {"findings": [FINDING] * 50_000}),
        "prepared: 30000 files": put(FILES["prepared"], json.dumps({"schema": 1, "parts": {"model": part}}).encode()),
        "plan: 1 MB of sources": edit(FILES["plan"], {"sources": {f"a.{n:x}": "--set a" for n in range(40_000)}}),
        "plan: sources that are numbers": edit(FILES["plan"], {"sources": {f"{n:x}": 1 for n in range(60_000)}}),
        "plan: 9000 claims": edit(FILES["plan"], {f"{RUN}.may_claim": ["x" * 90] * 9_000}),
        "plan: 30000 layouts": edit(FILES["plan"], {f"{RUN}.layouts": {f"a{n}": {} for n in range(30_000)}}),
        "plan: 20000 steps in 2 trials": replan(measure={"scored_steps": 10_000, "warmup_steps": 0}),
        "plan: 20000 steps in 256 trials": replan(
            measure={"pairs": 64, "control_pairs": 64, "scored_steps": 78, "warmup_steps": 0}, has_logs=True
        ),
        "ops: 8000 ranks": put_files(8000, f"trials/{TRIAL}/ops/#.jsonl", line),
        "manifest: 4 MB of facts": edit(FILES["manifest"], {"sections.gpu": {f"{n:x}": 0 for n in range(250_000)}}),
        "manifest: a text of 4 MB": edit(FILES["manifest"], {"sections.gpu.topology_text": "x" * (4 * MIB - 999)}),
        "nodes: 20000 facts, 200 others": put_nodes(200, 20_000, 1),
        "nodes: 5000 facts, 4000 others": put_nodes(4000, 5000, 1),
        "nodes: 5000 unknown facts, 4000 others": put_nodes(4000, 5000, 1, is_known=False),
        "nodes: 80 of 5000 facts": put_nodes(80, 5000, 5000),
        "trials: 9000 that are not planned": put_files(9000, "trials/9#-p9-enabled"),
        "libraries: 9000 ranks": put_files(9000, f"trials/{TRIAL}/libraries/#.json"),
        "files: 9500": put_files(9500, "scheduler/#"),
        "files: 50000": put_files(50_000, "scheduler/#"),
        "files: 5000 480 folders deep": put_files(5000, "a/" * 480 + "#"),
    }


def _path(name: str) -> str:
    return PATHS[name.partition(":")[0]]


ALIASES: Final = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
PLANTED: Final = json.dumps(f"key{ODD[1:]}\r\nrlk-repro: FORGED").encode()
AUTHORED: Final[Mapping[str, bytes]] = {
    **BODIES,
    "aliases": ("a0: &a0 x\n" + ALIASES).encode(),
    "its own alias": b"&a [*a]",
    "tags": b"schema: !!python/object/apply:os.system [touch /tmp/owned]\n",
    "text with controls": f"schema: 1\nrun: {ODD[1:]!r}\nstack: {ODD[1:]!r}\n".encode(),
    "planted keys and values": b"".join(
        b"%s: %s\n" % (name, PLANTED) for name in (b"run", b"stack", b"schema", PLANTED)
    )
    + b"purpose: [%s]\nprofile: %s\n" % (PLANTED, PLANTED),
    "a control": b"a: \x1b[2J\n",
    "a long key": b"k" * 5000 + b": 1\n",
    "1 MB of keys": fill(MIB, b"k#: 1\n")(),
    "bytes": bytes(range(256)),
}
