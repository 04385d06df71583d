"""Every reading command answers or refuses every hostile bundle, in little time and memory."""

import re
from pathlib import Path

import pytest

from rlk_repro.rundir.paths import RunDir
from tests import ROOT
from tests.security import hostile
from tests.security.sandbox import Outcome, Sandbox

SMALL = hostile.small_changes()
HEAVY = hostile.heavy_changes()
PIPES = {f"{name}: a pipe": hostile.as_pipe(relative) for name, relative in (hostile.FILES | hostile.OTHERS).items()}
# Each test run tries two bodies for each file; the other bodies reach the same code.
QUICK = [
    name
    for name in SMALL
    if not any(name.endswith(f": {body}") for body in hostile.BODIES) or name.endswith((": levels", ": key-twice"))
]
MOST_CPU_S = 20.0
MOST_BYTES = 10**9
MOST_BUNDLE_BYTES = 10**6


def check(sandbox: Sandbox, *argv: str | Path) -> Outcome:
    """Run one command and check its limits."""
    outcome = sandbox.run(*argv)
    left = sandbox.left_in_tmp()
    sandbox.empty_tmp()
    shown = f"{' '.join(map(str, argv))}: exit {outcome.code}, {outcome.cpu_s:.1f} s, {outcome.peak_bytes >> 20} MiB"
    assert not outcome.is_bug, f"{shown}\n{outcome.err[-2000:]}"
    assert outcome.cpu_s <= MOST_CPU_S, shown
    assert outcome.peak_bytes <= MOST_BYTES, shown
    assert not left, shown
    return outcome


def read_with_all(sandbox: Sandbox, bundle: Path, run_dir: RunDir, honest: RunDir) -> None:
    for command in ("verify", "inspect", "report", "replay"):
        options: list[str | Path] = []
        if command == "report":
            options = ["-o", bundle.parent / "report"]
        elif command == "replay":
            options = ["--analyze-only"]
        check(sandbox, command, bundle, *options)
        check(sandbox, command, bundle, *options, "--json")
    check(sandbox, "replay", bundle, "--dry-run")
    check(sandbox, "diff", bundle, honest.bundle)
    check(sandbox, "diff", honest.bundle, bundle, "--json")
    check(sandbox, "report", run_dir.root)
    check(sandbox, "verify", run_dir.root)
    check(sandbox, "status", run_dir.root)
    check(sandbox, "logs", run_dir.root)


def test_every_reader_reads_a_valid_run(sandbox: Sandbox, honest: RunDir, case: Path) -> None:
    run_dir, bundle = hostile.make_bundle(honest, case, lambda _: None)
    read_with_all(sandbox, bundle, run_dir, honest)
    assert check(sandbox, "replay", bundle, "--analyze-only").code == 0


@pytest.mark.parametrize("name", QUICK)
def test_a_reader_answers_or_refuses(name: str, sandbox: Sandbox, honest: RunDir, case: Path) -> None:
    _, sealed = hostile.make_bundle(honest, case / "sealed", SMALL[name])
    check(sandbox, "replay", sealed, "--dry-run")
    run_dir, unsealed = hostile.make_bundle(honest, case / "unsealed", SMALL[name], is_sealed=False)
    check(sandbox, "report", unsealed, "-o", case / "report")
    if name.startswith(("plan", "submission", "state")):
        check(sandbox, "status", run_dir.root)


@pytest.mark.parametrize("name", PIPES)
def test_no_reader_waits_for_a_pipe(name: str, sandbox: Sandbox, honest: RunDir, case: Path) -> None:
    run_dir = hostile.copy_run(honest, case)
    PIPES[name](run_dir)
    for command in ("verify", "report", "status"):
        check(sandbox, command, run_dir.root)


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_every_reader_answers_or_refuses(name: str, sandbox: Sandbox, honest: RunDir, case: Path) -> None:
    run_dir, bundle = hostile.make_bundle(honest, case, SMALL[name])
    read_with_all(sandbox, bundle, run_dir, honest)


@pytest.mark.real
@pytest.mark.parametrize("name", [name if number % 6 == 0 else pytest.param(name, marks=pytest.mark.long)
                                  for number, name in enumerate(HEAVY)])  # fmt: skip
def test_no_small_bundle_exhausts_the_machine(name: str, sandbox: Sandbox, honest: RunDir, case: Path) -> None:
    run_dir, bundle = hostile.make_bundle(honest, case / "sealed", HEAVY[name])
    assert bundle.stat().st_size <= MOST_BUNDLE_BYTES
    read_with_all(sandbox, bundle, run_dir, honest)
    _, bundle = hostile.make_bundle(honest, case / "unsealed", HEAVY[name], is_sealed=False)
    check(sandbox, "report", bundle, "-o", case / "report")


def test_every_statement_of_the_security_page_names_tests_that_exist() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    names = {path.name.split("_")[1] for path in (ROOT / "tests" / "security").glob("test_[0-9]*.py")}
    named = {number for group in re.findall(r"\(([^()]*)\)", page) for number in re.findall(r"\b\d\d\b", group)}
    assert named <= names
    parts = page.partition("## What run files")[0] + page.partition("## What a seal")[2]
    bullets = re.findall(r"^- .*(?:\n  .*)*", parts, re.MULTILINE)
    assert [bullet for bullet in bullets if not re.search(r"\d\d[,)]|tests/", bullet)] == []
