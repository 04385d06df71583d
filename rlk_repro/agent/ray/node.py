"""Run Ray on this node during one command; the leader and the other nodes do this in the same way.

``ray stop`` is never called, because it ends every Ray on the machine.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rlk_repro.agent.ends import read_log_end
from rlk_repro.agent.parts import Agent
from rlk_repro.agent.step import Step, find_command
from rlk_repro.base.errors import EnvironmentMissing, Problem
from rlk_repro.base.files import read_end, write_bytes
from rlk_repro.base.guarded import Guarded
from rlk_repro.base.secrets import Scrubber
from rlk_repro.probes.host import read_free_memory
from rlk_repro.spec import Profile
from rlk_repro.spec.site import knows_tokens
from rlk_repro.workloads.environment import resolve_env

HEAD_PORTS: Final = ("port", "dashboard-port", "ray-client-server-port")
NODE_PORTS: Final = (
    "node-manager-port",
    "object-manager-port",
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "runtime-env-agent-port",
    "metrics-export-port",
)
PORTS_PER_RUN: Final = len(HEAD_PORTS) + len(NODE_PORTS)
PORT_LIMIT: Final = 9000
START_LOG: Final = "start.log"
MAX_LOG_BYTES: Final = 1 << 20
MAX_LOGS: Final = 1000
NUM_FILES: Final = 65535
SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108  (only the folder's size is read)
MIN_STORE_BYTES: Final = 80 << 20
MAX_STORE_BYTES: Final = 200 * 10**9
_TAIL_BYTES: Final = 8192
# the path is short because paths of Unix sockets below it may have at most 107 bytes
_TEMP_ROOT: Final = "/tmp"  # noqa: S108 (only a new folder in it is used)

SETTINGS: Final = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",  # else every server reports GPU type and model class
    "DO_NOT_TRACK": "1",
    # some later releases end `ray start` only after 30 s, to let running work end; here no work is left
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # logs keep every line that the workers wrote, and have no colours
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
}


def find_first_port(profile: Profile) -> int:
    """Return the port of Ray's head; runs on different GPUs of one machine get different ports."""
    return profile.ray.first_port + PORTS_PER_RUN * min(profile.gpus, default=0)


def require_tokens() -> None:
    """Refuse a version of Ray without token authentication, in which any host that reaches Ray's ports can run code.

    Raises:
        EnvironmentMissing: the installed Ray has no token authentication.
    """
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        return  # Ray is not installed, so no Ray process needs a token
    if not knows_tokens(version):
        raise EnvironmentMissing(Problem("python module ray", "has no authentication", got=version,
                                         expected="2.52 or later, which authenticates by token"))  # fmt: skip


def find_ports(agent: Agent) -> dict[str, int]:
    """Return Ray's ports on this node; several nodes of a machine get different ones."""
    first, index = find_first_port(agent.plan.profile), agent.place.nodes.index(agent.place.node)
    begin = first + len(HEAD_PORTS)
    num_blocks = (PORT_LIMIT - begin) // len(NODE_PORTS)
    begin += index % num_blocks * len(NODE_PORTS)
    ports = {name: begin + number for number, name in enumerate(NODE_PORTS)}
    if index == 0:
        ports |= {name: first + number for number, name in enumerate(HEAD_PORTS)}
        # without grpc, Ray refuses this port; with grpc and without the option, it takes port 10001
        if find_spec("grpc") is None:
            del ports[HEAD_PORTS[-1]]
    return ports


