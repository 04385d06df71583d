"""No text of a stranger reaches a terminal raw: each text of a bundle is replaced by one with control sequences."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlk_repro.base.escapes import escape_json, printable, printable_lines
from rlk_repro.base.files import write_json
from rlk_repro.base.resources import data_dir
from rlk_repro.rundir.paths import RunDir
from tests.security.hostile import fit_hashes
from tests.support.make_run import Recipe, finish_run, make_run, reseal

Call = Callable[..., tuple[int, str, str]]
# The text sets the title and clears the screen, and has a C1 control, an override, an isolate, a zero-width character,
# a line break and half a character.
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egpj\u2066\u200b\u2028\x85\r\nrlk-repro: FORGED\n  blocking: FORGED\ud800"
SMALL = Recipe(settings=("measure.pairs=1", "measure.scored_steps=2", "measure.warmup_steps=1"))
PARTS = 6
"""The texts are split into this many tests, so that several workers can share them."""
_COUNTED = re.compile(r"\.\d+")


def walk(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """List every text of a JSON value with its path; of a list, the first item of each shape comes first."""
    if isinstance(value, str):
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from walk(item, f"{path}.{key}")


def plant(value: Any, path: str) -> None:
    """Append the evil text to the text at a path."""
    *parents, last = path[1:].split(".")
    for part in parents:
        value = value[int(part) if isinstance(value, list) else part]
    key = int(last) if isinstance(value, list) else last
    value[key] = f"{value[key]}{EVIL}"


def list_fields(run_dir: RunDir) -> Iterator[tuple[str, str]]:
    """List file and path of one text of every kind; a key with a dot is covered by its parent."""
    met = set()
    for file in sorted(run_dir.root.rglob("*.json*")):
        name = str(file.relative_to(run_dir.root))
        lines = file.read_text().splitlines()
        values = [json.loads(line) for line in lines] if file.suffix == ".jsonl" else json.loads(file.read_text())
        for path, _ in walk(values):
            kind = (re.sub(r"\d+[^/]*", "*", name), _COUNTED.sub(".*", path))
            if kind not in met:
                met.add(kind)
                yield name, path


def write_planted(run_dir: RunDir, name: str, path: str) -> bool:
    """Plant one text; return whether the bundle has a text there."""
    file = run_dir.root / name
    lines = file.suffix == ".jsonl"
    value: Any = [json.loads(line) for line in file.read_text().splitlines()] if lines else json.loads(file.read_text())
    try:
        plant(value, path)
    except (KeyError, ValueError):  # the key has a dot in it
        return False
    if name == run_dir.plan.name:
        fit_hashes(value)
    text = "".join(f"{json.dumps(item)}\n" for item in value) if lines else json.dumps(value)
    file.write_text(text)
    return True


def check(what: str, *texts: str) -> None:
    for text in texts:
        raw = {char for char in set(text) if not (char.isprintable() or char == "\n")}
        assert not raw, f"{what}: {raw!r} in {text!r}"
        assert "\nrlk-repro: FORGED" not in text, what  # rich wraps long texts below their start


def check_report(what: str, folder: Path) -> None:
    for path in [*folder.glob("*.html"), *folder.glob("*.md")]:
        found = {char for char in set(path.read_text()) if not (char.isprintable() or char in "\n\N{NO-BREAK SPACE}")}
        assert not found, f"{what}: {path.name}: {found!r}"


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run_dir = make_run(tmp_path_factory.mktemp("honest") / "run", SMALL)
    finish_run(run_dir)
    return run_dir


def list_commands(bundle: Path, honest: RunDir, out: Path) -> list[tuple[str, ...]]:
    """List the commands that read bundles; those that print most of them come first."""
    return [
        ("diff", str(bundle), str(honest.bundle)),
        ("report", str(bundle), "-o", str(out)),
        ("inspect", str(bundle)),
        ("verify", str(bundle), "--id", "0" * 64),
        ("replay", str(bundle), "--analyze-only"),
        ("index", str(bundle), str(honest.bundle), "-o", str(out)),
    ]


def run_all(call: Call, what: str, bundle: Path, honest: RunDir, *, is_quick: bool) -> None:
    out = bundle.parent / "out"
    for words in list_commands(bundle, honest, out)[: 2 if is_quick else None]:
        code, *said = call(*words)
        check(f"{what}: {words[0]}", *said)
        assert code != 70, f"{what}: {words[0]}: {said[1]}"
        if not is_quick and words[0] != "index":
            said = list(call(*words, "--json")[1:])
            check(f"{what}: {words[0]} --json", *said)
            for text in filter(None, said):
                json.loads(text)
    check_report(what, out)


def plant_each(call: Call, honest: RunDir, folder: Path, *, part: int = 0, parts: int = 1) -> None:
    """Plant every text in turn, or one share of ``parts`` equal shares of them."""
    fields = list(list_fields(honest))
    assert len(fields) > 60
    for number, (name, path) in enumerate(fields[part::parts]):
        run_dir = RunDir(folder / f"{number}" / "run")
        shutil.copytree(honest.root, run_dir.root)
        if write_planted(run_dir, name, path):
            bundle = reseal(run_dir)
            run_all(call, f"{name}: {path}", run_dir.root if parts > 1 else bundle, honest, is_quick=parts > 1)
        shutil.rmtree(run_dir.root.parent)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_text_of_a_bundle(call: Call, honest: RunDir, tmp_path: Path, part: int) -> None:
    plant_each(call, honest, tmp_path, part=part, parts=PARTS)


@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_text_of_a_bundle_against_every_command(call: Call, honest: RunDir, tmp_path: Path) -> None:
    plant_each(call, honest, tmp_path)


def on_terminal(argv: list[str], **variables: str) -> str:
    """Return what a real program prints on a pseudo terminal without colours, with the program's line ends."""
    leader, follower = pty.openpty()
    environ = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "500", **variables}
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


