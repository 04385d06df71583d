"""Run Ray on this node during one command.

``ray stop`` is never called, because it ends every Ray on the machine.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from rlk_repro.agent.outcome import quote_end
from rlk_repro.agent.ray.launch import RaySeat, render_start
from rlk_repro.base.files import write_bytes
from rlk_repro.base.guarded import Guarded

START_LOG: Final = "start.log"
MAX_LOG_BYTES: Final = 1 << 20
MAX_LOGS: Final = 1000
NUM_FILES: Final = 65535
_TAIL_BYTES: Final = 8192
# the path is short because paths of Unix sockets below it may have at most 107 bytes
_TEMP_ROOT: Final = "/tmp"  # noqa: S108 (only a new folder in it is used)
_PREFIX: Final = "rlk-ray-"
# a folder younger than this may belong to an agent that has not locked the folder yet
_LEFT_AFTER_S: Final = 60.0


class RayNode:
    """The process ``ray start --block`` and its guard; its drivers need the variables of ``client_env``."""

    def __init__(
        self,
        seat: RaySeat,
        env: Mapping[str, str],
        client_env: dict[str, str],
        retry_s: float,
        grace_s: float,
    ) -> None:
        self.reason = ""
        self.client_env = client_env
        self._seat = seat
        self._env = dict(env)
        self._retry_s = retry_s
        self._grace_s = grace_s
        self._guarded: Guarded | None = None
        self._next_start = 0.0
        remove_left_folders()
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_TEMP_ROOT))
        self._lock: int | None = None
        with suppress(OSError):  # on a file system without locks, the folders of killed agents stay
            self._lock = _lock_folder(self._folder)
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
            self.reason = self._explain(self._guarded)
            self._guarded.release()
            self._guarded = None
        if is_joining and time.monotonic() >= self._next_start:
            self._next_start = time.monotonic() + self._retry_s
            self._start()

    def end(self) -> None:
        if self._guarded is not None:
            self._guarded.end(self._grace_s)
            self._guarded = None

    def collect(self, folder: Path, scrub: Callable[[bytes], bytes]) -> None:
        """Copy the logs to ``folder``, and only the end of a long log."""
        for source, name in self._find_logs():
            data = scrub(_read_end(source))
            if data:
                write_bytes(folder / name, data, is_durable=False)

    def delete(self) -> None:
        """Delete Ray's temporary folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

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

    def _explain(self, guarded: Guarded) -> str:
        return f"ray start ended with {guarded.code or 0}: {quote_end(_read_end(self._log, _TAIL_BYTES))}"

    def _find_logs(self) -> Iterator[tuple[Path, Path]]:
        if self._log.is_file():
            yield self._log, Path(START_LOG)
        for latest in sorted(self._folder.glob("*/session_latest"), key=lambda path: path.lstat().st_mtime)[-1:]:
            logs = latest.resolve() / "logs"
            found = sorted(path for path in logs.rglob("*") if path.is_file() and not path.is_symlink())
            yield from ((path, path.relative_to(logs)) for path in found[:MAX_LOGS])


def remove_left_folders(root: Path = Path(_TEMP_ROOT)) -> None:
    """Remove the folders that killed agents left behind; no process locks such a folder any more."""
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # the folder belongs to another user, is removed already, or is locked
            found = folder.lstat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > _LEFT_AFTER_S:
                lock = _lock_folder(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _lock_folder(folder: Path) -> int:
    """Lock a folder until the returned handle is closed or this process ends."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def raise_file_limit() -> None:
    """Raise the soft limit of open files: Ray needs one connection per worker and actor, often more than 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = NUM_FILES if hard == resource.RLIM_INFINITY else min(NUM_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _is_free(port: int) -> bool:
    # Ray listens on all addresses.  A port whose connections are only closing counts as free.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def _read_end(path: Path, max_bytes: int = MAX_LOG_BYTES) -> bytes:
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(size - max_bytes, 0))
            data = stream.read(max_bytes)
    except OSError:
        return b""
    if size <= max_bytes:
        return data
    return b"[%d bytes before]\n" % (size - max_bytes) + data.partition(b"\n")[2]
