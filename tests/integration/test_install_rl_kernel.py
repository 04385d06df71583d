"""The installer of RL-Kernel: sources are held against the pin, and what was got is proved and recorded.

The whole road runs in a throw-away environment, with the double and, where ``RLK_SRC`` names it, with the real one.
"""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
import venv
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rlk_repro.base import proc
from rlk_repro.base.errors import EnvironmentMissing, SpecError
from rlk_repro.base.files import sha256_bytes
from rlk_repro.base.trees import hash_tree
from rlk_repro.probes.installed import AppliedRepair
from rlk_repro.spec import Pin
from tests import ROOT
from tests.support.copied_package import mirror_folder
from tests.support.probe_examples import commit_files, git, write_tree
from tools.rl_kernel import build
from tools.rl_kernel.source import REPAIRS, apply_repair, apply_repairs, get_sources

COMMANDS = '[project.scripts]\nrlk-repro = "rl_engine:main"\nrlk = "rl_engine:main"\n'


@dataclass(frozen=True)
class Checkout:
    folder: Path
    pin: Pin


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """The double as a repository of one commit; as newer generations do, it brings a command of our own name."""
    folder = tmp_path / "with space"
    shutil.copytree(ROOT / "tests/support/fake_rl_engine", folder, ignore=shutil.ignore_patterns("__pycache__"))
    metadata = (folder / "pyproject.toml").read_text() + COMMANDS
    files = {"pyproject.toml": metadata, "README": "", ".gitignore": "*.so\n__pycache__\n"}
    commit, tree = commit_files(folder, files), git(folder, "rev-parse", "HEAD^{tree}")
    address = mirror_folder(tmp_path, tmp_path / "home", monkeypatch)
    (tmp_path / "rl-kernel").symlink_to(folder)
    return Checkout(folder, Pin(repository=f"{address}/rl-kernel", commit=commit, tree=tree))


def test_the_hash_of_a_folder_is_gits(tmp_path: Path) -> None:
    files = {"a.b": "1", "a/x": "2", "a-b": "3", "a/deep/er/y": "", "ünïcødé": "4", "run": "5", ".hidden": "6"}
    folder = write_tree(tmp_path / "tree", files)
    (folder / "run").chmod(0o755)
    (folder / "link").symlink_to("a/x")
    (folder / "empty/folder").mkdir(parents=True)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    assert hash_tree(folder) == git(folder, "write-tree")


def test_a_commit_is_fetched_and_held_against_the_pin(checkout: Checkout, tmp_path: Path) -> None:
    sources = get_sources(checkout.pin, None, tmp_path / "copy")
    assert (sources.commit, sources.tree, sources.is_dirty) == (checkout.pin.commit, checkout.pin.tree, False)
    assert (sources.folder / "rl_engine/kernels/registry.py").is_file()
    with pytest.raises(SpecError) as caught:
        get_sources(checkout.pin.model_copy(update={"tree": "1" * 40}), None, tmp_path / "other")
    where = f"tree of {checkout.pin.commit[:12]}"
    assert str(caught.value) == f"{where}: is another one, got {sources.tree!r}, expected {'1' * 40}"


def test_a_clean_checkout_is_copied_without_what_git_ignores(checkout: Checkout, tmp_path: Path) -> None:
    (checkout.folder / "rl_engine/_C.so").write_text("of an older build")
    before = sorted(checkout.folder.rglob("*"))
    sources = get_sources(checkout.pin, checkout.folder, tmp_path / "copy")
    assert (sources.commit, sources.is_dirty, sources.diff_sha256) == (checkout.pin.commit, False, "clean")
    assert not list(sources.folder.rglob("*.so"))
    assert sorted(checkout.folder.rglob("*")) == before


def test_another_commit_is_refused(checkout: Checkout, tmp_path: Path) -> None:
    git(checkout.folder, "commit", "-q", "--allow-empty", "-m", "second")
    with pytest.raises(SpecError) as caught:
        get_sources(checkout.pin, checkout.folder, tmp_path / "copy")
    head = git(checkout.folder, "rev-parse", "HEAD")
    assert f"is not what the stack pins, got '{head}, tree " in str(caught.value)


