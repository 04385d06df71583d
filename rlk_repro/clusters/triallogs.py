"""Read the trials' logs in a run directory that this machine sees."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from rlk_repro.clusters.api import TrialLine
from rlk_repro.logs.lines import open_log
from rlk_repro.rundir.paths import RunDir, TrialDir

POLL_S: Final = 0.5
READ_BYTES: Final = 1 << 20
TRIAL_MARK: Final = ": "
"""What stands between a trial's name and its line where an agent prints the lines of all trials."""


def read_logs(
    run_dir: RunDir,
    is_over: Callable[[], bool],
    pause_s: float = POLL_S,
) -> Iterator[TrialLine]:
    """Yield every line of every trial's log until ``is_over`` returns True and all lines are read."""
    seen: set[tuple[str, int]] = set()  # with the file's number, because a trial that was set aside runs again
    while True:
        was_over = is_over()
        found = {(folder.name, _find_number(folder.stdout)): folder for folder in run_dir.trial_dirs()}
        news = [(key, folder) for key, folder in found.items() if key not in seen and key[1]]
        for key, folder in news:
            seen.add(key)
            for text in _read_log(folder, key[1], is_over, pause_s):
                yield TrialLine(trial=folder.name, text=text)
        if not news:
            if was_over:
                return
            time.sleep(pause_s)


def _find_number(path: Path) -> int:
    """Return the file's number, or 0 if there is no such file or it is something else, such as a folder."""
    try:
        found = path.stat()
    except OSError:
        return 0
    return found.st_ino if stat.S_ISREG(found.st_mode) else 0


def _read_log(
    folder: TrialDir,
    number: int,
    is_over: Callable[[], bool],
    pause_s: float,
) -> Iterator[str]:
    """Yield the lines of the file with this number until the trial ends, or is set aside to run again."""
    rest = b""
    with open_log(folder.stdout) as stream:
        while True:
            was_over = folder.exit.is_file() or is_over() or _find_number(folder.stdout) != number
            while block := stream.read(READ_BYTES):
                *lines, rest = (rest + block).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
            if was_over:
                break
            time.sleep(pause_s)
    if rest:
        yield rest.decode(errors="replace")
