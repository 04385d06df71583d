"""A stack as an environment: the steps of its image in their order, resumed after an interruption."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rlk_repro.base import proc
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, SpecError
from rlk_repro.images import environment, lock
from rlk_repro.images.build import ROOT, make_build
from rlk_repro.images.environment import KEPT, STEPS, create
from rlk_repro.images.stacks import get_stack
from rlk_repro.probes import container
from rlk_repro.spec import Stack
from tests.support.waiting import is_written, wait_until

STACK = "2026-11"
PLATFORM = "cuda-amd64"


class Called(NamedTuple):
    argv: list[str]
    environ: dict[str, str]


class Machine:
    """Writes down what is run; ``failing`` is the word that makes a command fail."""

    def __init__(self) -> None:
        self.calls: list[Called] = []
        self.failing = ""

    def __call__(self, argv: Sequence[str], environ: dict[str, str]) -> int:
        self.calls.append(Called(list(argv), dict(environ)))
        if "venv" in argv:
            python = Path(argv[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.write_text("#!/bin/sh\necho 3.12\n")
            python.chmod(0o755)
        return int(self.failing in argv)

    @property
    def steps(self) -> list[str]:
        return [call.argv[-1] for call in self.calls if "tools.image_build" in call.argv]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(environment, "_shown", made)
    monkeypatch.setattr(environment, "require_clean", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == "uv" else None)
    return made


@pytest.fixture
def stack() -> Stack:
    return get_stack(STACK)


def test_the_steps_are_those_of_the_image() -> None:
    text = (ROOT / "docker" / "Dockerfile.locked").read_text()
    assert tuple(re.findall(r"^(?:RUN| &&) python -m tools\.image_build (\S+)", text, re.MULTILINE)) == STEPS
    assert f'RL_KERNEL_ARCHITECTURES="{environment.ARCHITECTURES}"' in text


def test_packages_are_installed_by_hash_and_then_every_step_runs(
    machine: Machine, stack: Stack, tmp_path: Path
) -> None:
    create(stack, PLATFORM, tmp_path / "env")
    venv, packages = machine.calls[:2]
    assert venv.argv[-3:] == ["--python", "3.12", str(tmp_path / "env")]
    assert {"--require-hashes", "--no-deps", str(lock.lock_path(STACK, PLATFORM))} <= set(packages.argv)
    assert machine.steps == list(STEPS)
    environ = machine.calls[-1].environ
    assert environ["BASE_DIGEST"] == stack.locks["cuda-amd64"]
    assert environ["BASE_NAME"] == "requirements/2026-11-cuda-amd64.txt"
    assert environ["RL_KERNEL_COMMIT"] == stack.pins["rl_kernel"].commit
    assert (tmp_path / "env" / container.LOCK).read_bytes() == lock.lock_path(STACK, PLATFORM).read_bytes()


def test_a_repeated_command_skips_finished_steps(machine: Machine, stack: Stack, tmp_path: Path) -> None:
    machine.failing = "rl-kernel"
    with pytest.raises(CheckFailed, match="step rl-kernel"):
        create(stack, PLATFORM, tmp_path / "env")
    machine.calls.clear()
    machine.failing = ""
    create(stack, PLATFORM, tmp_path / "env")
    assert machine.steps == ["inputs", "package", "rl-kernel", "imports", "sbom", "record"]
    machine.calls.clear()
    create(stack, PLATFORM, tmp_path / "env")
    assert machine.steps == [step for step in STEPS if step not in KEPT]


def test_another_commit_is_built_anew(machine: Machine, stack: Stack, tmp_path: Path) -> None:
    create(stack, PLATFORM, tmp_path / "env")
    pin = stack.pins["rl_kernel"].model_copy(update={"commit": "a" * 40})
    machine.calls.clear()
    create(stack.model_copy(update={"pins": {**stack.pins, "rl_kernel": pin}}), PLATFORM, tmp_path / "env")
    assert machine.steps == list(STEPS)


def test_a_bundle_takes_the_place_of_network_and_repositories(machine: Machine, stack: Stack, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    create(stack, PLATFORM, tmp_path / "env", bundle=bundle)
    assert {"--no-index", "--find-links", str(bundle / "wheels")} <= set(machine.calls[1].argv)
    environ = machine.calls[-1].environ
    assert (environ["PIP_NO_INDEX"], environ["GIT_ALLOW_PROTOCOL"]) == ("1", "file")
    config = Path(environ["XDG_CONFIG_HOME"], "git", "config").read_text()
    assert config.count("insteadOf") == 3
    assert f'[url "{bundle}/git/vime.git"]\n\tinsteadOf = https://github.com/vllm-project/vime\n' in config


def test_a_stack_without_a_lock_is_refused(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="has no lock"):
        create(get_stack("2026-07"), None, tmp_path / "env")
    assert machine.calls == []


def test_a_disk_that_is_too_small_is_refused_before_anything_is_fetched(
    machine: Machine, stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 5 * 10**9})())
    with pytest.raises(EnvironmentMissing, match="too little space"):
        create(stack, PLATFORM, tmp_path / "env")
    assert machine.calls == []


def test_the_image_is_built_from_its_own_file_with_the_base_by_digest(stack: Stack) -> None:
    for platform in ("cuda-amd64", "cuda-arm64"):
        build = make_build(stack, platform, engine="buildah", tag=None, base=None)
        assert build.dockerfile.name == "Dockerfile.locked"
        assert build.arguments["BASE_DIGEST"] == stack.bases["cuda-amd64"].digest
        assert build.arguments["IMAGE_PLATFORM"] == platform
        assert "--layers" in build.argv  # else the packages are in one layer with all the rest


def test_an_environment_has_its_record_in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert container.find_record() == container.PROVENANCE
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    assert container.find_record() == container.PROVENANCE
    (tmp_path / container.LOCK).touch()
    assert container.find_record() == str(tmp_path / "provenance.json")
    assert container.find_record(tmp_path / "root") == container.PROVENANCE
    (tmp_path / "provenance.json").write_text(json.dumps({"commits": {"vime": "a" * 40}}))
    assert container.load_provenance(Path("/")) == {"commits": {"vime": "a" * 40}}


def test_other_folders_are_refused_by_env_check_and_export(stack: Stack, tmp_path: Path) -> None:
    calls: list[Any] = [
        lambda: environment.check(tmp_path, STACK, None),
        lambda: environment.export(stack, tmp_path, tmp_path / "out"),
    ]
    for call in calls:
        with pytest.raises(EnvironmentMissing, match="is not an environment of a stack"):
            call()


@pytest.mark.parametrize("code", [0, 1, 2, 3, 127])
def test_the_exit_code_of_the_environments_check_is_passed_on(tmp_path: Path, code: int) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / container.LOCK).touch()
    python = tmp_path / "bin" / "python"
    python.write_text(f"#!/bin/sh\nexit {code}\n")
    python.chmod(0o755)
    if code != 127:
        assert environment.check(tmp_path, "nope", None) == code
        return
    with pytest.raises(EnvironmentMissing, match="is not an environment of a stack"):
        environment.check(tmp_path, "nope", None)


def test_relative_folders_are_the_callers(
    machine: Machine, stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    create(stack, PLATFORM, Path("env"), bundle=Path("bundle"))
    venv, packages = machine.calls[:2]
    assert venv.argv[-1] == str(tmp_path / "env")
    assert str(tmp_path / "bundle" / "wheels") in packages.argv
    assert machine.calls[-1].environ["PIP_FIND_LINKS"] == str(tmp_path / "bundle" / "wheels")
    machine.calls.clear()
    environment.export(stack.model_copy(update={"pins": {}}), Path("env"), Path("out"))
    assert [Path(call.argv[-1]).name for call in machine.calls] == [container.LOCK, "sbom.txt", "sources.txt"]
    for call in machine.calls:
        assert call.argv[call.argv.index("--dest") + 1] == str(tmp_path / "out" / "wheels")
    sums = [line.split("  ")[1] for line in (tmp_path / "out" / "SHA256SUMS").read_text().splitlines()]
    assert sums == [container.LOCK, "sources.txt"]


def test_no_compiler_outlives_a_command_that_was_ended(tmp_path: Path) -> None:
    """A step's compilers are in process groups of their own, as ninja starts them."""
    pid = tmp_path / "pid"
    step = f"setsid sh -c 'echo $$ >{pid}; exec sleep 60' & sleep 60"
    code = f"from rlk_repro.images import environment\nenvironment._shown(['sh', '-c', {step!r}], {{}})"
    process = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: is_written(pid))
    process.terminate()
    process.wait(20)
    wait_until(lambda: not proc.signal_process(int(pid.read_text()), signal.SIGCONT))
