"""Build RL-Kernel for given GPUs, and install it into this Python's environment; change nothing else there.

RL-Kernel compiles kernels only where torch sees a GPU, and then all files for one list of GPUs.  So a wheel is built by
a process in which torch reports a GPU (with_torch.py), and nvcc.py gives every file architectures of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from rlk_repro.base import proc
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem
from rlk_repro.base.files import write_json, write_text
from rlk_repro.base.findings import Finding, has_blocking
from rlk_repro.images.match import check_extension, match_operators
from rlk_repro.images.resolve import ask_registry
from rlk_repro.operators import Platform
from rlk_repro.probes import code
from rlk_repro.probes.installed import (
    BUILD_RECORD,
    BuildRecord,
    build_variables,
    find_changed_files,
    find_extensions,
    load_build_record,
    probe_extension,
    record_digest,
)
from rlk_repro.rundir.manifest import Unknown
from rlk_repro.sources import RL_KERNEL
from tools.rl_kernel.nvcc import ARCHITECTURES, HOPPER, NVCC
from tools.rl_kernel.source import Sources, apply_repairs

HERE: Final = Path(__file__).resolve().parent
BUILD_TOOLS: Final = HERE.parents[1] / "requirements" / "rl-kernel.txt"
PIP: Final = (
    *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"),
    *("--no-cache-dir", "--no-compile", "--no-deps", "--root-user-action=ignore"),
)
PIP_TIMEOUT_S: Final = 1800.0
BUILD_TIMEOUT_S: Final = 7200.0
SM90: Final = "KERNEL_ALIGN_FORCE_SM90"
REQUIRE_EXTENSION: Final = "RL_KERNEL_REQUIRE_EXT"
"""With this variable, newer commits of RL-Kernel refuse a build that would leave the extension out."""
STUBS: Final = ("lib64/stubs", "targets/x86_64-linux/lib/stubs", "targets/sbsa-linux/lib/stubs")
CUDA_BIN: Final = "/usr/local/cuda/bin"
# What a failed build prints, and what it means; checked in this order.
BUILD_TROUBLE: Final = (
    ("mismatches the version that was used to compile", "use the nvcc of the CUDA release that torch was built with"),
    ("Unsupported gpu architecture", "this nvcc is too old for this GPU"),
    ("requires’ does not name a type", "this torch needs C++20, and RL-Kernel requests C++17: use an older torch"),
    ("Killed", "too little memory: MAX_JOBS=2"),
    ("No module named 'torch'", "install torch first: make demo"),
    ("rl_engine.kernels.registry", "these sources are of another generation of RL-Kernel than this tool knows"),
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that RL-Kernel is built for; ``toolkit`` is torch's release of CUDA or ROCm."""

    platform: str
    device: str = ""
    device_capability: str | None = None
    torch: str
    toolkit: str | None
    nvcc: str | None = None


def ask_machine() -> dict[str, Any]:
    """Return torch's facts of this machine; a separate process asks, because torch may occupy a GPU."""
    done = proc.run([sys.executable, "-P", str(HERE / "with_torch.py")], timeout_s=600.0)
    require_done("torch", done)
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def describe_machine(environ: Mapping[str, str], platform: str | None = None) -> Machine:
    """Describe this machine; for another ``platform`` than its own, only its torch and its compiler count."""
    facts = ask_machine()
    if platform is not None:
        facts = {"platform": platform, "torch": facts["torch"], "toolkit": facts["toolkit"]}
    nvcc = read_nvcc_version(find_nvcc(environ)) if facts["platform"] == Platform.CUDA else None
    return Machine(**facts, nvcc=nvcc)


def find_nvcc(environ: Mapping[str, str]) -> Path | None:
    """Return the CUDA compiler that torch would use."""
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc")
    path = Path(home) / "bin/nvcc" if home else Path(on_path or "/usr/local/cuda/bin/nvcc")
    return path if path.is_file() else None


def read_nvcc_version(nvcc: Path | None) -> str | None:
    """Return the compiler's version, such as ``13.0``; None if there is no compiler or its version is unreadable."""
    if nvcc is None:
        return None
    match = re.search(r"release (\d+\.\d+)", proc.run([str(nvcc), "--version"]).stdout)
    return match[1] if match else None


