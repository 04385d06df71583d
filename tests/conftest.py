"""Shared by all tests: no test reaches a real scheduler, registry or container engine by accident."""

from __future__ import annotations

import gc
import importlib
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests import SUPPORT

if TYPE_CHECKING:
    from tests.support.slurm.cluster import Cluster
    from tests.support.slurm.runs import Site

# The first draw of text reads Unicode's tables, which takes seconds on a busy machine and says nothing of the test.
settings.register_profile("shared", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("shared")

# Torch's threads of several test workers would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

REAL_TOOLS = ("sbatch", "srun", "squeue", "sacct", "scancel", "scontrol", "kubectl", "docker", "podman", "enroot")

# Names that break whatever is put together as text instead of being passed as an argument.
WEIRD_NAMES = (
    "with space",
    "a'; echo foo",
    'double"quote',
    "$(touch pwned)",
    "`touch pwned`",
    "new\nline",
    "ünïcødé-名前",
    "-rf",
    "semi;colon&amp",
)


# Files whose heavy tests would count each other's mounts or want the same ports.
_CONTAINERS = ("test_build", "test_slurm_ray")


class OneFileAtATime(LoadScopeScheduling):  # type: ignore[misc]
    """The heavy tests of a file run in turn, they share what it starts; those with containers never side by side."""

    def _split_scope(self, nodeid: str) -> str:
        name = Path(nodeid.partition("::")[0]).stem
        return "containers" if name in _CONTAINERS else name


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """For ``--dist loadscope``; ``loadgroup`` of xdist 3.8 groups nothing under pytest 9.2."""
    return OneFileAtATime(config, log) if config.getoption("dist") == "loadscope" else None


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """What was there before a file's tests is left out of garbage collection, which would visit 700 000 objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def loud_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every real cluster tool, each of which fails loudly."""
    folder = tmp_path_factory.mktemp("no-real-tools")
    for name in REAL_TOOLS:
        tool = folder / name
        tool.write_text(f"#!/bin/sh\necho 'a test tried to run {name}' >&2\nexit 97\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    return folder


@pytest.fixture(autouse=True)
def no_real_tools(loud_tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every real cluster tool is shadowed by one that fails loudly; a test that needs a fake puts its own in front."""
    monkeypatch.setenv("PATH", f"{loud_tools}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """What a command sets for its children, such as PYTHONPATH for checkouts, ends with the test."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def states(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A new folder for each test; they lie in one, as pytest looks through all folders of its own for the next name."""
    root = tmp_path_factory.mktemp("states")
    return (root / str(number) for number in count())


@pytest.fixture(autouse=True)
def own_runs_root(tmp_path: Path, states: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No test writes into the user's runs or state folder, or reads the user's profiles."""
    state = next(states)
    state.mkdir()
    monkeypatch.setenv("RLK_REPRO_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(state))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A real Slurm for the tests of one file; a file that needs another one has a fixture of this name."""
    from tests.support.slurm.runs import start_or_skip

    running = start_or_skip(tmp_path_factory.mktemp("slurm") / "c")
    yield running
    running.close()


@pytest.fixture
def site(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_real_tools: None) -> Iterator[Site]:
    """That Slurm with its real clients, and nothing of it left behind by the test."""
    from tests.support.slurm.runs import on_site

    with on_site(cluster, tmp_path, monkeypatch) as here:
        yield here


@pytest.fixture
def torch_as_it_was() -> Iterator[None]:
    """The trainer sets up torch and the heap for its process; here the process goes on."""
    import torch

    num_threads, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    yield
    torch.set_num_threads(num_threads)
    torch.set_deterministic_debug_mode(mode)
    gc.freeze()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB; only root may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "rlk-repro-test", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        assert not os.environ.get("RLK_REPRO_REQUIRE_SLURM"), "a small file system cannot be mounted"
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command line in this process; its exit code, standard output and standard error."""
    from rlk_repro import cli

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rlk-repro", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        code = caught.value.code
        captured = capfd.readouterr()
        return (0 if code is None else int(code)), captured.out, captured.err

    return run


@pytest.fixture
def rl_kernel_not_imported() -> Iterator[None]:
    """Whatever a test imports: where the module lies is found anew, by the test and after it."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "rl_engine"]:
            del sys.modules[name]
        importlib.invalidate_caches()

    forget()
    yield
    forget()


@pytest.fixture
def rl_kernel(rl_kernel_not_imported: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The registry of the double in tests/support/fake_rl_engine, alone in this process."""
    monkeypatch.syspath_prepend(str(SUPPORT / "fake_rl_engine"))
    return importlib.import_module("rl_engine.kernels.registry").kernel_registry


@pytest.fixture
def without_rl_kernel(rl_kernel_not_imported: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were not installed in this environment, where ``make demo-rl-kernel`` has put it."""
    monkeypatch.setitem(sys.modules, "rl_engine", None)