@pytest.mark.parametrize("name", ["README", "a new file"])
def test_changed_files_are_refused_under_a_pin_and_reported_without_one(
    checkout: Checkout, tmp_path: Path, name: str
) -> None:
    (checkout.folder / name).write_text("# changed\n")
    with pytest.raises(SpecError, match=f"got '{checkout.pin.commit} with changed files, tree .* unchanged, tree "):
        get_sources(checkout.pin, checkout.folder, tmp_path / "copy")
    sources = get_sources(None, checkout.folder, tmp_path / "unpinned")
    assert (sources.commit, sources.is_dirty) == (checkout.pin.commit, True)
    assert re.fullmatch("[0-9a-f]{64}", sources.diff_sha256)
    assert sources.tree != checkout.pin.tree


def test_an_archive_is_known_by_its_files(checkout: Checkout, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    shutil.copytree(checkout.folder, archive, ignore=shutil.ignore_patterns(".git"))
    write_tree(archive, {"rl_engine/__pycache__/x.pyc": ""})
    sources = get_sources(checkout.pin, archive, tmp_path / "copy")
    assert (sources.commit, sources.tree, sources.is_dirty) == (checkout.pin.commit, checkout.pin.tree, False)
    assert get_sources(None, archive, tmp_path / "unpinned").commit is None
    with pytest.raises(SpecError, match="got 'no commit, tree"):
        get_sources(checkout.pin.model_copy(update={"tree": None}), archive, tmp_path / "no tree")
    (archive / "README").write_text("changed")
    with pytest.raises(SpecError, match=f"got 'no commit, tree {hash_tree(archive)}', expected {checkout.pin.commit}"):
        get_sources(checkout.pin, archive, tmp_path / "other")


def test_a_repair_changes_the_file_it_was_written_for_and_no_other(tmp_path: Path) -> None:
    before, after = "x = cub::Max();\n", "x = cuda::maximum<>{};\n"
    before_sha256, after_sha256 = (sha256_bytes(text.encode()) for text in (before, after))
    repair = AppliedRepair(name="r", file="a.cu", before_sha256=before_sha256, after_sha256=after_sha256)
    (tmp_path / "a.cu").write_text(before)
    apply_repair(repair, tmp_path / "a.cu")
    assert (tmp_path / "a.cu").read_text() == after
    with pytest.raises(SpecError) as caught:
        apply_repair(repair, tmp_path / "a.cu")
    assert str(caught.value) == (
        "repair r: a.cu: differs from the file of the repair, "
        f"got {repair.after_sha256!r}, expected {repair.before_sha256}"
    )


def test_the_repairs_for_cuda_13_fit_the_real_files(tmp_path: Path, real: Path) -> None:
    folder = tmp_path / "csrc/cuda"
    shutil.copytree(real / "csrc/cuda", folder)
    assert apply_repairs("12.8", tmp_path) == ()
    older, newer = REPAIRS
    has_newer = (tmp_path / newer.file).is_file()
    assert apply_repairs("13.0", tmp_path) == (newer if has_newer else older,)
    texts = [path.read_text() for path in folder.rglob("*.cu")]
    assert not any(name in text for text in texts for name in ("cub::Max()", "cub::Sum()"))
    assert apply_repairs("13.0", tmp_path) == ()


HOPPER = build.Machine(
    platform="cuda", device="NVIDIA H200", device_capability="9.0", torch="2.11.0+cu130", toolkit="13.0", nvcc="13.0"
)


@pytest.mark.parametrize(
    ("nvcc", "said"),
    [(None, "RL-Kernel on NVIDIA H200: nvcc is absent, so no kernels can be built"),
     ("12.4", "nvcc: is of another CUDA release than torch, got '12.4', expected 13.0"),
     ("13.0", "cuobjdump: is not on PATH")],
)  # fmt: skip
def test_a_gpu_without_its_compiler_is_refused_before_the_build(
    nvcc: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "CUDA_BIN", "/nowhere")
    with pytest.raises(EnvironmentMissing, match=re.escape(said)):
        build.check_compiler(replace(HOPPER, nvcc=nvcc), {"PATH": "/nowhere"})
    build.check_compiler(replace(HOPPER, platform="cpu", nvcc=None), {})


@pytest.fixture
def real() -> Path:
    if not os.environ.get("RLK_SRC"):
        pytest.skip("RLK_SRC names no RL-Kernel")
    return Path(os.environ["RLK_SRC"])


@dataclass(frozen=True)
class Environment:
    """A throw-away environment that borrows torch and all else from this one."""

    folder: Path

    def run(self, *arguments: str, path: str = "") -> proc.Completed:
        environ = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "RLK_SRC"}}
        # the installer is a module of this checkout, and no child imports from the folder where it starts
        entries = [path, str(ROOT)] if path else [str(ROOT)]
        environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(entries)}
        return proc.run([str(self.folder / "bin/python"), *arguments], cwd=ROOT, env=environ, timeout_s=200)

    @property
    def site(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"))

    @property
    def facts(self) -> str:
        """What a manifest says of RL-Kernel, and what preflight says of the pin."""
        script = (
            "import sys; from rlk_repro.rundir.manifest import Manifest; from rlk_repro.probes import code; "
            "from rlk_repro.images.running import match_pins; from rlk_repro.spec.load import load_stack; "
            "facts = code.probe(environ={}); "
            "stack = load_stack(sys.argv[1]).model; "
            "print(facts['rl_kernel']['is_dirty'], facts['rl_kernel']['is_compiled'], "
            "list(match_pins(stack, Manifest(node='n', sections={'code': facts}))))"
        )
        done = self.run("-c", script, str(self.folder / "stack.yaml"))
        assert done.is_ok, done.stderr
        return done.stdout.strip()


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    pytest.importorskip("torch")
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    found = Environment(folder)
    (found.site / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (folder / "bin/rlk-repro").write_text("ours\n")
    return found


def write_stack(environment: Environment, pin: Pin) -> str:
    path = environment.folder / "stack.yaml"
    tree = f", tree: {pin.tree}" if pin.tree else ""
    pinned = f'{{repository: "{pin.repository}", commit: {pin.commit}{tree}}}'
    path.write_text(f"schema: 1\nstack: s\npurpose: x\npins:\n  rl_kernel: {pinned}\n")
    return str(path)


@pytest.mark.long  # continuous integration goes this road by make demo-rl-kernel
@pytest.mark.real
def test_the_whole_installation_with_the_double(checkout: Checkout, environment: Environment) -> None:
    stack = write_stack(environment, checkout.pin)
    done = environment.run("-m", "tools.rl_kernel", "--stack", stack)
    assert done.is_ok, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"building RL-Kernel {checkout.pin.commit[:12]} …"
    assert lines[1] == "RL-Kernel for the CPU:"
    assert "  logp        NativeLogpOp               native: plain PyTorch" in lines
    assert lines[-1] == "  torch sees no GPU here, so RL-Kernel builds no kernels; no speed can be claimed"
    assert (environment.folder / "bin/rlk-repro").read_text() == "ours\n"
    assert environment.facts == "False False []"

    again = environment.run("-m", "tools.rl_kernel", "--stack", stack)
    assert again.stdout.splitlines() == [f"RL-Kernel {checkout.pin.commit[:12]} is already installed", *lines[1:]]

    (environment.site / "rl_engine/kernels/registry.py").write_text("# edited\n")
    assert environment.facts.startswith("True False [Finding(")
    assert environment.run("-m", "tools.rl_kernel", "--stack", stack).stdout.splitlines()[0] == lines[0]
    assert environment.facts == "False False []"

    assert environment.run("-m", "pip", "uninstall", "--yes", "rl-kernel").is_ok
    assert not list(environment.site.glob("rl_*"))
    assert (environment.folder / "bin/rlk-repro").read_text() == "ours\n"