def plant_all(value: Any, words: Mapping[str, str]) -> Any:
    """Return the value with some of its texts planted, by key."""
    if isinstance(value, dict):
        return {key: f"{item}{words[key]}" if key in words and isinstance(item, str) else plant_all(item, words)
                for key, item in value.items()}  # fmt: skip
    return [plant_all(item, words) for item in value] if isinstance(value, list) else value


@pytest.fixture
def planted(tmp_path: Path, honest: RunDir) -> RunDir:
    """Return every free text of the plan, planted with characters that JSON can hold."""
    run_dir = RunDir(tmp_path / "planted")
    shutil.copytree(honest.root, run_dir.root)
    free = ("purpose", "title", "evidence", "reason", "made_by", "version")
    value = plant_all(json.loads(run_dir.plan.read_text()), dict.fromkeys(free, EVIL.removesuffix("\ud800")))
    value["experiment"]["run"]["may_claim"] = [f"x{EVIL.removesuffix(chr(0xD800))}"]
    value["sources"] = {key: f"{item}\x1b[2J" for key, item in value["sources"].items()}
    fit_hashes(value)
    write_json(run_dir.plan, value)
    manifest = run_dir.node("node0").manifest
    write_json(manifest, plant_all(json.loads(manifest.read_text()), {"driver": EVIL}))
    run_dir.checksums.unlink()
    finish_run(run_dir)
    return run_dir


def test_a_replay_of_planted_texts_on_a_terminal(planted: RunDir) -> None:
    for words in (("--dry-run",), ("--dry-run", "--json"), ("--dry-run", "--cluster", "local")):
        said = on_terminal(["replay", str(planted.root), *words])
        assert "FORGED" in said, "a planted text is shown"
        check(f"replay {words}", said)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    value = yaml.safe_load((data_dir("jobs") / "smoke.yaml").read_text())
    value["purpose"] += EVIL.removesuffix("\ud800")
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(value))
    return path


def test_an_authors_file_is_exact_in_a_pipe_and_harmless_on_a_terminal(call: Call, spec: Path) -> None:
    check("runs show", on_terminal(["runs", "show", str(spec)]))
    code, out, _ = call("runs", "show", str(spec))
    shown = yaml.safe_load(out)
    assert (code, shown["purpose"]) == (0, yaml.safe_load(spec.read_text())["purpose"])
    code, out, _ = call("runs", "show", str(spec), "--json")
    check("runs show --json", out)
    assert json.loads(out)["purpose"] == shown["purpose"]


@pytest.mark.parametrize("kind", ["run", "stack", "hardware", "profile"])
def test_errors_about_planted_files(call: Call, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "evil.yaml"
    key = json.dumps(f"key{EVIL.removesuffix(chr(0xD800))}")
    texts = (f"{key}: 1\n", f"{kind}: {key}\n", f"schema: {key}\n", f"{kind}: x\npurpose: [{key}]\n", "a: \x1b[2J\n")
    for text in texts:
        path.write_text(text)
        for more in ([], ["--json"]):
            code, *said = call("submit", "--run", "smoke", f"--{kind}", str(path), "--dry-run", *more)
            assert code == 2
            check(f"{kind}: {text!r}", *said)


def test_logs_are_exact_in_a_pipe_and_harmless_on_a_terminal(call: Call, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "stranger", SMALL)
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


def test_the_job_of_a_dry_run_is_exact_in_a_pipe_and_harmless_on_a_terminal(call: Call, tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    site = {"profile": "mine", "cluster": "slurm", "hardware": "cpu", "slurm": {"setup": ["echo a\xadb"]}}
    profile.write_text(yaml.safe_dump({**site, "purpose": f"x{EVIL.removesuffix(chr(0xD800))}"}))
    words = ("submit", "--run", "smoke", "--cluster", "slurm", "--profile", str(profile), "--dry-run")
    code, out, err = call(*words)
    assert code == 0, err
    assert "\necho a\xadb\n" in out
    said = on_terminal(list(words))
    assert "\necho a\\xadb\n" in said
    check("submit --dry-run", said.replace("\t", " "))


def test_shown_text_is_the_text_with_escapes() -> None:
    assert printable("a\nb\x1b\x9b\u202e\u2066\u200b\ud800é漢") == "a\\nb\\x1b\\x9b\\u202e\\u2066\\u200b\\ud800é漢"
    assert printable(printable(EVIL)) == printable(EVIL)
    assert printable_lines("a\tb\n\x1b[1;32mc\x1b[0m\x1b[2J") == "a\tb\nc\\x1b[2J"
    for text in (EVIL, "plain", "\U000e0001 tag", "\x7f\x80"):
        escaped = escape_json(json.dumps({"a": text}, ensure_ascii=False))
        assert escaped.isprintable()
        assert json.loads(escaped) == {"a": text}
