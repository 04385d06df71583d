"""Write the agent's own log, ``agent.jsonl``.

An error that ends a phase is recorded and not raised, so the run directory is always packed.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from rlk_repro.agent.parts import NodePlace
from rlk_repro.base.disk import Unwritable, open_stream
from rlk_repro.base.errors import EXIT_BUG, RlkReproError
from rlk_repro.base.files import dump_json_line, write_bytes
from rlk_repro.base.places import hide_places
from rlk_repro.base.units import utc_now
from rlk_repro.rundir.paths import RunDir

RESERVE_BYTES: Final = 256 << 10


def find_exit_code(error: Exception | None) -> int:
    if error is None:
        return 0
    return error.exit_code if isinstance(error, RlkReproError) else EXIT_BUG


class Journal:
    """Append the events of one agent until the run directory is sealed."""

    def __init__(self, run_dir: RunDir, place: NodePlace, redact: Callable[[str], str]) -> None:
        self._run_dir = run_dir
        self._common = {"allocation": place.allocation, "node": place.node}
        self._redact = redact

    def keep_room(self) -> None:
        """Reserve disk space now, so that messages can still be written after the disk has filled up.

        Raises:
            Unwritable: the disk has no space.
        """
        write_bytes(self._run_dir.reserve, os.urandom(RESERVE_BYTES))

    def give_room(self) -> None:
        with suppress(OSError):
            self._run_dir.reserve.unlink()

    def record(self, event: str, **details: Any) -> None:
        """Append an event; on a full disk the event is lost, and no error is raised."""
        if self._run_dir.is_sealed:
            return
        clean = {name: self.clean(item) if isinstance(item, str) else item for name, item in details.items()}
        line = dump_json_line({"t": utc_now(), "event": event, **self._common, **clean})
        with suppress(Unwritable), open_stream(self._run_dir.agent_log, "ab") as stream:
            stream.write(f"{line}\n".encode())

    def clean(self, text: str) -> str:
        """Remove secrets from a text, and replace this machine's folders by names."""
        return hide_places(self._redact(text), self._run_dir.root)

    def run(self, phase: str, do: Callable[[], object]) -> Exception | None:
        """Run a phase; record its error, with a traceback if rlk-repro does not define the error, and return it."""
        started = time.monotonic()
        self.record("begin", phase=phase)
        try:
            do()
        except Exception as error:  # noqa: BLE001  (the caller reads the error)
            if isinstance(error, Unwritable):
                self.give_room()
            is_known = isinstance(error, RlkReproError)
            text = f"{error}\n" if is_known else "".join(traceback.format_exception(error))
            sys.stderr.write(f"{phase}: {self._redact(text)}")
            self.record("error", phase=phase, kind=type(error).__name__, error=text)
            return error
        self.record("end", phase=phase, duration_s=time.monotonic() - started)
        return None
