"""Decide how a trial ended: by its exit code, the end of its log, and the kernel's count of kills.

Of several exceptions, the last one that is not a consequence of another process's end is the cause.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rlk_repro.agent.process import Cause, Ended
from rlk_repro.base.units import format_duration
from rlk_repro.logs.vime import TRAINERS
from rlk_repro.plan import Plan
from rlk_repro.rundir.exits import HOST_MEMORY, OTHER_DEVICE
from rlk_repro.rundir.results import TrialStatus


class Level(StrEnum):
    DEVICE_MEMORY = "device memory ran out"
    HOST_MEMORY = HOST_MEMORY
    GPU = "a GPU failed"
    STOPPED = "stopped from outside"
    COLLECTIVE = "a collective timed out"
    PROCESS = "a process of the trial was killed"


DEVICE, HOST, GPU, STOPPED, COLLECTIVE, PROCESS = Level
# Messages of torch, vLLM, Transformer Engine, NCCL, CUDA, HIP, Ray, Slurm and the Linux kernel:
# the level, who says or did it, and a pattern.  The first row that a line matches counts.
# Advice uses the words of RAISED too, so these rows need a line that raises or reports an error.
RAISED: Final[tuple[tuple[Level, str, str], ...]] = (
    # pinned memory is the host's, although CUDA reports it like its own
    (HOST, "pinned", r"(?:host ?alloc|host register|pin_memory)\w*\b.{0,80}out of memory"),
    (DEVICE, "", r"\b(?:CUDA|HIP|(?-i:cu[A-Z]|hip[A-Z])|Triton Error).{,60}out of memory(?!.*1EB)"),
    (DEVICE, "", r"^(?:torch|cupy)\.[\w.]*OutOfMemoryError:(?!.*1EB)"),
    (DEVICE, "", r"CUDA_ERROR_OUT_OF_MEMORY|(?:cuda|hip)Error(?:MemoryAllocation|OutOfMemory)\b"),
    (DEVICE, "", r"\b(?:CU|HIP|ROC)\w+_STATUS_ALLOC_FAILED|failed to allocate device memory"),
    (HOST, "", r"DefaultCPUAllocator|^[\w.]*\bMemoryError\b|ArrayMemoryError|\bstd::bad_alloc"),
    (HOST, "", r"Cannot allocate memory|memory allocation of \d+ bytes failed"),
    (GPU, "", r"uncorrectable ECC error|fallen off the bus|GPU is lost|GPU requires reset"),
    (GPU, "", r"NVLink .{0,20}error"),
)  # fmt: skip
TOLD: Final[tuple[tuple[Level, str, str], ...]] = (
    (DEVICE, "", r"RayTaskError\(OutOfMemoryError\)"),
    (DEVICE, "", r"OutOfMemoryError\W+(?:CUDA|HIP) out of memory\. Tried to allocate (?!more)"),
    (DEVICE, "", r"HSA_STATUS_ERROR_OUT_OF_RESOURCES.*Available Free mem"),
    (HOST, "Ray's memory monitor", r"node (?:was |is )?running low on memory|\bNODE_OUT_OF_MEMORY"),
    (HOST, "Ray's memory monitor", r"\b[1-9]\d* Workers? .{0,20}killed due to memory pressure"),
    (HOST, "Ray's memory monitor", r"\bRayOutOfMemoryError"),
    (HOST, "Ray's object store", r"ObjectStoreFullError|object_store.*No space left"),
    (HOST, "/dev/shm", r"are out of shared memory|/dev/shm.{0,160}No space left"),  # noqa: S108
    (HOST, "the job's memory limit", r"OOM ?Killed|[1-9]\d* oom.?kill event"),
    (HOST, "the job's memory limit", r"task \S+ Out Of Memory|exceeded (?:job|step) memory limit"),
    (HOST, "the kernel", r"out of memory: Killed process|\boom-kill(?:er)?\b|\boom_reaper\b"),
    (STOPPED, "Slurm", r"\bCANCELLED AT \S+ DUE TO [A-Z ]+"),
    (STOPPED, "Ray: a node is gone", r"because its node has died|missing too many heartbeats"),
    (STOPPED, "ray.kill", r"killed by [`']?ray\.kill"),
    (GPU, "", r"HW Exception by GPU|hardware exception by GPU|\bXid \([^)]*\): \d"),
    (GPU, "", r"system not yet initialized"),
    (COLLECTIVE, "", r"collective operation timeout|watchdog got stuck"),
    (COLLECTIVE, "", r"due to a collective timeout|wait timeout after \d+ ?ms"),
    (COLLECTIVE, "", r"Timed out (?:waiting \d+ ?ms|after \d+ seconds waiting for clients)"),
    (COLLECTIVE, "", r"NCCL operations? .{0,20}timed out|monitoredBarrier.{0,60}time"),
    (PROCESS, "", r"\(SIGKILL\) received by PID|died with <Signals\.SIGKILL|exitcode\s*: -9\b"),
    (PROCESS, "", r"exit (?:status|code):? (?:137|-9)\b|Worker exit type: SYSTEM_ERROR"),
    (PROCESS, "", r"\bWorkerCrashedError|worker (?:process has )?died|actor died unexpectedly"),
)  # fmt: skip
_ROWS: Final = [
    (rows is RAISED, level, who, re.compile(pattern, re.IGNORECASE))
    for rows in (RAISED, TOLD)
    for level, who, pattern in rows
]
_ADVICE: Final = re.compile(r"\b(?:avoid|prevent|may|might|could|would|risk|likely|if|reduce)\b[^.]*$", re.IGNORECASE)

# What a line may begin with: Ray's actor, labels of srun and torchrun, and the prefix of a logger.
_DATE: Final = r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d"
_PREFIX: Final = re.compile(
    r"\s*(?:(?P<source>\((?P<actor>[A-Za-z_][\w.:]*)(?: \w+)? pid=\d+[^)]*\)|\[(?:default|rank)?\d+\]:?(?=[\s\[]))"
    r"|\(raylet[^)]*\)|\d+:(?=\s)|\[\w+\.py:\d+\]"
    rf"|(?P<level>DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)\b:?(?: [\d-]+ \d\d:\d\d:\d\d\S*)?(?: \[\S+:\d+\])?"
    rf"|\[{_DATE}[^\]]*\]|{_DATE}\S*)(?:\s|$|(?=\[))"
)
_COLOUR: Final = re.compile(r"\x1b?\[\d[0-9;]*m")
_QUIET: Final = frozenset({"DEBUG", "INFO", "WARNING", "WARN"})
_EXCEPTION: Final = re.compile(
    r"(?:[A-Za-z_]\w*\.)*_?[A-Z]\w*(?:Error|Exception|Timeout|Interrupt|Exit|Empty|Full|Resources|Failed|Aborted)"
    r"(?:\(\w+\))?(?:: .*|:?)"
)
_REPORT: Final = re.compile(
    r"(?i:CUDA|HIP) (?:\w+ )?(?i:error|failure)|(?:\S+:\d+:\d+ .*)?NCCL WARN|terminate called|\s*what\(\):|Triton Error"
    r"|\S+: error: |\[[EFC]\d|\*\*\* |Fatal |Bus error|Segmentation fault|Memory access|std::|cu[A-Z]|hip[A-Z]|memory a"
)
# An exception that says only that another process has ended, or stands for one which the log holds as well.
_CONSEQUENCE: Final = re.compile(
    r"ray\.exceptions\.|Actor\w*Error|ChildFailedError|ProcessExited|CalledProcessError|SystemExit|KeyboardInterrupt"
    r"|[Cc]ancelled|Broken ?[Pp]ipe|Connection(?:Reset|Refused|Aborted| closed by| reset by)|ConnectError|EOFError"
    r"|EngineDead|initialization failed|See (?:root cause|stack trace) above|remote process exited|was aborted on rank"
    r"|ServerDisconnected|ClientOSError|ReadError|RemoteProtocolError|Max retries|HTTPError|watchdog thread terminated"
)
_NOISE: Final = re.compile(
    r'.*"(?:GET|POST|PUT|HEAD|DELETE) \S+ HTTP/\d.*|[\W_]*|frame #\d+:.*|#\d+ 0x.*|Job \S+ (?:failed|succeeded)\b.*'
    r"|Extension modules: .*|\+ .*|\[W\d.*|.*\b\w*Warning: .*|.*\d%\|.*\|.*|wandb: .*|.*leaked \w+.*|make: \*\*\*.*"
    r"|(?:Current t|T)hread 0x.*|\*\*\* SIG\w+ received.*|PC: @ .*|.*\[repeated \d+x across cluster\]"
    r"|Traceback \(most recent.*|The above exception was.*|During handling of.*|Status message: .*"
)
_IGNORED: Final = re.compile(r"Exception ignored in|Error in atexit|Task exception was never|Exception in callback")
# A log says nothing about what another program did to its trainer.
_FROM_OUTSIDE: Final = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT})
_NEAR_LINES: Final = 6
MAX_QUOTE: Final = 300
MAX_LINE: Final = 4000


@dataclass(frozen=True)
class Line:
    """A line without its prefixes; ``source`` tells processes apart, ``actor`` is Ray's name of the process."""

    text: str
    source: str = ""
    actor: str = ""
    is_quiet: bool = False

    @property
    def is_indented(self) -> bool:
        return self.text[:1].isspace()


