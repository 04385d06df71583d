"""What the tests build images from: a small Debian with exactly what the Dockerfiles need of vime's image, repositories
that stand for vime and RL-Kernel, and a registry; all of them on loopback and in folders of the test.

The stand-in's compiler is real (tcc), so that a real Python loads its extension; its nvcc compiles for no GPU and notes
for which it was asked.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from rlk_repro.images.build import CONTEXT
from tests import ROOT
from tests.support.probe_examples import commit_files, write_tree
from tests.support.waiting import find_port
from tools.image_build.package import BUILD_LOCK, LOCK, select_missing

PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
NEEDED = ("mmdebstrap", "buildah", "podman", "skopeo", "docker-registry", "git")
DEBIAN = ("git", "libstdc++6", "python3", "python3-distutils", "python3-venv", "tcc")
SITE = "usr/local/lib/python3.11/dist-packages"
EPOCH = "1767225600"
# What the package needs, and what builds it: taken from the Python of the tests, so that nothing is downloaded.
LOCKED = sorted(select_missing(LOCK.read_text() + BUILD_LOCK.read_text(), present=()))
DISTRIBUTIONS = (*LOCKED, "pip", "setuptools")

TORCH = {
    "torch/__init__.py": """
        import types
        __version__ = "2.11.0+cu129"
        version = types.SimpleNamespace(cuda="12.9", hip=None)
        def _none(device=None):
            raise RuntimeError("no GPU")
        cuda = types.SimpleNamespace(is_available=lambda: False, get_device_capability=_none)
    """,
    "torch/utils/__init__.py": "",
    "torch/utils/cpp_extension.py": """
        import os, subprocess
        from setuptools import Extension
        from setuptools.command.build_ext import build_ext
        def CUDAExtension(name, sources, extra_compile_args=None, **_):
            made = Extension(name, sources)
            made.flags = extra_compile_args or {}
            return made
        class BuildExtension(build_ext):
            def build_extension(self, ext):
                target = self.get_ext_fullpath(ext.name)
                os.makedirs(self.build_temp, exist_ok=True)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                objects = [os.path.join(self.build_temp, f"{number}.o") for number in range(len(ext.sources))]
                for source, made in zip(ext.sources, objects):
                    nvcc = os.environ.get("PYTORCH_NVCC", "/usr/local/cuda/bin/nvcc")
                    tool = [nvcc, *ext.flags["nvcc"]] if source.endswith(".cu") else ["tcc", "-x", "c"]
                    subprocess.run([*tool, "-c", source, "-o", made], check=True)
                subprocess.run(["tcc", "-shared", "-nostdlib", "-o", target, *objects], check=True)
    """,
    "torch-2.11.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0+cu129\n",
}
NVCC = """\
#!/usr/bin/python3
import re, subprocess, sys, tempfile
if "--version" in sys.argv:
    print("Cuda compilation tools, release 12.9, V12.9.41")
    sys.exit()
source, target = sys.argv[sys.argv.index("-c") + 1], sys.argv[sys.argv.index("-o") + 1]
codes = re.findall(r"code=(sm_[0-9a-z]+)", " ".join(sys.argv))
if not codes:
    sys.exit("nvcc fatal: no architecture")
name = re.sub(r"[^a-z0-9]", "_", source)
marks = "".join(f'const char {name}_{code}[] = "ELF file 1: x.{code}.cubin";\\n' for code in codes)
with tempfile.NamedTemporaryFile("w", suffix=".c") as stream:
    stream.write(open(source).read() + marks)
    stream.flush()
    subprocess.run(["tcc", "-c", stream.name, "-o", target], check=True)
"""
CUOBJDUMP = """\
#!/usr/bin/python3
import re, sys
for name in re.findall(rb"ELF file 1: (x[.]sm_[0-9a-z]+[.]cubin)", open(sys.argv[2], "rb").read()):
    if sys.argv[1] == "--list-elf":
        print("ELF file    1:", name.decode())
