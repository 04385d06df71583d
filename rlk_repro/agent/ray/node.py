"""Run Ray on this node during one command; the leader and the other nodes do this in the same way.

``ray stop`` is never called, because it ends every Ray on the machine.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rlk_repro.agent.parts import Agent
from rlk_repro.agent.ray.launch import SETTINGS, RaySeat, find_store_bytes, render_env, render_start
from rlk_repro.agent.step import Step, find_command
from rlk_repro.base.escapes import quote_end
from rlk_repro.base.files import read_end, write_bytes
from rlk_repro.base.guarded import Guarded
from rlk_repro.base.secrets import Scrubber
from rlk_repro.probes.host import read_free_memory
from rlk_repro.workloads.environment import resolve_env

START_LOG: Final = "start.log"
MAX_LOG_BYTES: Final = 1 << 20
MAX_LOGS: Final = 1000
NUM_FILES: Final = 65535
SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108  (only the folder's size is read)
_TAIL_BYTES: Final = 8192
# the path is short because paths of Unix sockets below it may have at most 107 bytes
_TEMP_ROOT: Final = "/tmp"  # noqa: S108 (only a new folder in it is used)


def find_own_address(agent: Agent, others: tuple[str, ...]) -> str:
    return agent.parts.find_address(agent.place.node, others, agent.plan.profile.ray.interface)


def make_ray_node(agent: Agent, step: Step) -> RayNode:
    """Prepare Ray on this node without starting it; Ray's workers get the environment of the step's command."""
    head = step.head.rpartition(":")[0]
    seat = RaySeat(
        index=agent.place.nodes.index(agent.place.node),
        node=agent.place.node,
        address=head if agent.place.is_leader else find_own_address(agent, (head,)),
        head=step.head,
        num_gpus=agent.plan.layout.gpus_per_node,
        first_port=agent.plan.profile.ray.first_port,
        has_client=find_spec("grpc") is not None,
        store_bytes=find_store_bytes(shutil.disk_usage(SHARED_MEMORY).total, read_free_memory() or 0),
    )
    return RayNode(agent, seat, step.use)


class RayNode:
    """The process ``ray start --block`` and its guard; its drivers need the variables of ``client_env``."""

    def __init__(self, agent: Agent, seat: RaySeat, use: str) -> None:
        self.reason = ""
        command = find_command(agent, use)
        own = render_env(seat, str(agent.run_dir.ray_token.absolute()), command.address_names)
        self.client_env = SETTINGS | own | {"RAY_ADDRESS": seat.head}
        self._agent = agent
        self._seat = seat
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
            quote = quote_end(read_end(self._log, _TAIL_BYTES))
            self.reason = f"ray start ended with {self._guarded.code or 0}: {quote}"
            self._guarded.release()
            self._guarded = None
        if is_joining and time.monotonic() >= self._next_start:
            self._next_start = time.monotonic() + self._agent.deadlines.ray_retry_s
            self._start()

    def put_away(self, step: Step) -> None:
        """Stop Ray on this node, copy the ends of its logs if the step keeps them, and delete its temporary folder."""
        self.keep(is_joining=False)
        if self._guarded is not None:
            self._guarded.end(self._agent.deadlines.grace_s)
            self._guarded = None
        if step.keeps_logs:
            folder = self._agent.run_dir.node(self._agent.place.node).ray_logs(step.use)
            for source, name in self._find_logs():
                if data := self._scrub(read_end(source, MAX_LOG_BYTES)):
                    write_bytes(folder / name, data, is_durable=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        taken = [f"{number} ({name})" for name, number in self._seat.ports().items() if not _is_free(number)]
        if taken:
            self.reason = f"port {', '.join(taken)} is taken on {self._seat.address}"
            return
        raise_file_limit()
        argv = render_start(self._seat, tempfile.mkdtemp(dir=self._folder, prefix=""))
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
