"""No text of a stranger reaches a terminal raw: each text of a bundle is replaced by one with control sequences."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.escapes import escape_json, printable, printable_lines
from rlk_repro.base.files import load_json, write_json
from rlk_repro.base.resources import data_dir
from rlk_repro.rundir.paths import RunDir
from tests.security.hostile import HONEST, edit, fit_hashes
from tests.security.sandbox import Sandbox, find_raw
from tests.security.test_corpus import read_with_all
from tests.support.make_run import finish_run, make_run, reseal

Call = Callable[..., tuple[int, str, str]]
# The text sets the title and clears the screen, and has a C1 control, an override, an isolate, a zero-width character,
# a line break and half a character.
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egpj\u2066\u200b\u2028\x85\r\nrlk-repro: FORGED\n  blocking: FORGED\ud800"
TEXT = f"x{EVIL.removesuffix(chr(0xD800))}"
PARTS = 6
"""The texts are split into this many tests, so that several workers can share them."""


def walk(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """List the path of every text of a JSON value."""
    if isinstance(value, str):
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from walk(item, (*path, key))


def load(file: Path) -> Any:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.suffix == ".jsonl" else load_json(file)


def list_fields(run_dir: RunDir) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """List file and path of one text of every kind: items of a list and files of one shape are alike."""
    met = set()
    for file in sorted(run_dir.root.rglob("*.json*")):
        name = str(file.relative_to(run_dir.root))
        for path in walk(load(file)):
            kind = (re.sub(r"\d+[^/]*", "*", name), tuple("*" if isinstance(key, int) else key for key in path))
            if kind not in met:
                met.add(kind)
                yield name, path


def write_planted(run_dir: RunDir, name: str, path: tuple[str | int, ...]) -> None:
    """Append the evil text to the text at a path."""
    file = run_dir.root / name
    value = part = load(file)
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] += EVIL
    if name == run_dir.plan.name:
        fit_hashes(value)
    is_lines = file.suffix == ".jsonl"
    file.write_text("".join(f"{json.dumps(item)}\n" for item in value) if is_lines else json.dumps(value))


def check(what: str, *texts: str) -> None:
    assert [(what, raw, text) for text in texts if (raw := find_raw(text))] == []


FULL = pytest.param(None, marks=[pytest.mark.real, pytest.mark.long, pytest.mark.timeout(1800)])


@pytest.mark.parametrize("part", [*range(PARTS), FULL])
def test_every_text_of_a_bundle(sandbox: Sandbox, honest: RunDir, case: Path, part: int | None) -> None:
    """Plant every text in turn; the parts try two commands with each, and the full test tries every command."""
    run_dir, out = RunDir(case / "run"), case / "out"
    shutil.copytree(honest.root, run_dir.root)
    run_dir.checksums.unlink()
    fields = list(list_fields(honest))
    assert len(fields) > 60
    for name, path in fields if part is None else fields[part::PARTS]:
        before = (run_dir.root / name).read_bytes()
        write_planted(run_dir, name, path)
        if part is None:
            list(read_with_all(sandbox, reseal(run_dir), run_dir, honest))
            shutil.rmtree(run_dir.root / "out", ignore_errors=True)
        # these print most of a bundle; a plan that is refused is refused by both
        elif sandbox.check("report", run_dir.root, "-o", out).code != BundleUnreadable.exit_code:
            sandbox.check("diff", honest.bundle, run_dir.root)
            for page in [*out.glob("*.html"), *out.glob("*.md")]:
                check(f"{name}: {path}: {page.name}", page.read_text().replace("\N{NO-BREAK SPACE}", " "))
        (run_dir.root / name).write_bytes(before)


def on_terminal(argv: list[str]) -> str:
    """Return what a real program prints on a pseudo terminal without colours, with the program's line ends."""
    leader, follower = pty.openpty()
    environ = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "500"}
    process = subprocess.Popen([sys.executable, "-m", "rlk_repro", *argv], stdin=follower, stdout=follower,
                               stderr=follower, env=environ)  # fmt: skip
    os.close(follower)
    pieces = []
    try:
        while piece := os.read(leader, 1 << 16):
            pieces.append(piece)
    except OSError:  # the program has closed its end
        pass
    process.wait()
    os.close(leader)
    return b"".join(pieces).decode(errors="surrogateescape").replace("\r\n", "\n")


