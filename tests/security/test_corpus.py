"""Every reading command answers or refuses every hostile file, in little time and memory.

It says nothing raw and leaves nothing.  Commands run in a sandbox whose audit hook sees programs and writes.
"""

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlk_repro.rundir.manifest import MAX_FACTS
from rlk_repro.rundir.paths import RunDir
from tests import ROOT
from tests.prepare.test_stored_rollouts import hostile_rollouts
from tests.security import corpus
from tests.security.hostile import FILES, OTHERS, become, copy_run, make_agreement, make_bundle, pack
from tests.security.sandbox import INSTALL, Outcome, Sandbox

SMALL, HEAVY, ENGINES = corpus.small_changes(), corpus.heavy_changes(), corpus.engine_changes()
# Each test run tries two bodies for each file; the other bodies reach the same code.
LATER = tuple(f": {body}" for body in corpus.BODIES if body not in {"levels", "key-twice"})
QUICK = [name for name in SMALL if not name.endswith(LATER)]
MOST_BUNDLE_BYTES = 10**6
Commands = tuple[tuple[str, ...], ...]
OF_FOLDERS = ("report", "verify", "status", "logs")
# What a reader says of a bundle that once took minutes or gigabytes; the others get a report.
SAID = {
    "plan: 256 trials of 110000 steps": "expected at most 20000 steps in total, including warm-up",
    "nodes: 20000 facts, 200 others": f"too many facts for one node, got 20000, expected at most {MAX_FACTS}",
    "command: 100 MB of lists": "refused: a compression bomb, got '100.",
    "ops: one line of 100 MB": "refused: a compression bomb, got '100.",
    "command: 30 MB of lists": "",
    "ops: one line of 30 MB": "",
    "log: a row that grows with each line": "",
    "plan: 10^9 optimizer steps a rollout": "",
}


def read_with_all(
    sandbox: Sandbox, bundle: Path, run_dir: RunDir, honest: RunDir, commands: Commands = corpus.READERS + corpus.JUDGES
) -> Iterator[Outcome]:
    places = {"{out}": str(bundle.parent / "out"), "{other}": str(honest.bundle)}
    for command in commands:
        words = [places.get(word, word) for word in command]
        yield sandbox.check(*words, bundle)
        if command[0] != "index":
            yield sandbox.check(*words, bundle, "--json")
    for command_name in OF_FOLDERS:
        sandbox.check(command_name, run_dir.root)