"""

REGISTRY = """
    import torch
    class NativeLogpOp:
        def online_fp32(self, logits, tokens):
            return torch.log_softmax(logits.float(), -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    class NativeRatioKLOp: pass
    class NativeGRPOLossOp: pass
    class NativeLinearLogpOp: pass
    KINDS = {"logp": NativeLogpOp, "ratio_kl": NativeRatioKLOp, "grpo_loss": NativeGRPOLossOp,
             "linear_logp": NativeLinearLogpOp}
    class Registry:
        def get_op(self, name):
            return KINDS.get(name, NativeLogpOp)()
    kernel_registry = Registry()
"""
OPERATORS = """
    struct method { const char *name; void *call; int flags; const char *doc; };
    struct module { long head[2]; void *init; long index; void *copy; const char *name; const char *doc; long size;
                    struct method *methods; void *rest[4]; };
    extern void *PyModule_Create2(void *, int);
    extern void *PyBool_FromLong(long);
    static void *yes(void *self, void *arguments) { return PyBool_FromLong(1); }
    static struct method methods[] = { NAMES {0, 0, 0, 0} };
    static struct module definition = { {1, 0}, 0, 0, 0, "_C", 0, -1, methods };
    void *PyInit__C(void) { return PyModule_Create2(&definition, 1013); }
"""
SYMBOLS = ("fused_logp", "fused_logp_forward_online_fp32", "fused_logp_sm90", "fused_linear_logp_sm90")
SETUP = """
    import os, torch
    from setuptools import find_packages, setup
    from torch.utils.cpp_extension import BuildExtension, CUDAExtension
    extensions = []
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        files, flags = ["csrc/ops.cpp", "csrc/fused_logp.cu"], ["-O3"]
        if os.environ.get("KERNEL_ALIGN_FORCE_SM90") == "1":
            files.append("csrc/cuda/fused_logp_sm90.cu")
            flags.append(f"-gencode=arch=compute_{major}{minor}a,code=sm_{major}{minor}a")
        extensions = [CUDAExtension("rl_engine._C", files, extra_compile_args={"nvcc": flags})]
    setup(name="RL-Kernel", version="0.1.0", packages=find_packages(include=["rl_engine*"]), ext_modules=extensions,
          cmdclass={"build_ext": BuildExtension}, entry_points={"console_scripts": ["rlk-repro = rl_engine:main"]})
"""


def rl_kernel_files(symbols: Sequence[str] = SYMBOLS) -> dict[str, str]:
    names = " ".join(f'{{"{name}", (void *)yes, 4, 0}},' for name in symbols)
    files = {
        "setup.py": SETUP,
        "pyproject.toml": '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n',
        "rl_engine/__init__.py": "",
        "rl_engine/kernels/__init__.py": "",
        "rl_engine/kernels/registry.py": REGISTRY,
        "rl_engine/platforms/__init__.py": "",
        "rl_engine/platforms/device.py": "import types\ndevice_ctx = types.SimpleNamespace(device_type='cpu')\n",
        "csrc/ops.cpp": OPERATORS.replace("NAMES", names),
        "csrc/fused_logp.cu": "int generic(void) { return 1; }\n",
        "csrc/cuda/fused_logp_sm90.cu": "int hopper(void) { return 1; }\n",
    }
    return {name: textwrap.dedent(text) for name, text in files.items()}


VIME = {
    "setup.py": 'from setuptools import setup\nsetup(name="vime", version="0.3.0", packages=["vime"])\n',
    "vime/__init__.py": "",
    ".gitignore": "*.egg-info\n__pycache__\nbuild\n",
}


def run(
    *words: str | Path, env: Mapping[str, str] | None = None, check: bool = True, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    inherited = {"HOME": os.environ["HOME"], "PATH": PATH, "LC_ALL": "C.UTF-8"}
    done = subprocess.run([str(word) for word in words], env={**inherited, **(env or {})}, capture_output=True,
                          text=True, check=False, errors="replace", cwd=cwd)  # fmt: skip
    assert not check or done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise AssertionError(f"{process.args!r} does not listen")


@contextlib.contextmanager
def serving(words: Sequence[str], port: int, log: Path) -> Iterator[None]:
    with log.open("wb") as stream:
        process = subprocess.Popen(words, stdout=stream, stderr=stream, env={"PATH": PATH, "HOME": str(log.parent)})
        try:
            wait_for_port(port, process)
            yield
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[str]:
    """A registry of Debian's docker-registry; ``127.0.0.1:PORT``."""
    port = find_port()
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"version": 0.1, "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
                "http": {"addr": f"127.0.0.1:{port}"}, "log": {"level": "error"}}  # fmt: skip
    (folder / "registry.yml").write_text(yaml.safe_dump(settings))
    words = [shutil.which("docker-registry", path=PATH) or "", "serve", str(folder / "registry.yml")]
    with serving(words, port, folder / "registry.log"):
        yield f"127.0.0.1:{port}"


