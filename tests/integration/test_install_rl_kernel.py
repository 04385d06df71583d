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
from rlk_repro.spec import Hardware, Pin
from rlk_repro.spec.load import load_stack
from tests import ROOT
from tests.support.copied_package import mirror_folder
from tests.support.probe_examples import write_tree
from tools.rl_kernel import build, proof
from tools.rl_kernel.hardware import find_hardware
from tools.rl_kernel.repair import CCCL3_BATCH_INVARIANT, CCCL3_FUNCTIONALS, Repair, apply_repair, apply_repairs
from tools.rl_kernel.source import get_sources

IDENTITY = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false")
COMMANDS = '[project.scripts]\nrlk-repro = "rl_engine:main"\nrlk = "rl_engine:main"\n'
PINNED = load_stack("rl-kernel-host").model.pins["rl_kernel"]


def git(folder: Path, *arguments: str) -> str:
    done = proc.run(["git", *IDENTITY, *arguments], cwd=folder)
    assert done.is_ok, done.stderr
    return done.stdout.strip()


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
    write_tree(folder, {"pyproject.toml": metadata, "README": "", ".gitignore": "*.so\n__pycache__\n"})
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    commit, tree = git(folder, "rev-parse", "HEAD", "HEAD^{tree}").split()
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
    assert str(caught.value) == (
        f"{checkout.folder}: is commit {head}, expected {checkout.pin.commit}, as the stack pins\n"
        "  hint: git checkout that commit, or measure these sources without a pin: RLK_STACK=host"
    )


@pytest.mark.parametrize("name", ["README", "a new file"])
def test_changed_files_are_refused_under_a_pin_and_reported_without_one(
    checkout: Checkout, tmp_path: Path, name: str
) -> None:
    (checkout.folder / name).write_text("# changed\n")
    with pytest.raises(SpecError) as caught:
        get_sources(checkout.pin, checkout.folder, tmp_path / "copy")
    assert str(caught.value).startswith(
        f"{checkout.folder}: is changed files, expected {checkout.pin.commit} unchanged\n"
    )
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
    with pytest.raises(SpecError, match="a git checkout: the pin has no hash of files"):
        get_sources(checkout.pin.model_copy(update={"tree": None}), archive, tmp_path / "no tree")
    (archive / "README").write_text("changed")
    with pytest.raises(SpecError) as caught:
        get_sources(checkout.pin, archive, tmp_path / "other")
    assert str(caught.value) == (
        f"{archive}: is an archive of tree {hash_tree(archive)}, expected {checkout.pin.tree}, "
        f"the files of {checkout.pin.commit[:12]}\n"
        "  hint: unpack a fresh one, or measure these sources without a pin: RLK_STACK=host"
    )


def test_a_repair_changes_the_file_it_was_written_for_and_no_other(tmp_path: Path) -> None:
    before, after = "x = cub::Max();\n", "x = cuda::maximum<>{};\n"
    repair = Repair(
        name="r",
        file="a.cu",
        before_sha256=sha256_bytes(before.encode()),
        after_sha256=sha256_bytes(after.encode()),
        substitutions=(("cub::Max()", "cuda::maximum<>{}"),),
    )
    (tmp_path / "a.cu").write_text(before)
    assert apply_repair(repair, tmp_path).after_sha256 == sha256_bytes((tmp_path / "a.cu").read_bytes())
    with pytest.raises(SpecError) as caught:
        apply_repair(repair, tmp_path)
    assert str(caught.value) == (
        "repair r: a.cu: differs from the file of the repair, "
        f"got {repair.after_sha256!r}, expected {repair.before_sha256}"
    )


def test_the_repairs_for_cuda_13_fit_the_real_files(tmp_path: Path, real: Path) -> None:
    folder = tmp_path / "csrc/cuda"
    shutil.copytree(real / "csrc/cuda", folder)
    assert apply_repairs("12.8", tmp_path) == ()
    has_newer = (tmp_path / CCCL3_BATCH_INVARIANT.file).is_file()
    repaired = [repair.name for repair in apply_repairs("13.0", tmp_path)]
    assert repaired == [CCCL3_BATCH_INVARIANT.name if has_newer else CCCL3_FUNCTIONALS.name]
    texts = [path.read_text() for path in folder.rglob("*.cu")]
    assert not any(name in text for text in texts for name in ("cub::Max()", "cub::Sum()"))
    assert apply_repairs("13.0", tmp_path) == ()


HOPPER = build.Machine(
    platform="cuda", device="NVIDIA H200", device_capability="9.0", torch="2.11.0+cu130", toolkit="13.0", nvcc="13.0"
)
CPU = build.Machine(platform="cpu", device="", device_capability=None, torch="2.13.0", toolkit=None, nvcc=None)


def test_a_gpu_without_its_compiler_is_refused_before_the_build() -> None:
    build.check_compiler(CPU)
    build.check_compiler(HOPPER, is_sm90=True)
    for machine, is_sm90, expected in (
        (
            replace(HOPPER, nvcc=None),
            False,
            "RL-Kernel on NVIDIA H200: nvcc is absent, so no kernels can be built\n  hint: install the CUDA "
            "toolkit, or name it by CUDA_HOME; CUDA_VISIBLE_DEVICES= gives native operators only",
        ),
        (
            replace(HOPPER, nvcc="12.4"),
            False,
            "nvcc: is of another CUDA release than torch, got '12.4', expected 13.0\n"
            "  hint: name the right toolkit by CUDA_HOME",
        ),
        (CPU, True, "--sm90: needs a Hopper GPU, got 'no GPU'"),
    ):
        with pytest.raises(EnvironmentMissing) as caught:
            build.check_compiler(machine, is_sm90=is_sm90)
        assert str(caught.value) == expected