@pytest.fixture(scope="module")
def agreement(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_agreement(tmp_path_factory.mktemp("agreement"))


def test_every_reader_reads_a_valid_run(sandbox: Sandbox, honest: RunDir, case: Path) -> None:
    run_dir, bundle = make_bundle(honest, case, lambda _: None)
    assert {outcome.code for outcome in read_with_all(sandbox, bundle, run_dir, honest, corpus.READERS)} == {0}


@pytest.mark.parametrize("name", QUICK)
def test_a_reader_answers_or_refuses(name: str, sandbox: Sandbox, honest: RunDir, case: Path) -> None:
    _, sealed = make_bundle(honest, case / "sealed", SMALL[name])
    sandbox.check("replay", sealed, "--dry-run")
    run_dir, unsealed = make_bundle(honest, case / "unsealed", SMALL[name], is_sealed=False)
    sandbox.check("report", unsealed, "-o", case / "report")
    if name.startswith(("plan", "submission", "state")):
        sandbox.check("status", run_dir.root)


@pytest.mark.parametrize("name", [name for name in ENGINES if not name.endswith(LATER)])
def test_records_of_engines_are_read_or_refused(name: str, sandbox: Sandbox, agreement: RunDir, case: Path) -> None:
    _, bundle = make_bundle(agreement, case, ENGINES[name], is_sealed=False)
    for words in (("agreement", bundle), ("report", bundle, "-o", case / "out"), ("diff", bundle, bundle, "--json")):
        assert sandbox.check(*words).code in {1, 5}


@pytest.mark.parametrize("name", SAID)
def test_a_small_bundle_costs_little(name: str, sandbox: Sandbox, honest: RunDir, case: Path) -> None:
    _, bundle = make_bundle(honest, case, (SMALL | HEAVY)[name], is_sealed=False)
    assert bundle.stat().st_size < MOST_BUNDLE_BYTES
    outcome = sandbox.check("report", bundle, "-o", case / "report")
    assert outcome.code == (5 if SAID[name] else 1), outcome.err
    assert SAID[name] in outcome.err


def test_many_files_below_many_folders_are_registered_once(sandbox: Sandbox, case: Path) -> None:
    bundle = case / "deep.tgz"
    bundle.write_bytes(gzip.compress(pack({f"{'a/' * 30}{number}": b"" for number in range(5000)})))
    outcome = sandbox.run("verify", bundle)
    assert (outcome.is_bug, outcome.cpu_s < 5) == (False, True)


@pytest.mark.parametrize("name", FILES | OTHERS)
def test_no_reader_waits_for_a_pipe(name: str, sandbox: Sandbox, honest: RunDir, case: Path) -> None:
    run_dir = copy_run(honest, case)
    become((FILES | OTHERS)[name], "a pipe")(run_dir)
    for command in ("verify", "report", "status"):
        sandbox.check(command, run_dir.root)


@pytest.mark.parametrize("kind", corpus.OF_AUTHORS)
@pytest.mark.parametrize("what", corpus.AUTHORED)
def test_an_authors_file_is_refused_with_its_name(kind: str, what: str, sandbox: Sandbox, case: Path) -> None:
    file = case / "theirs.yaml"
    file.write_bytes(corpus.AUTHORED[what])
    for command in corpus.OF_AUTHORS[kind] + corpus.STARTING.get(kind, ()):
        argv = [str(file) if word == "{file}" else word for word in command]
        outcome = sandbox.check(*argv)
        assert (outcome.code, file.name in outcome.err) == (2, True), outcome.err
        assert len(outcome.err) < 3000
        if command[0] != INSTALL:
            assert sandbox.check(*argv, "--json").code == 2


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_foreign_files_of_prepare_are_refused(sandbox: Sandbox, case: Path) -> None:
    for path in hostile_rollouts(case, case / "mark"):
        assert sandbox.check("prepare-file", path).code == 5, path
    assert not (case / "mark").exists()


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize("name", SMALL | ENGINES)
def test_every_reader_answers_or_refuses(
    name: str, sandbox: Sandbox, honest: RunDir, agreement: RunDir, case: Path
) -> None:
    run_dir, bundle = make_bundle(agreement if name in ENGINES else honest, case, (SMALL | ENGINES)[name])
    list(read_with_all(sandbox, bundle, run_dir, honest))


@pytest.mark.real
@pytest.mark.timeout(900)  # some 25 commands, each with up to 50,000 files and a limit of its own
@pytest.mark.parametrize("name", [name if number % 6 == 0 else pytest.param(name, marks=pytest.mark.long)
                                  for number, name in enumerate(HEAVY)])  # fmt: skip
def test_no_small_bundle_exhausts_the_machine(name: str, sandbox: Sandbox, honest: RunDir, case: Path) -> None:
    run_dir, bundle = make_bundle(honest, case / "sealed", HEAVY[name])
    assert bundle.stat().st_size <= MOST_BUNDLE_BYTES
    list(read_with_all(sandbox, bundle, run_dir, honest))
    _, bundle = make_bundle(honest, case / "unsealed", HEAVY[name], is_sealed=False)
    sandbox.check("report", bundle, "-o", case / "report")


def test_every_statement_of_the_security_page_names_tests_that_exist() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    groups = re.findall(r"\(([^()\[\]]*)", page)
    numbers = {number for group in groups for number in re.findall(r"\b\d\d\b", group)}
    names = {name for group in groups for name in re.findall(r"\b([a-z]+(?:/[a-z_0-9]+)+)\b(?!\.)", group)}
    missing = [number for number in numbers if not list((ROOT / "tests/security").glob(f"test_{number}_*.py"))]
    places = {name: ROOT / "tests" / Path(name).parent / f"test_{Path(name).name}.py" for name in names}
    missing += [name for name, place in places.items() if not place.is_file()]
    assert missing == []
    parts = page.partition("## What run files")[0] + page.partition("## What a seal")[2]
    bullets = re.findall(r"^- .*(?:\n  .*)*", parts, re.MULTILINE)
    named = re.compile(r"\((?:\d\d|corpus|[a-z]+(?:/[a-z_0-9]+)+)[,)]|\[the bundle\]")
    assert [bullet for bullet in bullets if not named.search(bullet)] == []
