"""Run the steps that only a stack with a lock has: check packages, compile TransformerEngine, install sources.

nvcc, headers and libraries of the lock's packages become one CUDA toolkit that compilers and linkers find.  The
packages hold only what a program needs to run.  A linker also needs names of libraries without versions, a
folder lib64, and the driver's library.  No package has the latter, so a stand-in is compiled with the driver's
functions that extensions here call.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rlk_repro.base import git, proc
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem
from rlk_repro.base.files import sha256_bytes, write_text
from rlk_repro.base.trees import hash_tree
from rlk_repro.images.environment import source_requirement
from rlk_repro.images.stacks import get_stack, read_lock
from rlk_repro.probes.checkout import probe_checkout
from rlk_repro.probes.code import normalise
from rlk_repro.spec import ImagePlatform, Stack
from tools.image_build.inputs import Inputs
from tools.image_build.kernels import OFFLINE, stub_environment
from tools.image_build.package import OURS, list_packages
from tools.rl_kernel.build import pip_install, require_done
from tools.rl_kernel.source import fetch

TIMEOUT_S: Final = 900.0
NO_COMMIT: Final = ("not our ref", "couldn't find remote ref")
LOST: Final = "the repository does not have this commit (any more): pin another one in the stack"
# git keeps here when and from where it fetched
TRACES: Final = ("FETCH_HEAD", "ORIG_HEAD", "logs", "gc.log")
PACKAGES: Final = Path(sysconfig.get_path("purelib"))
CUDA: Final = PACKAGES / "nvidia" / "cu13"
BESIDE: Final = tuple(PACKAGES / "nvidia" / name for name in ("cudnn", "nccl"))
DRIVER_FUNCTIONS: Final = ("cuGetErrorString", "cuInit", "cuTensorMapEncodeTiled")


def install_vime(inputs: Inputs, folder: Path = Path("/root/vime")) -> None:
    """Fetch the commit of vime, check it out, and install it in place.

    Raises:
        EnvironmentMissing: the folder is not a checkout, or the repository no longer has the commit.
        CheckFailed: the files differ from the commit after the checkout.
    """
    commit = inputs.vime_commit
    if not (folder / ".git").exists():
        raise EnvironmentMissing(Problem(str(folder), "is no git checkout", expected="the base's checkout of vime"))
    done = git.fetch(folder, inputs.vime_repository, commit, timeout_s=TIMEOUT_S)
    git.require(f"git fetch in {folder}", done, LOST if any(words in done.stderr for words in NO_COMMIT) else None)
    _git(folder, "checkout", "--quiet", "--force", "--detach", commit, "--")
    # vime is installed in place, so Python imports the checkout
    pip_install("--no-build-isolation", "--editable", str(folder))
    forget_time(folder)
    facts = probe_checkout(folder)
    if facts["commit"] != commit:
        raise CheckFailed(Problem(str(folder), "is at another commit", got=facts["commit"], expected=commit))
    if facts["is_dirty"] is not False:
        raise CheckFailed(Problem(str(folder), "has changed files", got=_git(folder, "status", "--short")[:200]))


def forget_time(folder: Path) -> None:
    """Remove times from the checkout: git's records of fetches, and the times and inode numbers in git's index."""
    for name in TRACES:
        path = folder / ".git" / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    (folder / ".git" / "index").unlink()
    _git(folder, "read-tree", "HEAD")


def _git(folder: Path, *arguments: str) -> str:
    done = git.ask_git(folder, *arguments, timeout_s=TIMEOUT_S)
    return git.require(f"git {arguments[0]} in {folder}", done)


SOURCES: Final = Path(sys.prefix) / "src"
COMPILED: Final = "transformer-engine-torch"
PATCH: Final = "megatron-patch"
IMPORTS: Final = (
    *("train", "vime.ray.rollout", "vime.ray.train_actor", "vime.backends.megatron_utils.actor"),
    *("vime.rollout.vllm_rollout", "vime.rollout.rm_hub", "vllm.entrypoints.openai.api_server"),
    *("vllm_router.launch_router", "torch_memory_saver", "mbridge", "transformer_engine.pytorch"),
    *("rlk_repro.integration.vime", "pyarrow", "pandas"),
)
"""The modules that a trial's processes import: vime's train.py and actors, vLLM's server, our integration.

Ray imports pyarrow, and vime imports pandas, only when a trial runs.
"""
OVERRIDDEN: Final = re.compile(
    r"opencv-python-headless \S+ has requirement numpy\b|rl-kernel \S+ has requirement transformers\b"
)
"""What two packages ask for beyond the lock: OpenCV (see requirements/2026-11-overrides.txt), and RL-Kernel, which a
later step installs, so that only a repeated build finds it here.
"""


def check_packages(stack: Stack, platform: ImagePlatform) -> None:
    """Refuse an environment whose packages differ from the lock.

    Raises:
        CheckFailed: the error lists every package that is missing, additional, or of another version.
    """
    expected = {normalise(name): version for name, version in read_lock(stack, platform).items()}
    found = {name: version for name, version in list_packages().items() if name not in OURS | {COMPILED}}
    problems = [
        Problem(f"package {name}", "differs from the lock", got=found.get(name, "absent"),
                expected=expected.get(name, "absent"))
        for name in sorted(expected.keys() | found.keys())
        if not _is_same(expected.get(name), found.get(name))
    ]  # fmt: skip
    if problems:
        raise CheckFailed(*problems)


def check_requirements() -> None:
    """Refuse installed packages that need another version of a package than the installed version.

    The lock overrides the NumPy versions that packages ask for, so the resolver no longer refuses such packages.

    Raises:
        CheckFailed: the error quotes every such package.
    """
    done = proc.run([sys.executable, "-m", "pip", "check"], timeout_s=TIMEOUT_S)
    wrong = [line for line in done.stdout.splitlines() if ", but you have " in line and not OVERRIDDEN.match(line)]
    if wrong:
        raise CheckFailed(Problem("packages", "ask for other versions than the installed:", quoted=tuple(wrong)))


def _is_same(locked: str | None, found: str | None) -> bool:
    """Tell whether two versions are equal, without a local part like ``+cu130``, which only torch's wheel has."""
    return locked is not None and found is not None and locked.partition("+")[0] == found.partition("+")[0]