@contextlib.contextmanager
def git_server(folder: Path) -> Iterator[str]:
    """Repositories of a folder by git's own protocol; ``git://127.0.0.1:PORT``."""
    port = find_port()
    words = ["git", "-c", "safe.directory=*", "daemon", "--export-all", f"--base-path={folder}",
             "--listen=127.0.0.1", f"--port={port}", "--reuseaddr"]  # fmt: skip
    log = folder / "daemon.log"
    with serving([shutil.which("git", path=PATH) or "", *words[1:]], port, log):
        yield f"git://127.0.0.1:{port}"


@dataclass(frozen=True)
class Engine:
    """buildah, podman and skopeo on a storage of their own; loopback registries speak plain HTTP."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    @classmethod
    def make(cls, folder: Path, host: str) -> Engine:
        runtime = next(name for name in ("runc", "crun") if shutil.which(name, path=PATH))
        storage = (
            f'[storage]\ndriver = "{_find_driver(folder)}"\ngraphroot = "{folder}/storage"\nrunroot = "{folder}/run"\n'
        )
        registries = f'[[registry]]\nlocation = "{host}"\ninsecure = true\n'
        containers = ('[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]\n'
                      f'[engine]\ncgroup_manager = "cgroupfs"\nruntime = "{runtime}"\n')  # fmt: skip
        policy = '{"default": [{"type": "insecureAcceptAnything"}]}'
        write_tree(folder, {"storage.conf": storage, "registries.conf": registries, "containers.conf": containers,
                            "home/.config/containers/policy.json": policy,
                            "home/.config/containers/registries.conf": registries})  # fmt: skip
        return cls(folder, {"CONTAINERS_STORAGE_CONF": f"{folder}/storage.conf", "HOME": f"{folder}/home",
                            "CONTAINERS_REGISTRIES_CONF": f"{folder}/registries.conf", "PATH": PATH,
                            "CONTAINERS_CONF": f"{folder}/containers.conf", "BUILDAH_ISOLATION": "chroot"})  # fmt: skip

    def run(self, *words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        return run("nice", "-n", "5", *words, env=self.variables, check=check)


def _find_driver(folder: Path) -> str:
    """Return ``overlay`` where it can be mounted; ``vfs`` copies the whole image for each container and step."""
    lower, upper, work, merged = (folder / f"driver/{name}" for name in ("lower", "upper", "work", "merged"))
    for part in (lower, upper, work, merged):
        part.mkdir(parents=True)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    if run("mount", "-t", "overlay", "overlay", "-o", options, merged, check=False).returncode != 0:
        return "vfs"
    run("umount", merged)
    return "overlay"


def unmount_below(folder: Path) -> None:
    """End the mounts that killed containers leave; pytest could not delete the folder of a run before."""
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        place = line.split()[1]
        if place.startswith(f"{folder}/"):
            run("umount", "--lazy", place, check=False)


def require_tools() -> None:
    reason = _find_obstacle()
    if reason:
        if os.environ.get("RLK_REPRO_REQUIRE_IMAGES"):
            pytest.fail(reason)
        pytest.skip(reason)


def _find_obstacle() -> str:
    missing = [name for name in NEEDED if shutil.which(name, path=PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if not Path("/usr/share/keyrings/debian-archive-keyring.gpg").is_file():
        return "not installed: debian-archive-keyring"
    if sys.version_info[:2] != (3, 11):
        return "the stand-in is Debian 12, whose Python is 3.11: its packages come from the Python of the tests"
    return "" if os.geteuid() == 0 else "needs root, as an image's build does"


def make_base(engine: Engine, folder: Path, git_config: str) -> str:
    """The stand-in for vime's image, in the engine's storage, with the mirror that its git has; its name."""
    folder.mkdir(parents=True, exist_ok=True)
    root = folder / "root.tar"
    options = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "locale", "man")]
    engine.run("mmdebstrap", "--quiet", "--variant=essential", "--mode=root", *options,
               f"--include={','.join(DEBIAN)}", "bookworm", root)  # fmt: skip
    added = folder / "added"
    write_tree(added, {f"{SITE}/{name}": textwrap.dedent(text) for name, text in TORCH.items()})
    write_tree(added, {"usr/local/cuda/bin/nvcc": NVCC, "usr/local/cuda/bin/cuobjdump": CUOBJDUMP})
    write_tree(added, {"etc/gitconfig": git_config, "usr/local/bin/ninja": "#!/bin/sh\necho 1.13.0\n"})
    for tool in ("usr/local/cuda/bin/nvcc", "usr/local/cuda/bin/cuobjdump", "usr/local/bin/ninja"):
        (added / tool).chmod(0o755)
    _copy_distributions(added / SITE)
    commit_files(added / "root/vime", VIME, "older")
    _add_megatron(added)
    container = engine.run("buildah", "from", "scratch").stdout.strip()
    engine.run("buildah", "add", "--quiet", container, root, "/")
    engine.run("buildah", "add", "--quiet", container, added, "/")
    engine.run("buildah", "run", container, "--", "rm", "-f", "/usr/lib/python3.11/EXTERNALLY-MANAGED")
    alone = ("--env", "GIT_ALLOW_PROTOCOL=git", "--env", "PIP_NO_INDEX=1")
    engine.run("buildah", "config", "--cmd", "sh", *alone, container)
    engine.run("buildah", "commit", "--quiet", "--rm", container, "localhost/base")
    root.unlink()
    return "localhost/base"


def _add_megatron(added: Path) -> None:
    """A checkout with a patch, as vime's image has it."""
    commit_files(added / "root/Megatron-LM", {"megatron/__init__.py": "", "megatron/core.py": "VALUE = 1\n"})
    (added / "root/Megatron-LM/megatron/core.py").write_text("VALUE = 2\n")
    metadata = "Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.16.0\n"
    write_tree(added / SITE, {"megatron_core-0.16.0.dist-info/METADATA": metadata,
                              "megatron.pth": "/root/Megatron-LM\n"})  # fmt: skip


