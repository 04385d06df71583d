"""Start other processes; no command passes through a shell, and no Python child imports from where it stands."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.errors import EnvironmentMissing, Problem

# A process outside the group of a killed command may keep the pipes open.
DRAIN_S: Final = 0.5
RETRY_S: Final = 1.0
# what kubectl, Slurm's clients and skopeo say when a server is away, overloaded or restarting
OUTAGE: Final = re.compile(
    r"connection (?:refused|reset)|was refused|timed? ?out|no such host|TLS handshake|\bEOF\b|deadline exceeded"
    r"|Service ?Unavailable|Too ?Many ?Requests|network is unreachable|no route to host|unable to co(?:nnect|ntact)"
    r"|Internal ?(?:Server ?)?Error|etcdserver|Bad Gateway|unable to handle|unable to return a response"
    r"|temporarily unavailable|Zero Bytes|standby mode|status 5\d\d|talking to the database",
    re.IGNORECASE,
)


# These variables name folders; a child with another working folder must still find them.
_FOLDERS: Final = ("VIME_SRC", "MEGATRON_SRC", "RLK_SRC", "RLK_COMMITS")


def isolate(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Python imports nothing from the folder where it starts or where its script lies.

    A reader unpacks a stranger's bundle and stands in that folder.  What the user names in ``PYTHONPATH`` is kept.
    """
    found = {name: str(Path(environ[name]).absolute()) for name in _FOLDERS if environ.get(name)}
    if "PYTHONPATH" in environ:
        # Python takes an empty entry as the folder where it starts
        entries = [str(Path(entry).absolute()) for entry in environ["PYTHONPATH"].split(os.pathsep) if entry]
        found["PYTHONPATH"] = os.pathsep.join(entries)
    return {**environ, **found, "PYTHONSAFEPATH": "1"}


@dataclass(frozen=True, kw_only=True)
class Completed:
    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    is_timeout: bool = False
    data: bytes = b""

    @property
    def is_ok(self) -> bool:
        return self.returncode == 0 and not self.is_timeout

    @property
    def is_outage(self) -> bool:
        """Whether the server did not answer; then the command says nothing about what was asked."""
        return self.is_timeout or (self.returncode != 0 and OUTAGE.search(self.stderr) is not None)

    @property
    def last_words(self) -> str:
        if self.is_timeout:
            return "no answer in time"
        lines = self.stderr.strip().splitlines() or [f"exit code {self.returncode}"]
        return lines[-1]


def run(
    argv: Sequence[str],
    *,
    timeout_s: float = 30.0,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    is_binary: bool = False,
) -> Completed:
    """Run a short command; with ``is_binary``, ``data`` holds its output, otherwise ``stdout`` has it as text.

    A command that outlives ``timeout_s`` is killed with its process group.

    Raises:
        EnvironmentMissing: the program is not on PATH or cannot be executed.
    """
    process = _popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cwd, env=env)
    is_timeout = False
    try:
        out, err = process.communicate(stdin, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        is_timeout = True
        signal_group(process.pid, signal.SIGKILL)
        out, err = _drain(process)
    except BaseException:
        signal_group(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return Completed(
        argv=tuple(argv),
        returncode=process.returncode,
        stdout="" if is_binary else out.decode(errors="replace"),
        stderr=err.decode(errors="replace"),
        is_timeout=is_timeout,
        data=out if is_binary else b"",
    )


def ask(argv: Sequence[str], *, timeout_s: float = 30.0, **options: Any) -> Completed:
    """Run a command that changes nothing; after a time-out or a server's error once more, and return what it says."""
    done = run(argv, timeout_s=timeout_s, **options)
    if done.is_outage:
        time.sleep(RETRY_S)
        done = run(argv, timeout_s=timeout_s, **options)
    return done


def start(
    argv: Sequence[str],
    *,
    output_fd: int,
    error_fd: int = subprocess.STDOUT,
    stdin_fd: int = subprocess.DEVNULL,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    return _popen(argv, stdin=stdin_fd, stdout=output_fd, stderr=error_fd, cwd=cwd, env=env)


def wait(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def signal_group(pid: int, number: signal.Signals) -> bool:
    """Signal the process group that ``pid`` leads; return False if the group is already gone."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):  # EPERM: the group's leader is a zombie of another user namespace
        return False
    return True


def signal_process(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _drain(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Close the pipes of a killed command, even where a child still holds them open."""
    try:
        return process.communicate(timeout=DRAIN_S)
    except subprocess.TimeoutExpired as error:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.wait()
        return error.output or b"", error.stderr or b""


def _popen(
    argv: Sequence[str], *, cwd: Path | None, env: Mapping[str, str] | None, **streams: Any
) -> subprocess.Popen[bytes]:
    try:
        environ = isolate(os.environ if env is None else env)
        return subprocess.Popen(list(argv), cwd=cwd, env=environ, start_new_session=True, **streams)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and cwd is not None and not cwd.is_dir():
            raise EnvironmentMissing(Problem(str(cwd), "no such folder", expected="a working folder")) from None
        raise _explain(argv[0], error) from None


def _explain(program: str, error: OSError) -> EnvironmentMissing:
    is_absent = isinstance(error, FileNotFoundError)
    what = "is not on PATH" if is_absent else f"cannot be executed ({str(error.strerror).lower()})"
    return EnvironmentMissing(Problem(program, what))