def check_compiler(machine: Machine, environ: Mapping[str, str]) -> None:
    """Refuse a build for NVIDIA's GPUs that would fail or leave the extension out.

    Raises:
        EnvironmentMissing: nvcc or cuobjdump is absent, or nvcc's CUDA release is not torch's.
    """
    if machine.platform != Platform.CUDA:
        return
    where = f"RL-Kernel on {machine.device or 'NVIDIA GPUs'}"
    if machine.nvcc is None:
        hint = "install the CUDA toolkit, or name it by CUDA_HOME; CUDA_VISIBLE_DEVICES= gives native operators only"
        raise EnvironmentMissing(Problem(where, "nvcc is absent, so no kernels can be built", hint=hint))
    if machine.nvcc.split(".")[0] != str(machine.toolkit).split(".")[0]:
        raise EnvironmentMissing(
            Problem("nvcc", "is of another CUDA release than torch", got=machine.nvcc, expected=machine.toolkit,
                    hint="name the right toolkit by CUDA_HOME")
        )  # fmt: skip
    if not shutil.which("cuobjdump", path=os.pathsep.join([environ.get("PATH", ""), CUDA_BIN])):
        what = "nothing else shows the GPUs of an extension"
        raise EnvironmentMissing(Problem("cuobjdump", "is not on PATH", expected=what))


def make_environment(environ: Mapping[str, str], machine: Machine, architectures: Sequence[str]) -> dict[str, str]:
    """Return the variables of a build for ``architectures``, such as ``80``; with ``90``, also of Hopper's own kernels.

    The library path has a stub of the driver, with which the extension is linked.
    """
    nvcc = find_nvcc(environ)
    if machine.platform != Platform.CUDA or nvcc is None:
        return dict(environ)
    home = nvcc.resolve().parent.parent
    stubs = [str(home / name) for name in STUBS if (home / name).is_dir()]
    listed = [f"{name[:-1]}.{name[-1]}" for name in architectures]
    own = {}
    if "90" in architectures:
        own = {SM90: "1"}
        listed.append("9.0a")
    return {
        **{name: value for name, value in environ.items() if name != SM90},
        **own,
        REQUIRE_EXTENSION: "1",
        "TORCH_CUDA_ARCH_LIST": ";".join(listed),
        "CUDA_HOME": str(home),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTORCH_NVCC": str(HERE / "nvcc.py"),
        NVCC: str(nvcc),
        ARCHITECTURES: " ".join(architectures),
        "LIBRARY_PATH": os.pathsep.join(filter(None, [*stubs, environ.get("LIBRARY_PATH", "")])),
    }


def repair(sources: Sources, machine: Machine, environ: Mapping[str, str]) -> BuildRecord:
    """Repair the sources where CUDA needs it, and return the record of their build."""
    variables, toolkit = build_variables(environ), machine.toolkit if SM90 in environ else None
    return BuildRecord(
        repository=sources.repository,
        commit=sources.commit,
        tree=sources.tree,
        is_dirty=sources.is_dirty,
        diff_sha256=sources.diff_sha256,
        repairs=apply_repairs(toolkit, sources.folder),
        build_variables={} if isinstance(variables, Unknown) else {name: str(variables[name]) for name in variables},
        platform=machine.platform,
        device_capability=machine.device_capability,
        torch=machine.torch,
        toolkit=machine.toolkit,
        nvcc=machine.nvcc,
    )


def install(made: BuildRecord, folder: Path, environ: Mapping[str, str]) -> None:
    """Build a wheel of the repaired sources in ``folder``, and install it.

    Raises:
        CheckFailed: the build failed; the error quotes its last lines.
    """
    with tempfile.TemporaryDirectory(prefix="rlk-repro-wheel-") as temporary:
        tools, wheels = Path(temporary, "tools"), Path(temporary, "wheels")
        wheels.mkdir()
        if not _has_build_tools(needs_ninja=made.platform != Platform.CPU):
            pip_install("--require-hashes", "--target", str(tools), "-r", str(BUILD_TOOLS))
        paths = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(tools), environ.get("PYTHONPATH", "")])),
            "PATH": os.pathsep.join([str(tools / "bin"), environ.get("PATH", os.defpath)]),
        }
        argv = [sys.executable, "-P", str(HERE / "with_torch.py"), str(wheels), made.platform]
        done = proc.run(argv, cwd=folder, env={**environ, **paths}, timeout_s=BUILD_TIMEOUT_S)
        require_done("building RL-Kernel", done)
        wheel = str(next(wheels.glob("*.whl")))
        _install_wheel(made, wheel)