def _copy_distributions(site: Path) -> None:
    for name in DISTRIBUTIONS:
        for file in importlib.metadata.distribution(name).files or []:
            if ".." in file.parts or file.suffix == ".pyc":
                continue
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(file.locate()), target)


@dataclass(frozen=True)
class Upstream:
    """Repositories that stand for vime and RL-Kernel, with the commits that the stack ``test`` pins."""

    folder: Path
    url: str
    vime: str
    rl_kernel: str

    @classmethod
    def make(cls, folder: Path, url: str) -> Upstream:
        vime = commit_files(folder / "vime", {**VIME, "vime/loss.py": "VALUE = 1\n"}, "newer")
        return cls(folder, url, vime, commit_files(folder / "rl-kernel", rl_kernel_files()))

    def stack(self, base: str, digest: str) -> dict[str, object]:
        platform = "cuda-amd64"
        return {
            "stack": "test",
            "purpose": "Stand-ins of vime and RL-Kernel.",
            "bases": {platform: {"reference": base, "digest": digest, "confidence": "certain", "evidence": "here"}},
            "unpublished": {platform: {"build": "rlk-repro images build", "reason": "for tests only"}},
            "pins": {"vime": {"repository": f"{self.url}/vime", "commit": self.vime},
                     "rl_kernel": {"repository": f"{self.url}/rl-kernel", "commit": self.rl_kernel}},
        }  # fmt: skip


def make_context(folder: Path, stack: Mapping[str, object]) -> Path:
    """What a build sees of this project, and the stack of the test besides."""
    for name in CONTEXT:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    (folder / "manifests/stacks/test.yaml").write_text(yaml.safe_dump(dict(stack), sort_keys=False))
    return folder
