"""A stack as an environment: the steps of its image in their order, resumed after an interruption."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from rlk_repro.base import proc
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, RlkReproError, SpecError
from rlk_repro.base.files import load_json, sha256_bytes, sha256_file, write_json, write_text
from rlk_repro.base.trees import hash_tree
from rlk_repro.cli import app
from rlk_repro.images import build, environment, packed
from rlk_repro.images.build import ROOT, make_build
from rlk_repro.images.environment import KEPT, STEPS, create
from rlk_repro.images.record import Base, ImageRecord, parse_record
from rlk_repro.images.stacks import get_stack, lock_path
from rlk_repro.probes import container
from rlk_repro.spec import Stack
from tests.support.copied_package import mirror_folder
from tests.support.probe_examples import commit_files, git
from tests.support.waiting import is_written, wait_until
from tools.image_build import __main__, locked

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
    monkeypatch.setattr(environment, "require_clean", lambda *_: None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == "uv" else None)
    return made


@pytest.fixture
def stack() -> Stack:
    return get_stack(STACK)


def test_the_steps_are_those_of_the_image() -> None:
    text = (ROOT / "docker" / "Dockerfile.locked").read_text()
    assert tuple(re.findall(r"^(?:RUN| &&) python -m tools\.image_build (\S+)", text, re.MULTILINE)) == STEPS


def test_packages_are_installed_by_hash_and_then_every_step_runs(
    machine: Machine, stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    create(stack, PLATFORM, Path("env"))  # a relative folder is the caller's
    venv, packages = machine.calls[:2]
    assert venv.argv[-3:] == ["--python", "3.12", str(tmp_path / "env")]
    assert {"--require-hashes", "--no-deps", str(lock_path(STACK, PLATFORM))} <= set(packages.argv)
    assert machine.steps == list(STEPS)
    environ = machine.calls[-1].environ
    assert environ["BASE_DIGEST"] == stack.locks["cuda-amd64"]
    assert environ["BASE_NAME"] == "requirements/2026-11-cuda-amd64.txt"
    assert environ["RL_KERNEL_COMMIT"] == stack.pins["rl_kernel"].commit
    assert (tmp_path / "env" / container.LOCK).read_bytes() == lock_path(STACK, PLATFORM).read_bytes()


def test_a_repeated_command_skips_finished_steps(machine: Machine, stack: Stack, tmp_path: Path) -> None:
    machine.failing = "rl-kernel"
    with pytest.raises(CheckFailed, match="step rl-kernel"):
        create(stack, PLATFORM, tmp_path / "env")
    machine.failing = ""
    pin = stack.pins["rl_kernel"].model_copy(update={"commit": "a" * 40})
    other = stack.model_copy(update={"pins": {**stack.pins, "rl_kernel": pin}})
    for made_of, steps in (
        (stack, ["inputs", "package", "rl-kernel", "imports", "record"]),
        (stack, [step for step in STEPS if step not in KEPT]),
        (other, list(STEPS)),
    ):
        machine.calls.clear()
        create(made_of, PLATFORM, tmp_path / "env")
        assert machine.steps == steps


def test_a_checkout_that_moves_during_the_build_ends_it(
    machine: Machine, stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "require_clean", build.require_clean)
    heads = {"rev-parse": lambda: ("b" if "package" in machine.steps else "a") * 40, "log": lambda: f"{'a' * 40} 0"}
    monkeypatch.setattr(build, "_git", lambda word, *_: heads.get(word, str)())
    with pytest.raises(CheckFailed, match="moved to another commit during the build"):
        create(stack, PLATFORM, tmp_path / "env")
    assert machine.steps == list(STEPS[: STEPS.index("package") + 1])


def test_nothing_is_fetched_without_a_lock_or_for_a_disk_that_is_too_small(
    machine: Machine, stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecError, match="has no lock"):
        create(get_stack("2026-07"), None, tmp_path / "env")
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


def test_the_exit_code_of_the_environments_check_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing, match="is not an environment of a stack"):
        environment.check(tmp_path, STACK, None)
    python = tmp_path / "bin" / "python"
    for path in (python, tmp_path / container.LOCK):
        write_text(path, "#!/bin/sh\nexit ${CODE}\n")
    python.chmod(0o755)
    for code in (0, 1, 3):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("CODE", str(code))
            assert environment.check(tmp_path, "nope", None) == code
    python.unlink()
    with pytest.raises(EnvironmentMissing, match="is not an environment of a stack"):
        environment.check(tmp_path, "nope", None)


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


# The steps that only a stack with a lock has: one changed commit, hash or file stops the step, which names it.


PATCH = """\
--- a/megatron/core.py
+++ b/megatron/core.py
@@ -1 +1 @@
-VALUE = 1
+VALUE = 2
"""
PATCH_NAME = "docker/patch/latest/megatron.patch"


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """With repositories of its own; what pip installs in place is left out."""
    address = mirror_folder(tmp_path / "git", tmp_path / "home", monkeypatch)
    commits = {
        "vime": commit_files(tmp_path / "git/vime", {PATCH_NAME: PATCH, "vime/__init__.py": ""}),
        "megatron_lm": commit_files(tmp_path / "git/megatron_lm", {"megatron/core.py": "VALUE = 1\n"}),
    }
    pins: dict[str, Any] = {
        name: {"repository": f"{address}/{name}", "commit": commit, "confidence": "certain", "evidence": "made here",
               "tree": git(tmp_path / "git" / name, "rev-parse", f"{commit}^{{tree}}")}
        for name, commit in commits.items()
    }  # fmt: skip
    patched = tmp_path / "patched"
    shutil.copytree(tmp_path / "git/megatron_lm", patched)
    (patched / "megatron/core.py").write_text("VALUE = 2\n")
    pins["megatron_lm"]["patched_tree"] = hash_tree(patched)
    patch = {"repository": f"{address}/vime", "commit": commits["vime"], "version": PATCH_NAME,
             "sha256": sha256_bytes(PATCH.encode()), "confidence": "certain", "evidence": "made here"}  # fmt: skip
    made = Stack.model_validate(
        {"schema": 1, "stack": "test", "purpose": "test", "pins": pins, "components": {"megatron-patch": patch}}
    )
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(locked, "SOURCES", tmp_path / "src")
    monkeypatch.setattr(locked, "pip_install", lambda *_, **__: None)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(site))
    return made


def install(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked, "get_stack", lambda _: stack)
    inputs: Any = SimpleNamespace(stack="test")
    locked.install_sources(inputs)


def change(stack: Stack, kind: str, name: str, **changed: str) -> Stack:
    items = dict(getattr(stack, kind))
    items[name] = items[name].model_copy(update=changed)
    return stack.model_copy(update={kind: items})


def test_sources_are_the_stacks_commits_with_vimes_patch(
    small: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(small, monkeypatch)
    assert (locked.SOURCES / "megatron_lm/megatron/core.py").read_text() == "VALUE = 2\n"
    assert git(locked.SOURCES / "vime", "rev-parse", "HEAD") == small.pins["vime"].commit
    assert not (locked.SOURCES / "vime/.git/FETCH_HEAD").exists()
    for name in ("vime", "megatron_lm"):
        commit = commit_files(tmp_path / "git" / name, {"more": "1"})
        with pytest.raises(SpecError, match=f"tree of {commit[:12]}"):
            install(change(small, "pins", name, commit=commit), monkeypatch)
    with pytest.raises(RlkReproError, match="vime at 2222"):
        install(change(small, "pins", "vime", commit="2" * 40), monkeypatch)
    with pytest.raises(CheckFailed, match=PATCH_NAME):
        install(change(small, "components", "megatron-patch", sha256="3" * 64), monkeypatch)
    with pytest.raises(CheckFailed, match="the patched Megatron-LM"):
        install(change(small, "pins", "megatron_lm", patched_tree="4" * 40), monkeypatch)


def test_package_that_asks_for_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        f"{name} has requirement {asked}, but you have numpy 1.26.4."
        for name, asked in (
            ("pandas 1", "numpy>=2.0.2"),
            ("opencv-python-headless 1", "numpy>=2"),
            ("rl-kernel 0.1.0", "transformers==5"),
            ("rl-kernel 0.1.0", "torch==2"),
        )
    ]
    said = "\n".join([*lines, "apex 1 requires x, which is not installed."])
    done = proc.Completed(argv=(), returncode=1, stdout=said, stderr="")
    monkeypatch.setattr(proc, "run", lambda *_, **__: done)
    with pytest.raises(CheckFailed) as raised:
        locked.check_requirements()
    assert raised.value.problems[0].quoted == (lines[0], lines[3])


def test_nothing_is_installed_without_a_hash() -> None:
    """Every list of packages that a build of a stack with a lock reads, and every command of its Dockerfile."""
    for name in ("base.txt", "build.txt"):
        entries = (ROOT / "requirements" / name).read_text().replace("\\\n", " ").splitlines()
        packages = [line for line in entries if line.strip() and not line.lstrip().startswith("#")]
        assert packages
        assert [line for line in packages if "==" not in line or "--hash=sha256:" not in line] == []
    text = (ROOT / "docker/Dockerfile.locked").read_text().replace("\\\n", " ")
    commands = [line for line in text.splitlines() if line.startswith(("FROM", "ADD", "COPY", "RUN"))]
    assert "FROM ${BASE_NAME}@${BASE_DIGEST}" in commands
    fetching = [line for line in commands if any(word in line for word in ("pip", "apt", "curl", "wget", "ADD", "://"))]
    assert all("--require-hashes" in line for line in fetching)
    assert len(fetching) == 2


def test_every_step_of_a_build_has_its_function() -> None:
    for place in __main__.STEPS.values():
        module, _, name = place.partition(".")
        assert callable(getattr(importlib.import_module(f"tools.image_build.{module}"), name))


def test_the_tools_are_found_beside_megatrons_own_tools(tmp_path: Path) -> None:
    """An environment has Megatron-LM's checkout on its path, whose ``tools`` is a regular package."""
    write_text(tmp_path / "tools" / "__init__.py", "")
    argv = [sys.executable, "-c", "import tools.image_build.locked"]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    assert subprocess.run(argv, cwd=ROOT, env=env, check=False).returncode == 0