def find_store_bytes(shm_bytes: int, memory_bytes: int) -> int:
    """Return the size of Ray's object store: half of ``/dev/shm``, as NCCL and vLLM need the rest.

    Where that is more than Ray's own default (30 % of the memory, at most 200 GB), the default
    holds.  Left to itself, Ray takes a slow folder of ``/tmp`` in containers with a small /dev/shm.
    """
    largest = min(shm_bytes // 2, memory_bytes * 3 // 10, MAX_STORE_BYTES)
    return max(largest, MIN_STORE_BYTES)


def find_own_address(agent: Agent, others: tuple[str, ...]) -> str:
    return agent.parts.find_address(agent.place.node, others, agent.plan.profile.ray.interface)


class RayNode:
    """The process ``ray start --block`` and its guard; its drivers need the variables of ``client_env``.

    Ray's workers get the environment of the step's command.
    """

    def __init__(self, agent: Agent, step: Step) -> None:
        """Prepare Ray on this node without starting it."""
        head = step.head.rpartition(":")[0]
        command = find_command(agent, step.use)
        self.use = step.use
        self.reason = ""
        self._agent = agent
        self._head = step.head
        self._address = head
        if not agent.place.is_leader:
            self._address = find_own_address(agent, (head,))
        self._ports = find_ports(agent)
        own = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(agent.run_dir.ray_token.absolute()),
            "MASTER_ADDR": head,
            **dict.fromkeys(command.address_names, self._address),
        }
        self.client_env = SETTINGS | own | {"RAY_ADDRESS": step.head}
        self._env = resolve_env(command, os.environ) | SETTINGS | own
        self._scrub = Scrubber.from_environment(named=command.from_env.values()).bytes
        self._guarded: Guarded | None = None
        self._next_start = 0.0
        self._folder = Path(tempfile.mkdtemp(prefix="rlk-ray-", dir=_TEMP_ROOT))
        self._log = self._folder / START_LOG

    @property
    def is_up(self) -> bool:
        return self._guarded is not None and self._guarded.poll() is None

    @property
    def session(self) -> int | None:
        return None if self._guarded is None else self._guarded.pid

    def keep(self, *, is_joining: bool) -> None:
        """Find out whether Ray has ended and, if ``is_joining``, restart it; while Ray is down, ``reason`` says why."""
        if self.is_up:
            return
        if self._guarded is not None:
            quote = read_log_end(read_end(self._log, _TAIL_BYTES)).quote
            self.reason = f"ray start ended with {self._guarded.code or 0}: {quote}"
            self._guarded.release()
            self._guarded = None
        if is_joining and time.monotonic() >= self._next_start:
            self._next_start = time.monotonic() + self._agent.deadlines.ray_retry_s
            self._start()

    def put_away(self, *, keeps_logs: bool) -> None:
        """Stop Ray on this node, copy the ends of its logs if they are kept, and delete its temporary folder."""
        self.keep(is_joining=False)
        if self._guarded is not None:
            self._guarded.end(self._agent.deadlines.grace_s)
            self._guarded = None
        if keeps_logs:
            folder = self._agent.run_dir.node(self._agent.place.node).ray_logs(self.use)
            for source, name in self._find_logs():
                if data := self._scrub(read_end(source, MAX_LOG_BYTES)):
                    write_bytes(folder / name, data, is_durable=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def render_start(self, temp_dir: str) -> tuple[str, ...]:
        argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        argv += ["--log-style", "record", "--log-color", "false", "--temp-dir", temp_dir]
        argv += ["--node-ip-address", self._address, "--node-name", self._agent.place.node]
        argv += ["--num-gpus", str(self._agent.plan.layout.gpus_per_node)]
        store = find_store_bytes(shutil.disk_usage(SHARED_MEMORY).total, read_free_memory() or 0)
        argv += ["--object-store-memory", str(store)]
        argv += ["--min-worker-port", "0", "--max-worker-port", "0"]
        for name, port in self._ports.items():
            argv += [f"--{name}", str(port)]
        if not self._agent.place.is_leader:
            return (*argv, "--address", self._head)
        # the dashboard would take processor time during trials, and is not used
        return (*argv, "--head", "--include-dashboard", "false")

    def _start(self) -> None:
        taken = [f"{port} ({name})" for name, port in self._ports.items() if not _is_free(port)]
        if taken:
            self.reason = f"port {', '.join(taken)} is taken on {self._address}"
            return
        raise_file_limit()
        argv = self.render_start(tempfile.mkdtemp(dir=self._folder, prefix=""))
        with self._log.open("ab") as log:
            log.write(f"{' '.join(argv)}\n".encode())
            log.flush()
            self._guarded = Guarded(argv, self._env, log.fileno())

    def _find_logs(self) -> Iterator[tuple[Path, Path]]:
        if self._log.is_file():
            yield self._log, Path(START_LOG)
        for latest in sorted(self._folder.glob("*/session_latest"), key=lambda path: path.lstat().st_mtime)[-1:]:
            logs = latest.resolve() / "logs"
            found = sorted(path for path in logs.rglob("*") if path.is_file() and not path.is_symlink())
            yield from ((path, path.relative_to(logs)) for path in found[:MAX_LOGS])


def raise_file_limit() -> None:
    """Raise the soft limit of open files: Ray needs one connection per worker and actor, often more than 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_FILES if hard == resource.RLIM_INFINITY else hard, hard))


def _is_free(port: int) -> bool:
    # Ray listens on all addresses.  A port whose connections are only closing counts as free.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True
