"""Run commands of the tool on hostile input, each in a fork of one process that has imported all modules.

A fork starts in milliseconds, so that thousands of inputs can be tried, and its peak memory is its own.  Each fork has
a limit of address space and time, and an audit hook sees every attempt to start a program or to write outside the
scratch folder.
"""

from __future__ import annotations

import io
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from rlk_repro.base.errors import finish
from rlk_repro.prepare.stored_rollouts import _unpack
from rlk_repro.rundir.rollout_files import check_file
from tests import ROOT

MOST_ADDRESS_BYTES: Final = 6 << 30
MOST_WALL_S: Final = 120.0
MOST_CPU_S: Final = 20.0
MOST_BYTES: Final = 10**9
WROTE_OUTSIDE: Final = 99
STARTED: Final = 98
READ_FILE: Final = "prepare-file"
INSTALL: Final = "tools.rl_kernel"
NO_ANSWER: Final = -1
FORGED: Final = "\nrlk-repro: FORGED"
EXACT: Final = frozenset({"logs", "runs", "profile"})
"""What these commands print into a pipe is exact."""
_WRITES: Final = frozenset(
    {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod", "os.chown"}
)
_STARTS: Final = frozenset({"subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.fork", "os.forkpty"})
_MODULES: Final = ("analysis.analyse", "bundle.archive", "bundle.verify", "replay.compare", "replay.recorded",
                   "report.terminal", "rundir.state", "submit.sending")  # fmt: skip


def find_raw(text: str) -> str:
    """Return what a terminal would obey, or the beginning of a forged line; rich wraps long texts below their start."""
    raw = sorted({char for char in text if not (char.isprintable() or char == "\n")})
    return f"{raw!r}" if raw else "a forged line" if FORGED in text else ""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one command; ``code`` is also ``WROTE_OUTSIDE``, ``STARTED``, or a killed command's signal."""

    code: int
    cpu_s: float
    peak_bytes: int
    out: str
    err: str

    @property
    def is_bug(self) -> bool:
        return self.code not in {0, 1, 2, 3, 4, 5} or "this is a bug" in self.err or "Traceback" in self.err


class Sandbox:
    """One scratch folder and the process whose forks work in it; TMPDIR, HOME and the runs root are inside."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.last_code = 0
        for name in ("tmp", "home", "runs"):
            (scratch / name).mkdir(parents=True, exist_ok=True)
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(scratch / "home"),
            "TMPDIR": str(scratch / "tmp"),
            "RLK_REPRO_RUNS": str(scratch / "runs"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, "-m", "tests.security.sandbox", str(scratch)]
        pipe = subprocess.PIPE
        self._server = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env, cwd=ROOT, text=True)

    def run(self, *argv: str | Path) -> Outcome:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([str(word) for word in argv]) + "\n")
        self._server.stdin.flush()
        ready, _, _ = select.select([self._server.stdout], [], [], 2 * MOST_WALL_S)
        answer: dict[str, Any] = json.loads(self._server.stdout.readline()) if ready else {"code": NO_ANSWER}
        self.last_code = answer["code"]
        texts = {name: (self.scratch / f".{name}").read_text(errors="replace") for name in ("out", "err")}
        return Outcome(**{"cpu_s": 0.0, "peak_bytes": 0, **answer, **texts})

    def check(self, *argv: str | Path) -> Outcome:
        """Run a command, and assert that nothing is wrong with its result."""
        outcome, wrong = self.judge(*argv)
        assert not wrong, f"{' '.join(map(str, argv))}: {wrong}"
        return outcome

    def judge(self, *argv: str | Path) -> tuple[Outcome, str]:
        """Run a command; the text says what is wrong with its result, and is empty if nothing is wrong."""
        outcome = self.run(*argv)
        left = sorted(path.name for path in (self.scratch / "tmp").iterdir())
        shutil.rmtree(self.scratch / "tmp")
        (self.scratch / "tmp").mkdir()
        raw = find_raw(outcome.err if argv[0] in EXACT else outcome.err + outcome.out)
        if not (outcome.is_bug or outcome.cpu_s > MOST_CPU_S or outcome.peak_bytes > MOST_BYTES or left or raw):
            return outcome, ""
        shown = f"exit {outcome.code}, {outcome.cpu_s:.1f} s, {outcome.peak_bytes >> 20} MiB, left: {left}, raw: {raw}"
        return outcome, f"{shown}\n{outcome.err.strip()[-2000:]}"

    def close(self) -> None:
        for stream in (self._server.stdin, self._server.stdout):
            if stream is not None:
                stream.close()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()


def _serve(scratch: Path) -> None:
    import functools
    import importlib

    from rlk_repro.cli import make_command
    from rlk_repro.clusters import local
    from rlk_repro.probes.node import probe_node
    from rlk_repro.replay import steps

    for name in _MODULES:
        importlib.import_module(f"rlk_repro.{name}")
    make_command()
    # no bundle changes this machine, and to probe it takes longer than the rest of a replay
    vars(steps)["probe_node"] = remembered = functools.cache(probe_node)
    vars(local)["count_gpus"] = lambda: 0
    remembered("here")
    _warm_up(scratch)
    for line in sys.stdin:
        argv = json.loads(line)
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _become_command(scratch, argv)
        while True:
            ended, status, used = os.wait4(pid, os.WNOHANG)
            if ended:
                break
            if time.monotonic() - started > MOST_WALL_S:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        code = os.waitstatus_to_exitcode(status)
        answer = {"code": code, "cpu_s": used.ru_utime + used.ru_stime, "peak_bytes": used.ru_maxrss * 1024}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _warm_up(scratch: Path) -> None:
    """Import and make once what each fork would otherwise import and make itself."""
    from rlk_repro.cli import main

    bundle = str(ROOT / "docs" / "evidence" / "operators-h200.tgz")
    for words in (["report", bundle, "-o", str(scratch / "warm")], ["replay", bundle, "--dry-run"]):
        sys.argv = ["rlk-repro", *words]
        with suppress(SystemExit), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            main()


def _become_command(scratch: Path, argv: Sequence[str]) -> NoReturn:
    for number, name in ((1, "out"), (2, "err")):
        descriptor = os.open(scratch / f".{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)
    os.chdir(scratch)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_ADDRESS_BYTES, MOST_ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.argv = ["rlk-repro", *argv]
    _watch(scratch)
    code = 0
    try:
        from rlk_repro.cli import main

        if argv[0] == READ_FILE:
            sys.exit(finish(lambda: _prepare_file(Path(argv[1]))))
        if argv[0] == INSTALL:
            from tools.rl_kernel.__main__ import main as install

            del sys.argv[1]
            sys.exit(install())
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _prepare_file(path: Path) -> None:
    """Read a stranger's file as `prepare` does: stored rollouts or an archive of them."""
    if path.read_bytes()[:2] == b"PK":
        check_file(path)
        return
    with tempfile.TemporaryDirectory() as place:
        _unpack(path, Path(place), 2, "archive")


def _watch(scratch: Path) -> None:
    inside = (f"{scratch}/", "/dev/null", "/proc/")

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _STARTS:
            # git names the commit of this checkout, where a sealed analysis may be another version's
            if event == "subprocess.Popen" and arguments[0] == "git" and str(arguments[2]) == str(ROOT):
                return
            os.write(2, f"started: {event} {arguments!r:.500}\n".encode(errors="replace"))
            os._exit(STARTED)
        if event == "open":
            path, _, flags = arguments
            if not isinstance(path, str | bytes) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
                return
        elif event in _WRITES:
            path = arguments[1] if event in {"os.rename", "os.symlink", "os.link"} else arguments[0]
        else:
            return
        place = os.path.realpath(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else ""
        if place and place != str(scratch) and not place.startswith(inside):
            os.write(2, f"wrote outside: {event} {place}\n".encode(errors="replace"))
            os._exit(WROTE_OUTSIDE)

    sys.addaudithook(see)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]).resolve())