@dataclass(frozen=True)
class End:
    """What the log says.  ``level`` is None where no row speaks.

    ``is_raised`` marks an exception or an error report, ``is_cause`` an exception that is no consequence.
    """

    quote: str
    level: Level | None = None
    who: str = ""
    actor: str = ""
    is_raised: bool = True
    is_cause: bool = False


def is_good_end(plan: Plan, status: TrialStatus) -> bool:
    """Tell whether a trial ended as its run intends: well, or out of memory in a run that fills the GPU's memory."""
    is_full = plan.run.workload.fills_memory and status is TrialStatus.OUT_OF_MEMORY
    return status is TrialStatus.OK or is_full


def judge(ended: Ended, tail: bytes, *, has_oom_kill: bool) -> tuple[TrialStatus, str]:
    """Return a trial's status and the reason for it; ``tail`` is the end of the trial's log.

    A trainer that exits with 0 after SIGTERM has not finished its trial.
    """
    how = f"exit code {ended.code}" if ended.signal is None else f"killed by {ended.signal.name}"
    match ended.cause:
        case Cause.INTERRUPT:
            return TrialStatus.INTERRUPTED, f"the node agent was asked to stop; {how}"
        case Cause.TIMEOUT:
            return TrialStatus.TIMEOUT, f"time limit reached after {format_duration(ended.duration_s)}; {how}"
        case Cause.TROUBLE:
            return TrialStatus.FAILED, f"{ended.trouble}; {how}"
        case None:
            pass
    if ended.code == 0:
        return TrialStatus.OK, ""
    end = read_log_end(tail)
    is_killed = ended.signal is signal.SIGKILL or end.level in {PROCESS, COLLECTIVE}
    if has_oom_kill and (is_killed or not (end.level or end.is_cause)):
        return TrialStatus.FAILED, f"{HOST} (the kernel's out-of-memory killer); {how}"
    if end.level is not None:
        told = f"{end.who}: {end.quote}" if end.who else end.quote
        return _find_status(end), f"{_name_level(end)} ({told}); {how}"
    if not end.quote or ended.signal in _FROM_OUTSIDE or (ended.signal and not end.is_raised):
        return TrialStatus.FAILED, how
    return TrialStatus.FAILED, f"{how}; its log {'says' if end.is_raised else 'ends'}: {end.quote}"