def check(made: BuildRecord, architectures: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Check the installed extension and the classes that RL-Kernel chooses; return the class name of each operator.

    Raises:
        CheckFailed: symbols or machine code are missing, or an operator has another class than this platform's.
    """
    folder, platform, commit = find_folder(), Platform(made.platform), made.commit or ""
    if platform != Platform.CUDA and (found := find_extensions(folder)):
        raise CheckFailed(Problem(found[0].name, "was built", expected="no extension"))
    built = (*architectures, *HOPPER) if "90" in architectures else architectures
    code = [f"sm_{name}" for name in built]
    findings = list(check_extension(probe_extension(folder), platform, commit, code))
    answer = ask_registry(environ)
    if isinstance(answer, Unknown):
        hint = next((hint for needle, hint in BUILD_TROUBLE if needle in answer.reason), None)
        raise CheckFailed(Problem("rl_engine", f"cannot be imported ({answer.reason})", hint=hint))
    refuse([*findings, *match_operators(platform, commit, answer)])
    operators: dict[str, str] = answer["operators"]
    return operators


def refuse(findings: Sequence[Finding]) -> None:
    """Raise CheckFailed with all findings, if one of them is blocking."""
    if has_blocking(findings):
        raise CheckFailed(*(Problem(item.where, "is not what the stack needs", got=item.found, expected=item.expected)
                            for item in findings))  # fmt: skip


def pip_install(*arguments: str, path: Path | None = None, timeout_s: float = PIP_TIMEOUT_S) -> None:
    """Run ``pip install`` without dependencies, cache and compiled files.

    Raises:
        CheckFailed: pip failed; the error quotes its output.
    """
    environ = dict(os.environ) | ({"PYTHONPATH": str(path)} if path else {})
    done = proc.run([*PIP, *arguments], env=environ, timeout_s=timeout_s)
    require_done(f"pip install {arguments[-1]}", done)


def _has_build_tools(*, needs_ninja: bool) -> bool:
    try:
        setuptools = int(metadata.version("setuptools").split(".")[0])
    except (metadata.PackageNotFoundError, ValueError):
        return False
    has_wheel = setuptools >= 71 or importlib.util.find_spec("wheel") is not None
    return setuptools >= 64 and has_wheel and (not needs_ninja or shutil.which("ninja") is not None)


def require_done(what: str, done: proc.Completed) -> None:
    """Raise CheckFailed with the lines about errors, and advice where the problem is known."""
    if done.is_ok:
        return
    text = f"{done.stdout}\n{done.stderr}"
    words = ["time limit reached"] if done.is_timeout else _last_errors(text)
    hint = next((hint for needle, hint in BUILD_TROUBLE if needle in text), None)
    raise CheckFailed(Problem(what, "did not finish:", quoted=tuple(words), hint=hint))


def _last_errors(text: str) -> list[str]:
    """Return the lines about errors, the linker's own included, or the last lines without such a line."""
    lines = [line.strip()[:300] for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"error|Error|ERROR|Killed|cannot find|undefined reference", line)]
    return (errors or lines)[-8:]


def find_distribution() -> metadata.Distribution | None:
    """Return the metadata of the installed RL-Kernel; None if pip has not installed it."""
    importlib.invalidate_caches()
    return code.find_distribution(RL_KERNEL)


def find_folder() -> Path:
    """Return the folder of the installed ``rl_engine``, even if another copy comes first on Python's path."""
    distribution = find_distribution()
    assert distribution is not None
    return Path(str(distribution.locate_file(RL_KERNEL.module)))


def is_installed(record: BuildRecord) -> bool:
    """Tell whether this environment has an RL-Kernel of exactly this build, with unchanged files."""
    distribution = find_distribution()
    if distribution is None or load_build_record(distribution) != record:
        return False
    is_ours = Path(str(distribution.locate_file(""))).resolve().is_relative_to(Path(sys.prefix).resolve())
    return is_ours and find_changed_files(distribution, RL_KERNEL.module) == []


def _install_wheel(record: BuildRecord, wheel: str) -> None:
    """Install RL-Kernel's wheel, and add the build record to its metadata and list of files.

    Raises:
        CheckFailed: pip reported success, but no installation is found.
    """
    pip_install("--no-index", "--force-reinstall", wheel)
    distribution = find_distribution()
    listed = [file for file in (distribution.files if distribution else None) or [] if file.name == "RECORD"]
    if not listed:
        raise CheckFailed(Problem("pip install", f"left no distribution {' or '.join(RL_KERNEL.distributions)}"))
    listing = Path(str(listed[0].locate()))
    path = listing.parent / BUILD_RECORD
    write_json(path, asdict(record))
    # it names the wheel's folder, which no longer exists
    (listing.parent / "direct_url.json").unlink(missing_ok=True)
    rows = [row for row in listing.read_text().splitlines() if "/direct_url.json," not in row]
    rows.append(f"{listing.parent.name}/{path.name},sha256={record_digest(path)},{path.stat().st_size}")
    write_text(listing, "".join(f"{row}\n" for row in rows))
