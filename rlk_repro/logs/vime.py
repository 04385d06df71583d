"""Read the output of vime's trainer and RolloutManager into rows of numbers; each number keeps its line number.

The page docs/metrics.md describes the lines.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Final

from rlk_repro.logs.lines import LogLine, open_log, read_lines, scan_lines
from rlk_repro.logs.literal import CutOff, NotADict, read_numbers

MAX_DICT_BYTES: Final = 1 << 20
MAX_TORN: Final = 100
MAX_TORN_BYTES: Final = 1 << 16
"""So many dicts, of at most so many bytes, may stand in two lines; any further one counts as cut off."""

_NEEDLES: Final = {b": {'": b"0123456789", b" end (elapsed: ": b""}
_KEYS: Final = (b": {'perf/", b": {'train/", b": {'rollout/", b": {'eval/")
_PREFIX: Final = re.compile(rb"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]\r\n]{0,40}\] [\w.\-]{1,100}\.py:\d{1,6} - ")
_TABLE: Final = re.compile(rb"(critic-step|step|rollout|perf|eval|multi_turn|passrate) (0|[1-9]\d{0,8}): (?=\{)")
_TIMER: Final = re.compile(rb"Timer \w{1,100} (?:start|end \(elapsed: (\d{1,12}\.\d{1,9})s\))")
_ACTOR: Final = re.compile(rb"\(([A-Za-z_][\w.:]{0,100} pid=\d{1,12}(?:, ip=[^\s()]{1,64})?)\)")
_BEGIN: Final = re.compile(rb"(?:\d{4}-[\dT:.\-]{1,30}Z )?" + _ACTOR.pattern + b" ?")
_IN_NUMBER: Final = re.compile(rb"[\d.eE+-]\n[\d.eE+-]")
_TORN_VALUE: Final = re.compile(rb"(?<=': )[\d.eE+-]+\n[\d.eE+-]+")
TRAINERS: Final = ("TrainRayActor",)
ACTORS: Final = (*TRAINERS, "RolloutManager", "RolloutExecutor")
"""Parts of the names of Ray's actors whose metrics are read: vime's own, and those of trainers that grew from slime."""
_REPEATED: Final = re.compile(r"\s*\[repeated (\d{1,9})x across cluster\]")
_COLOUR: Final = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]")
_QUOTES: Final = (b"'", b'"')

_FAMILIES: Final[Mapping[str, tuple[str, ...]]] = {
    "step": ("train/",),
    "rollout": ("rollout/",),
    "perf": ("perf/", "rollout/"),
}
_STEP_INDEX: Final = "train/step"


class LogReject(StrEnum):
    CUT_OFF = "the dict is cut off"
    TORN_NUMBER = "one number of a torn dict is torn itself"
    MALFORMED = "not a dict of numbers"
    UNKNOWN_KEYS = "no known metric"
    WRONG_INDEX = "train/step disagrees with the number of the line"
    CONFLICT = "another value was printed before"
    OTHER_ACTOR = "printed by another actor"
    QUOTED = "quoted inside another message"
    NO_PREFIX = "metrics without vime's logging prefix"
    HIDDEN = "hidden by Ray as repetitions of another line"


@dataclass(frozen=True, slots=True)
class LogSample:
    """One printed number and its line number (from 1).  vime prints NaN for a skipped step."""

    value: float
    line: int


Rows = Mapping[int, Mapping[str, LogSample]]


@dataclass(frozen=True, kw_only=True)
class ParsedLog:
    """``rows`` maps the kind of a line (``step``, ``rollout`` or ``perf``) and its number N to the printed values.

    ``reject_counts`` also counts the lines that Ray dropped as duplicates.  Ray ignores digits when it looks for
    duplicates, so a dropped line may hold values of another step.
    """

    rows: Mapping[str, Rows]
    reject_counts: Mapping[str, int]


def parse_log(path: Path) -> ParsedLog:
    """Read a trial's ``stdout.log``, with or without the time stamps of the node agent.

    Raises:
        BundleUnreadable: the file is absent or cannot be read.
    """
    reader = _LogReader()
    with open_log(path, buffering=0) as stream:
        for line in scan_lines(stream, _NEEDLES):
            reader.read_line(line)
    if reader.torn:
        with open_log(path) as stream:
            reader.join_torn(read_lines(stream, MAX_DICT_BYTES))
    hidden = reader.num_hidden_by_ray
    return ParsedLog(
        rows=reader.rows,
        reject_counts=dict(sorted(reader.rejects.items())) | ({LogReject.HIDDEN.value: hidden} if hidden else {}),
    )


@dataclass(frozen=True, kw_only=True)
class _Torn:
    """A table whose dict does not end in its line; ``actor`` printed it, and may print the rest in its next line."""

    kind: str
    index: int
    body: bytes
    actor: bytes


class _LogReader:
    def __init__(self) -> None:
        self.rows: dict[str, dict[int, dict[str, LogSample]]] = {kind: {} for kind in _FAMILIES}
        self.rejects: Counter[str] = Counter()
        self.torn: dict[int, _Torn] = {}
        self.num_hidden_by_ray = 0
        self._line = 0
        self._actor: bytes | None = None
        self._is_quoted = False

    def read_line(self, line: LogLine) -> None:
        """Split a line at vime's logging prefixes; a prefix may follow a progress bar, cut-off text or a message."""
        if not line.is_continued:
            self._line, self._actor, self._is_quoted = line.number, None, False
        text = _COLOUR.sub(b"", line.text) if b"\x1b" in line.text else line.text
        start, is_message = 0, False
        for prefix in chain(_PREFIX.finditer(text), (None,)):
            piece = text[start : prefix.start() if prefix else len(text)]
            if not (is_message and self._read_message(piece)):
                self._read_other_text(piece, is_message=is_message)
            if actors := _ACTOR.findall(piece):
                self._actor = actors[-1]
            if prefix:
                start, is_message = prefix.end(), True

    def _read_message(self, piece: bytes) -> bool:
        """Return False if the text is not one of vime's messages with numbers."""
        if table := _TABLE.match(piece):
            if self._is_ours():
                self._read_table(table[1].decode(), int(table[2]), piece[table.end() :])
        elif timer := _TIMER.match(piece):
            # No metric uses lines of vime's timers, but refused lines are counted, because sealed analyses count them.
            if timer[1] is not None:
                self._is_ours()
        else:
            return False
        return True

    def _read_other_text(self, piece: bytes, *, is_message: bool) -> None:
        if any(keys in piece for keys in _KEYS):
            self.rejects[LogReject.NO_PREFIX.value] += 1
        # A message may quote text of a rollout (``First rollout sample: ['…``); metrics in the quotes are not vime's.
        if is_message and any(quote in piece for quote in _QUOTES):
            self._is_quoted = True

    def _is_ours(self) -> bool:
        """Whether to use the line; a quoted line, or one of a Ray actor that is not vime's, is refused and counted."""
        if self._is_quoted:
            self.rejects[LogReject.QUOTED.value] += 1
        elif self._actor and not any(name.encode() in self._actor for name in ACTORS):
            self.rejects[LogReject.OTHER_ACTOR.value] += 1
        else:
            return True
        return False

    def _read_table(self, kind: str, index: int, body: bytes) -> None:
        if kind not in _FAMILIES:  # other kinds (critic, evaluation, multi_turn, passrate) are not used
            return
        try:
            numbers = self._read_dict(body)
        except CutOff:
            is_whole_line = body.endswith(b"\n") and len(body) <= MAX_TORN_BYTES
            if self._actor and is_whole_line and len(self.torn) < MAX_TORN:
                self.torn[self._line] = _Torn(kind=kind, index=index, body=body, actor=self._actor)
            else:
                self.rejects[LogReject.CUT_OFF.value] += 1
            return
        except NotADict:
            self.rejects[LogReject.MALFORMED.value] += 1
            return
        self._keep(kind, index, numbers)

    def _keep(self, kind: str, index: int, numbers: Mapping[str, float]) -> None:
        known = {key: value for key, value in numbers.items() if key.startswith(_FAMILIES[kind])}
        if not known:
            self.rejects[LogReject.UNKNOWN_KEYS.value] += 1
        elif known.get(_STEP_INDEX, index) != index:
            self.rejects[LogReject.WRONG_INDEX.value] += 1
        else:
            self._merge(kind, index, known)

    def join_torn(self, lines: Iterable[tuple[int, bytes]]) -> None:
        """Read again each dict that its line cuts off, with the text that its actor printed in its next line.

        Ray's log monitor prints what a file holds so far, which may be half of a line that vime is writing.  A number
        that is torn itself is left out and counted: nothing would show a lost digit.
        """
        torn, self.torn = self.torn, {}
        waiting: dict[bytes, int] = {}
        for number, line in lines:
            begin = _BEGIN.match(_COLOUR.sub(b"", line)) if waiting else None
            if begin and begin[1] in waiting and self._read_joined(torn, waiting.pop(begin[1]), begin):
                continue
            if number in torn:
                waiting[torn[number].actor] = number
        if torn:
            self.rejects[LogReject.CUT_OFF.value] += len(torn)

    def _read_joined(self, torn: dict[int, _Torn], number: int, begin: re.Match[bytes]) -> bool:
        """Read the dict of line ``number`` and of the line that begins with ``begin``; return False if it is none."""
        first, rest = torn[number], begin.string[begin.end() : begin.end() + MAX_TORN_BYTES]
        head = first.body.rstrip(b"\r\n")
        joined, num_torn = _TORN_VALUE.subn(b"None", head + b"\n" + rest, count=1)
        if not num_torn:
            if _IN_NUMBER.search(head[-1:] + b"\n" + rest[:1]):
                return False
            joined = head + rest
        try:
            numbers = self._read_dict(joined)
        except NotADict:
            return False
        if num_torn and first.kind == "step" and _STEP_INDEX not in numbers:
            return False  # nothing shows that both lines belong together
        self._line = number
        if num_torn:
            self.rejects[LogReject.TORN_NUMBER.value] += 1
        self._keep(first.kind, first.index, numbers)
        del torn[number]
        return True

    def _merge(self, kind: str, index: int, numbers: Mapping[str, float]) -> None:
        row = self.rows[kind].setdefault(index, {})
        for key, value in numbers.items():
            first = row.get(key)
            if first is not None and not _is_same(first.value, value):
                self.rejects[LogReject.CONFLICT.value] += 1
                return
        for key, value in numbers.items():
            if key not in row:
                row[key] = LogSample(value, self._line)

    def _read_dict(self, body: bytes) -> dict[str, float]:
        text = body[:MAX_DICT_BYTES].decode("utf-8", errors="replace")
        numbers, end = read_numbers(text)
        if repeated := _REPEATED.match(text, end):
            self.num_hidden_by_ray += max(int(repeated[1]) - 1, 0)  # "[repeated Nx" counts the printed line too
        return numbers


def _is_same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))
