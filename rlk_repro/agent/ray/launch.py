"""Compute how Ray is started on one node: ports, arguments, environment."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from rlk_repro.base.errors import EnvironmentMissing, Problem
from rlk_repro.spec.site import knows_tokens

HEAD_PORTS: Final = ("port", "dashboard-port", "ray-client-server-port")
NODE_PORTS: Final = (
    "node-manager-port",
    "object-manager-port",
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "runtime-env-agent-port",
    "metrics-export-port",
)
PORT_LIMIT: Final = 9000
MIN_STORE_BYTES: Final = 80 << 20
MAX_STORE_BYTES: Final = 200 * 10**9

SETTINGS: Final = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # some later releases end `ray start` only after 30 s, to let running work end; here no work is left
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # logs keep every line that the workers wrote, and have no colours
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
}


@dataclass(frozen=True, kw_only=True)
class RaySeat:
    """The place of one node in a Ray cluster; ``index`` 0 is Ray's head, and ``head`` is its address and port."""

    index: int
    node: str
    address: str
    head: str
    num_gpus: int
    first_port: int
    has_client: bool
    store_bytes: int

    def ports(self) -> dict[str, int]:
        """Return Ray's ports on this node; nodes that share a machine get different ports if there are enough ports."""
        # without grpc, Ray refuses a port for its client; with grpc and without this option, Ray takes port 10001
        names = HEAD_PORTS if self.has_client else HEAD_PORTS[:-1]
        own = {name: self.first_port + number for number, name in enumerate(names)} if self.index == 0 else {}
        begin = self.first_port + len(HEAD_PORTS)
        num_blocks = (PORT_LIMIT - begin) // len(NODE_PORTS)
        begin += self.index % num_blocks * len(NODE_PORTS)
        return own | {name: begin + number for number, name in enumerate(NODE_PORTS)}


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


def find_store_bytes(shm_bytes: int, memory_bytes: int) -> int:
    """Return the size in bytes of Ray's object store: half of ``/dev/shm``, because NCCL and vLLM need the other half.

    The store is at most as large as Ray's default (30 % of the memory, 200 GB) and at least what Ray needs to start.
    """
    return max(min(shm_bytes // 2, memory_bytes * 3 // 10, MAX_STORE_BYTES), MIN_STORE_BYTES)


def render_start(seat: RaySeat, temp_dir: str) -> tuple[str, ...]:
    argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--log-style", "record"]
    argv += ["--log-color", "false", "--node-ip-address", seat.address, "--node-name", seat.node]
    argv += ["--num-gpus", str(seat.num_gpus), "--temp-dir", temp_dir]
    argv += ["--object-store-memory", str(seat.store_bytes)]
    argv += ["--min-worker-port", "0", "--max-worker-port", "0"]
    for name, port in seat.ports().items():
        argv += [f"--{name}", str(port)]
    if seat.index > 0:
        return (*argv, "--address", seat.head)
    # the dashboard would take processor time during trials, and is not used
    return (*argv, "--head", "--include-dashboard", "false")


def render_env(seat: RaySeat, token_path: str, address_names: Iterable[str] = ()) -> dict[str, str]:
    """Return variables for Ray: token path, head address, and this node's address for each of ``address_names``."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": token_path,
        "MASTER_ADDR": seat.head.rpartition(":")[0],
        **dict.fromkeys(address_names, seat.address),
    }