# Packed for a machine that has torch: what travels, what is the machine's, what the record says.


PYTHON = ".".join(map(str, sys.version_info[:2]))
SITE = Path("lib", f"python{PYTHON}", "site-packages")
OURS = {
    "rlk-repro": ("rlk_repro/__init__.py", ["pydantic>=2", "gguf>=1 ; extra == 'gguf'"]),
    "pydantic": ("pydantic/__init__.py", ["pydantic_core==1"]),
    "pydantic-core": ("pydantic_core/core.so", []),
    "gguf": ("gguf/__init__.py", []),
    "vllm": ("vllm/nvidia/kernels.so", []),
    "cuda-bindings": ("cuda/bindings.py", []),
}
MACHINES = {
    "torch": "torch/__init__.py",
    "triton": "triton/__init__.py",
    "cuda-toolkit": None,
    "nvidia-cublas": "nvidia/cu13/libcublas.so",
}
LEFT_OUT = {"cuda-tile": "cuda/tile.py", "nvidia-cuda-nvcc": "nvidia/cu13/nvcc", "tokenspeed-triton": "speed/a.py"}


def add_package(site: Path, name: str, file: str | None, requires: list[str], version: str = "1.0") -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", *(f"Requires-Dist: {r}\n" for r in requires)]
    (folder / "METADATA").write_text("".join(lines))
    names = [f"{folder.name}/METADATA,,", f"{folder.name}/RECORD,,", f"../../../bin/{name},,"]
    if file is not None:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(name)
        names.append(f"{file},,")
    (folder / "RECORD").write_text("\n".join(names))


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """An environment as `env create` leaves it, in small."""
    folder = tmp_path / "made"
    site = folder / SITE
    for name, (file, requires) in OURS.items():
        add_package(site, name, file, requires)
    for name, top in {**MACHINES, **LEFT_OUT}.items():
        add_package(site, name, top, [])
    (site / "nvidia" / "cu13" / "libcublas-link.so").symlink_to("libcublas.so")
    (site / "vllm" / "__pycache__").mkdir()
    (site / "vllm" / "__pycache__" / "old.pyc").touch()
    (site / "sources.pth").write_text(f"{folder}/src/megatron\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "bin" / "vllm").write_text(f"#!{folder}/bin/python\nimport vllm\n")
    (folder / "bin" / "torch").write_text(f"#!{folder}/bin/python\nimport torch\n")
    (folder / "bin" / "vllm").chmod(0o755)
    (folder / "src" / "vime" / ".git" / "refs").mkdir(parents=True)
    (folder / "src" / "vime" / ".git" / "config").touch()
    for name in ("steps.json", "pyvenv.cfg", "lock.txt"):
        (folder / name).touch()
    packages: dict[str, Any] = dict.fromkeys([*OURS, *MACHINES, *LEFT_OUT], "1.0")
    base = Base(reference="lock.txt", digest="sha256:0")
    record = ImageRecord(stack="s", platform="cuda-amd64", base=base, commits={}, code={"packages": packages}, build={})
    write_json(folder / "provenance.json", record.to_json())
    return folder


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    packed.export(made, tmp_path / "bundle", reuse_torch=True)
    return tmp_path / "bundle"


@pytest.fixture
def machines_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The site-packages of this process's Python, with torch and NVIDIA's libraries of the same versions."""
    site = tmp_path / "machine"
    for name, file in MACHINES.items():
        add_package(site, name, file, [], "1.0+cu130" if name == "torch" else "1.0")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    return site


def list_members(bundle: Path) -> set[str]:
    names: set[str] = set()
    for archive in bundle.glob("env-*.tar.gz"):
        with tarfile.open(archive) as members:
            names |= set(members.getnames())
    return names


def test_what_the_machine_has_and_what_no_run_imports_stays_behind(bundle: Path) -> None:
    names = list_members(bundle)
    files = {name for name in names if not name.endswith(("METADATA", "RECORD"))}
    own = {file for file, _ in OURS.values()} | {"sources.pth"}
    assert {name for name in files if name.startswith("lib/")} == {str(SITE / file) for file in own}
    assert files - {str(SITE / file) for file in own} == {
        *("bin/vllm", "lock.txt", "provenance.json", "src", "src/vime", "src/vime/.git"),
        *("src/vime/.git/refs", "src/vime/.git/config"),
    }
    value = load_json(bundle / packed.FILE)
    assert value["reused"] == dict.fromkeys(MACHINES, "1.0")
    assert value["left_out"] == sorted(LEFT_OUT)
    needed = {"pydantic", "pydantic_core", "rlk_repro"}
    assert {path.name for path in (bundle / "tool").iterdir()} == needed | {f"{name}-1.0.dist-info" for name in needed}


def test_without_torch_on_the_machine_all_but_unused_packages_travel(made: Path, tmp_path: Path) -> None:
    packed.export(made, tmp_path / "whole")
    names = list_members(tmp_path / "whole")
    assert {str(SITE / file) for file in MACHINES.values() if file} <= names
    assert not {str(SITE / file) for file in LEFT_OUT.values()} & names
    packed.create(tmp_path / "env", tmp_path / "whole")
    record = parse_record((tmp_path / "env/provenance.json").read_bytes())
    assert record.code["packages"] == dict.fromkeys([*OURS, *MACHINES], "1.0")
    listed = (tmp_path / "whole" / "SHA256SUMS").read_text()
    assert packed.FILE in listed
    assert "tool/rlk_repro/__init__.py" in listed
    with pytest.raises(EnvironmentMissing, match="holds no packed environment"):
        packed.create(tmp_path / "env", tmp_path)


def test_an_unpacked_environment_links_the_machines_packages_and_states_them(
    bundle: Path, machines_packages: Path, made: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "env"
    for _ in range(2):  # a repeated call gives the same
        packed.create(folder, bundle)
        site = folder / SITE
        assert (site / "torch").resolve() == machines_packages / "torch"
        assert (site / "nvidia" / "cu13" / "libcublas.so").read_text() == "nvidia-cublas"
        assert (folder / "bin" / "vllm").read_text() == f"#!{folder}/bin/python\nimport vllm\n"
        assert (folder / "bin" / "vllm").stat().st_mode & 0o100
        assert (site / "sources.pth").read_text() == f"{folder}/src/megatron\n"
        assert (folder / "src" / "vime" / ".git" / "refs").is_dir()
        record = parse_record((folder / "provenance.json").read_bytes())
        found = {item.name: item.version for item in metadata.distributions(path=[str(site)])}
        assert record.code["packages"] == found == dict.fromkeys([*OURS, *MACHINES], "1.0") | {"torch": "1.0+cu130"}
        assert record.build["left_out"] == sorted(LEFT_OUT)
        assert set(record.build["reused"]) == set(MACHINES)
    done = proc.run([str(folder / "bin" / "python"), "-c", "import sys; print(sys.prefix)"])
    assert done.stdout.strip() == str(folder)


def test_other_versions_are_refused_before_anything_is_unpacked(
    bundle: Path, machines_packages: Path, tmp_path: Path
) -> None:
    change = {"reused": {"torch": "2.0", "nvidia-absent": "3"}, "python": "3.9"}
    write_json(bundle / packed.FILE, load_json(bundle / packed.FILE) | change)
    with pytest.raises(EnvironmentMissing) as caught:
        packed.create(tmp_path / "env", bundle)
    assert [(problem.where, problem.got, problem.expected) for problem in caught.value.problems] == [
        (sys.executable, PYTHON, "3.9"),
        ("package nvidia-absent", "absent", "3"),
        ("package torch", "1.0+cu130", "2.0"),
    ]
    assert not (tmp_path / "env").exists()


def test_archives_end_at_their_size_and_only_those_that_were_packed_are_unpacked(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "ARCHIVE_BYTES", 1)
    bundle = tmp_path / "bundle"
    packed.export(made, bundle)
    archives = load_json(bundle / packed.FILE)["archives"]
    assert len(archives) > 5
    assert archives == {path.name: sha256_file(path) for path in bundle.glob("env-*")}
    (bundle / "env-00.tar.gz").write_bytes(b"other")
    with pytest.raises(CheckFailed, match="is not the archive that was packed"):
        packed.create(tmp_path / "env", bundle)
    (bundle / "env-00.tar.gz").unlink()
    with pytest.raises(CheckFailed, match="is not the archive that was packed"):
        packed.create(tmp_path / "env", bundle)


def test_unfinished_environments_and_folders_in_use_are_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is there already"):
        packed.export(made, tmp_path)
    (made / "provenance.json").unlink()
    with pytest.raises(EnvironmentMissing, match="is not finished"):
        packed.export(made, tmp_path / "other")


def test_the_command_takes_no_stack_for_a_packed_folder(bundle: Path, machines_packages: Path, tmp_path: Path) -> None:
    argv = ["env", "create", str(tmp_path / "env"), "--from", str(bundle)]
    refused = CliRunner().invoke(app, [*argv, "--stack", "2026-11"])
    assert isinstance(refused.exception, SpecError)
    assert CliRunner().invoke(app, argv).exit_code == 0
    assert (tmp_path / "env" / "provenance.json").is_file()