def _find_status(end: End) -> TrialStatus:
    return TrialStatus.OUT_OF_MEMORY if end.level is DEVICE else TrialStatus.FAILED


def _name_level(end: End) -> str:
    if end.level is DEVICE and end.actor and not any(name in end.actor for name in TRAINERS):
        return f"{OTHER_DEVICE} {end.actor} ran out"
    return str(end.level)


def read_log_end(tail: bytes) -> End:
    """Return what ended a trial, by the end of its log."""
    lines = [_strip(text) for text in re.split(r"[\r\n]+", tail.decode(errors="replace")) if text.strip()]
    raised = list(_find_exceptions(lines))
    reports = [number for number, line in enumerate(lines) if _REPORT.match(line.text) and _is_telling(line)]
    told: dict[int, End] = {}
    for number in range(len(lines)):
        end = _find_end(lines, number, number in {*raised, *reports})
        if end is not None:
            told[number] = end
    causes = [number for number in raised if number not in told and not _CONSEQUENCE.search(lines[number].text)]
    for levels in ({DEVICE, HOST}, {GPU, STOPPED}):
        if ends := [end for end in told.values() if end.level in levels]:
            return ends[-1]
    timeouts = [number for number, end in told.items() if end.level is COLLECTIVE]
    if timeouts and not any(number < timeouts[0] for number in causes):
        return told[timeouts[0]]
    if causes:
        return End(_quote(lines, causes[-1]), is_cause=True)
    if told:
        return next(iter(told.values()))
    telling = [number for number, line in enumerate(lines) if _is_telling(line)]
    last = raised[:1] or reports[-1:] or telling[-1:] or [len(lines) - 1]
    return End(_quote(lines, last[0]) if lines else "", is_raised=bool(raised or reports))