def install_transformer_engine(inputs: Inputs) -> None:
    """Compile the part of TransformerEngine that works with torch, from sources whose hash is pinned."""
    os.environ["NVTE_CUDA_ARCHS"] = ";".join(inputs.architectures)
    os.environ["NVTE_PYTORCH_FORCE_BUILD"] = "TRUE"  # otherwise its setup downloads a wheel
    with tempfile.TemporaryDirectory(prefix="rlk-repro-build-") as folder:
        wanted = Path(folder) / "sources.txt"
        wanted.write_text(source_requirement(get_stack(inputs.stack)))
        pip_install("--require-hashes", "--no-build-isolation", "--no-binary", ":all:", "-r", str(wanted),
                    timeout_s=4 * 3600.0)  # fmt: skip


def install_sources(inputs: Inputs) -> None:
    """Install vime in place, and put Megatron-LM with vime's patch on Python's path.

    Raises:
        CheckFailed: the patch or the patched files differ from the stack's.
    """
    stack = get_stack(inputs.stack)
    shutil.rmtree(SOURCES, ignore_errors=True)
    for name in ("vime", "megatron_lm"):
        fetch(stack.pins[name], SOURCES / name, OFFLINE)
        forget_time(SOURCES / name)
    pip_install("--no-build-isolation", "--editable", str(SOURCES / "vime"))
    _patch(stack)
    # Megatron-LM is not installed: its setup compiles what vime does not use, and packs only megatron.core
    write_text(Path(sysconfig.get_path("purelib")) / "rlk-repro-sources.pth", f"{SOURCES / 'megatron_lm'}\n")


def _patch(stack: Stack) -> None:
    component, pin = stack.components[PATCH], stack.pins["megatron_lm"]
    patch = SOURCES / "vime" / str(component.version)
    _require(str(component.version), sha256_bytes(patch.read_bytes()), component.sha256)
    folder = SOURCES / "megatron_lm"
    git.require("git apply", git.ask_git(folder, "apply", "--whitespace=nowarn", str(patch), timeout_s=60.0))
    _require("the patched Megatron-LM", hash_tree(folder), pin.patched_tree)


def _require(what: str, got: str, expected: str | None) -> None:
    if got != expected:
        raise CheckFailed(Problem(what, "differs from the stack's", got=got, expected=expected))


def check_imports(_inputs: Inputs) -> None:
    """Import in a separate process the modules that a trial imports; this check needs no GPU and no driver.

    Raises:
        CheckFailed: an import failed; the error quotes its last lines.
    """
    words = f"import importlib\nfor name in {IMPORTS!r}: importlib.import_module(name)"
    with tempfile.TemporaryDirectory(prefix="rlk-repro-stub-") as folder:
        environ = stub_environment(os.environ, Path(folder)) | {"PYTHONPATH": str(SOURCES / "vime")}
        done = proc.run([sys.executable, "-c", words], cwd=Path(folder), env=environ, timeout_s=1800.0)
    require_done("imports of a trial", done)


def use_toolkit(environ: Mapping[str, str]) -> dict[str, str]:
    """Complete the toolkit; return variables by which torch and the compilers find it."""
    folders = (CUDA, *BESIDE)
    for folder in folders:
        _link_plain_names(folder / "lib")
    if not (CUDA / "lib64").exists():
        (CUDA / "lib64").symlink_to("lib")
    stub = CUDA / "lib" / "stubs" / "libcuda.so"
    if not stub.exists():
        stub.parent.mkdir(exist_ok=True)
        source = "".join(f"int {name}(void) {{ return 100; }}\n" for name in DRIVER_FUNCTIONS)
        argv = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(stub)]
        require_done("cc", proc.run(argv, stdin=source.encode()))
    added = {
        "PATH": [CUDA / "bin", Path(sysconfig.get_path("scripts"))],
        "CPATH": [folder / "include" for folder in folders],
        "LIBRARY_PATH": [folder / "lib" for folder in folders],
    }
    known = {"PATH": os.defpath, **environ}
    found = {**environ, "CUDA_HOME": str(CUDA)}
    for name, places in added.items():
        found[name] = os.pathsep.join(filter(None, [*map(str, places), known.get(name, "")]))
    return found


def _link_plain_names(folder: Path) -> None:
    for library in sorted(folder.glob("lib*.so.*")):
        plain = folder / f"{library.name.partition('.so.')[0]}.so"
        if not plain.exists():
            plain.symlink_to(library.name)
