"""What the leading agent left when it ended: the state is the one file that it writes after sealing and packing."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any, Final

from rlk_repro.base.errors import BundleUnreadable, code_after
from rlk_repro.base.files import load_json
from rlk_repro.rundir.paths import RunDir

_INTERRUPTED: Final = frozenset({code_after(signal.SIGINT), code_after(signal.SIGTERM)})


@dataclass(frozen=True, kw_only=True)
class LastWord:
    """``exit_code`` is None where the agent still runs or ended without a word."""

    exit_code: int | None = None
    message: str = ""

    @property
    def is_interrupted(self) -> bool:
        return self.exit_code in _INTERRUPTED


def read_last_word(run_dir: RunDir) -> LastWord:
    try:
        value: Any = load_json(run_dir.state)
    except BundleUnreadable:
        return LastWord()
    if not isinstance(value, dict):
        return LastWord()
    code = value.get("exit_code")
    return LastWord(exit_code=code if isinstance(code, int) else None, message=str(value.get("message") or ""))