def test_a_replay_of_planted_texts_on_a_terminal(tmp_path: Path, honest: RunDir) -> None:
    run_dir = RunDir(tmp_path / "planted")
    shutil.copytree(honest.root, run_dir.root)
    places = ("run.purpose", "stack.purpose", "hardware.title")
    free = {f"experiment.{place}": TEXT for place in places}
    edit("plan.json", {**free, "experiment.run.may_claim": [TEXT], "sources": {"measure.pairs": TEXT}})(run_dir)
    edit("nodes/node0/manifest.json", {"sections.gpu.driver": EVIL})(run_dir)
    run_dir.checksums.unlink()
    finish_run(run_dir)
    for words in (("--dry-run",), ("--dry-run", "--json")):
        said = on_terminal(["replay", str(run_dir.root), *words])
        assert "FORGED" in said, "a planted text is shown"
        check(f"replay {words}", said)


def test_an_authors_files_are_exact_in_a_pipe_and_harmless_on_a_terminal(call: Call, tmp_path: Path) -> None:
    run = yaml.safe_load((data_dir("jobs") / "smoke.yaml").read_text())
    site = {"profile": "mine", "cluster": "slurm", "hardware": "cpu", "slurm": {"setup": ["echo a\xadb"]}}
    files = {"run": run | {"purpose": run["purpose"] + TEXT}, "profile": site | {"purpose": TEXT}}
    for name, value in files.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(value))
    show = ("runs", "show", str(tmp_path / "run.yaml"))
    submit = ("submit", "--run", "smoke", "--profile", str(tmp_path / "profile.yaml"), "--dry-run", "--show-job")
    check("runs show", on_terminal([*show]), call(*show, "--json")[1])
    assert (
        yaml.safe_load(call(*show)[1])["purpose"]
        == json.loads(call(*show, "--json")[1])["purpose"]
        == (files["run"]["purpose"])
    )
    assert "\necho a\xadb\n" in call(*submit)[1]
    said = on_terminal([*submit])
    assert "\necho a\\xadb\n" in said
    check("submit --dry-run", said.replace("\t", " "))


def test_logs_are_exact_in_a_pipe_and_harmless_on_a_terminal(call: Call, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "stranger", HONEST)
    details = {"cluster": "local", "job_id": "1:1", "submitted_at": f"x{EVIL}", "details": {"host": EVIL}}
    write_json(run_dir.submission, {"schema": 1, **details})
    log = run_dir.trial("00-p1-baseline").stdout
    line = "\x1b[32mgreen\x1b[0m\ttab \x1b]0;owned\x07\x1b[2J\x9b31m\u202egpj 50%\r100%"
    log.write_text(f"{line}\n")
    state = {"schema": 1, "phase": "ended", "message": EVIL, "num_trials": 2, "num_steps": 3, "exit_code": 1}
    write_json(run_dir.state, json.loads(json.dumps(state)))
    assert line in call("logs", str(run_dir.root))[1]
    said = on_terminal(["logs", str(run_dir.root)])
    assert r"green  tab \x1b]0;owned\x07\x1b[2J\x9b31m\u202egpj 50%\r100%" in said.replace("\t", "  ")
    check("logs", said.replace("\t", " "))
    check("logs --json", call("logs", str(run_dir.root), "--json")[1])
    for words in (["status"], ["status", "--json"], ["cancel"], ["collect"]):
        check(str(words), *call(*words, str(run_dir.root))[1:])


def test_shown_text_is_the_text_with_escapes() -> None:
    assert printable("a\nb\x1b\x9b\u202e\u2066\u200b\ud800é漢") == "a\\nb\\x1b\\x9b\\u202e\\u2066\\u200b\\ud800é漢"
    assert printable(printable(EVIL)) == printable(EVIL)
    assert printable_lines("a\tb\n\x1b[1;32mc\x1b[0m\x1b[2J") == "a\tb\nc\\x1b[2J"
    for text in (EVIL, "plain", "\U000e0001 tag", "\x7f\x80"):
        escaped = escape_json(json.dumps({"a": text}, ensure_ascii=False))
        assert escaped.isprintable()
        assert json.loads(escaped) == {"a": text}