NATIVE = proof.Found(
    folder=Path("/x/rl_engine"),
    symbols=(),
    extension_error="cannot import name '_C'",
    operators=(
        proof.Operator(name="logp", class_name="NativeLogpOp", error=1e-7),
        proof.Operator(name="ratio_kl", class_name="NativeRatioKLOp", error=1e-7),
    ),
)
KERNELS = proof.Found(
    folder=Path("/x/rl_engine"),
    symbols=proof.SYMBOLS,
    extension_error="",
    operators=(
        proof.Operator(name="logp", class_name="FusedLogpGenericOp", error=1e-7),
        proof.Operator(name="ratio_kl", class_name="TritonRatioKLOp", error=1e-7),
    ),
)


def problems(found: proof.Found, platform: str, *, is_sm90: bool = False) -> list[str]:
    return [
        str(problem).partition("\n")[0]
        for problem in proof.find_problems(found, platform=platform, installed=Path("/x/rl_engine"), is_sm90=is_sm90)
    ]


def test_each_platform_gets_its_expected_operators() -> None:
    assert problems(NATIVE, "cpu") == problems(KERNELS, "cuda") == []
    on_rocm = replace(NATIVE, operators=(NATIVE.operators[0], KERNELS.operators[1]))
    assert problems(on_rocm, "rocm") == []
    assert [line.partition(":")[0] for line in proof.describe(on_rocm, "rocm")] == [
        "logp      NativeLogpOp         native",
        "ratio_kl  TritonRatioKLOp      kernel, largest error 1.0e-07",
        "no compiled symbols",
    ]


def test_a_build_that_quietly_left_the_kernels_out_is_found() -> None:
    assert problems(NATIVE, "cuda") == [
        "rl_engine._C: cannot be imported (cannot import name '_C')",
        "logp: resolves to another class, got 'NativeLogpOp', expected FusedLogpGenericOp or FusedLogpSM90Op",
        "ratio_kl: resolves to another class, got 'NativeRatioKLOp', expected TritonRatioKLOp",
    ]
    assert problems(KERNELS, "cuda", is_sm90=True) == [
        f"rl_engine._C: lacks operators, got {list(proof.SYMBOLS)!r}, expected fused_linear_logp_sm90, fused_logp_sm90"
    ]


def test_a_wrong_number_and_a_copy_from_elsewhere_are_found() -> None:
    wrong = replace(NATIVE.operators[0], error=float("nan"))
    found = replace(NATIVE, folder=Path("/y/rl_engine"), operators=(wrong,))
    assert problems(found, "cpu") == [
        "rl_engine: is imported from elsewhere, got '/y/rl_engine', expected /x/rl_engine",
        "logp (NativeLogpOp): computes wrong values, got nan, expected an error up to 0.0001",
    ]


def test_the_hardware_is_found_by_the_name_of_the_device() -> None:
    h200 = Hardware(hardware="h200", title="x", platform="cuda", machine="x86_64", gpus_per_node=8, name_part="H200",
                    refused_name_parts=("NVL",))  # fmt: skip
    cpu = Hardware(hardware="cpu", title="x", platform="cpu", machine="any", gpus_per_node=0)
    assert find_hardware([cpu, h200], "cuda", "NVIDIA H200") is h200
    assert find_hardware([cpu, h200], "cuda", "NVIDIA H200 NVL") is None
    assert find_hardware([cpu, h200], "cpu", "") is cpu


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
            "from rlk_repro.images.pins import match_pins; from rlk_repro.spec.load import load_stack; "
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
    assert lines[1] == "kept this tool's command rlk-repro; RL-Kernel's command of the same name is not installed"
    assert lines[2] == "RL-Kernel 0+double on the CPU:"
    assert lines[3].startswith("  logp      NativeLogpOp         native: plain PyTorch, largest error ")
    assert lines[5].startswith("  native operators only: torch sees no GPU here")
    assert (environment.folder / "bin/rlk-repro").read_text() == "ours\n"
    assert environment.facts == "False False []"

    again = environment.run("-m", "tools.rl_kernel", "--stack", stack)
    assert again.stdout.splitlines() == [f"RL-Kernel {checkout.pin.commit[:12]} is already installed", *lines[2:]]

    (environment.site / "rl_engine/kernels/registry.py").write_text("# edited\n")
    assert environment.facts.startswith("True False [Finding(")
    assert environment.run("-m", "tools.rl_kernel", "--stack", stack).stdout.splitlines()[0] == lines[0]
    assert environment.facts == "False False []"

    assert environment.run("-m", "pip", "uninstall", "--yes", "rl-kernel").is_ok
    assert not list(environment.site.glob("rl_*"))
    assert (environment.folder / "bin/rlk-repro").read_text() == "ours\n"


def test_the_whole_installation_with_the_real_rl_kernel(real: Path, environment: Environment) -> None:
    stack = write_stack(environment, PINNED)
    done = environment.run("-m", "tools.rl_kernel", "--stack", stack, "--source", str(real))
    assert done.is_ok, done.stderr
    assert done.stdout.splitlines()[0] == f"building RL-Kernel {PINNED.commit[:12]} …"
    assert environment.facts == "False False []"