def _find_exceptions(lines: Sequence[Line]) -> Iterator[int]:
    """Yield the numbers of lines that name a raised exception, without those that Python ignores in its shutdown."""
    opened: dict[str, bool] = {}  # by process: whether its open traceback is one that Python ignores
    for number, line in enumerate(lines):
        text, source = line.text, line.source
        if _IGNORED.match(text):
            opened[source] = True
        elif text.startswith("Traceback (most recent"):
            opened.setdefault(source, False)
        elif not line.is_indented and not _NOISE.fullmatch(text) and not line.is_quiet:
            is_last = source in opened and re.match(r"(?:\w+\.)+[A-Z]\w*(?:: |$)", text) is not None
            if (_EXCEPTION.fullmatch(text) or is_last) and not opened.pop(source, False):
                yield number


def _find_end(lines: Sequence[Line], number: int, is_raised: bool) -> End | None:
    line = lines[number]
    for needs_raise, level, who, pattern in () if line.is_quiet else _ROWS:
        found = pattern.search(line.text) if is_raised or not needs_raise else None
        if found is None or (needs_raise and _ADVICE.search(line.text[: found.start()])):
            continue
        near = lines[max(number - _NEAR_LINES, 0) : number]
        if level is DEVICE and any("pin_memory" in item.text for item in near):
            return End(_quote(lines, number), HOST, "pinned", line.actor)
        return End(_quote(lines, number), level, who, line.actor)
    return None


def _is_telling(line: Line) -> bool:
    text = line.text.strip()
    is_message = not line.is_indented or text.startswith("what():")
    return is_message and not _NOISE.fullmatch(text) and not line.is_quiet


def _quote(lines: Sequence[Line], number: int) -> str:
    """Return a message with its indented lines, as one line."""
    end = number + 1
    while end < len(lines) and lines[end].is_indented and lines[end].source == lines[number].source:
        end += 1
    text = "; ".join(" ".join(line.text.split()) for line in lines[number:end])
    return text if len(text) <= MAX_QUOTE else f"{text[:MAX_QUOTE]}…"


def _strip(text: str) -> Line:
    """Take the prefixes off a line; the message keeps its indentation."""
    text = _COLOUR.sub("", text[:MAX_LINE])
    plain = "".join(char if char.isprintable() else " " for char in text).rstrip()
    source = actor = level = ""
    while found := _PREFIX.match(plain):
        source, actor = found["source"] or source, found["actor"] or actor
        level, plain = found["level"] or level, plain[found.end() :]
    return Line(plain, source, actor, level in _QUIET)
