"""Compare what two trials of a pair were started with: arguments, environment and loaded libraries.

Three differences are allowed: the declared switches, the folders for each trial's own records, and the libraries that
RL-Kernel loads.  A missing record is reported and never counts as equal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlk_repro.base.answer import Answer
from rlk_repro.base.errors import BundleUnreadable, shorten
from rlk_repro.base.files import load_json
from rlk_repro.base.secrets import REDACTED, looks_secret, scrub, scrub_argv
from rlk_repro.rundir.paths import RunDir
from rlk_repro.sources import PINNED
from rlk_repro.switches import VARIANT_SWITCHES

if TYPE_CHECKING:
    from rlk_repro.plan import Trial

# RL-Kernel loads these libraries, so the variants may differ in them.
ROUTED_IN: Final = frozenset({"rl_engine", "rl_kernel_extension", "triton", "packages", "sources", "sources.rl_engine"})

COMMAND: Final = "command"
ENVIRONMENT: Final = "environment"
MAX_DIFFERENCES: Final = 1000
ABSENT: Final = "not set"
GIVEN: Final = "given"
PROGRAM: Final = "program"
ORDER: Final = "order of arguments"
MORE: Final = "more differences"


class Kind(StrEnum):
    """Declared switches and trial names in paths (``FOLDER``) may differ; any other difference is ``UNDECLARED``."""

    SWITCH = "declared switch"
    FOLDER = "record folder"
    UNDECLARED = "not declared"


@dataclass(frozen=True, kw_only=True)
class Difference(Answer):
    """A variable or flag whose value differs between the variants."""

    name: str
    baseline: str
    enabled: str
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class Started:
    """The arguments and environment of a trial; the value of a ``from_env`` variable is ``<from SOURCE>``."""

    trial: str
    variant: str
    argv: Sequence[str]
    env: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class PairRecord:
    """The recorded differences between the trials of a pair, by kind of record: ``command``, ``libraries.0``, ….

    ``missing`` maps the path of a missing record to the reason.
    """

    differences: Mapping[str, tuple[Difference, ...]]
    missing: Mapping[str, str]


def compare(baseline: Started, enabled: Started, switches: Collection[str] = VARIANT_SWITCHES) -> Iterator[Difference]:
    yield from _compare_arguments(baseline, enabled, switches)
    yield from _compare_values((baseline, enabled), baseline.env, enabled.env, switches)


def _compare_arguments(first: Started, second: Started, switches: Collection[str]) -> Iterator[Difference]:
    trials = (first, second)
    flags = [_flags(trial.argv) for trial in trials]
    yield from _compare_values(trials, flags[0], flags[1], switches)
    orders, alike = [], []
    for trial, found in zip(trials, flags, strict=True):
        orders.append([item for item in split_arguments(trial.argv) if item[0] not in switches])
        alike.append({name: value for name, value in found.items() if name not in switches})
    if alike[0] == alike[1] and orders[0] != orders[1]:
        order = [shorten(" ".join(scrub_argv(trial.argv))) for trial in trials]
        yield Difference(name=ORDER, baseline=order[0], enabled=order[1], kind=Kind.UNDECLARED)


def read_pair(run_dir: RunDir, first: Trial, second: Trial, declared: Collection[str]) -> PairRecord:
    """Compare the recorded commands and environments of a pair's trials, and the libraries of each rank."""
    reader = _RecordReader(run_dir)
    folders = [run_dir.trial(trial.name) for trial in (first, second)]
    started = [Started(trial=trial.name, variant=trial.variant, argv=(), env={}) for trial in (first, second)]
    argvs = [reader.read(folder.command, "argv", list) for folder in folders]
    envs = [reader.read(folder.env, "env", dict) for folder in folders]
    found: dict[str, Iterable[Difference]] = {}
    switches = declared if first.variant != second.variant else ()
    if None not in argvs:
        was, now = (
            replace(trial, argv=[str(word) for word in argv]) for trial, argv in zip(started, argvs, strict=True)
        )
        found[COMMAND] = _compare_arguments(was, now, switches)
    if None not in envs:
        before, after = ({name: str(value) for name, value in env.items()} for env in envs)
        found[ENVIRONMENT] = _compare_values(started, before, after, switches)
    for rank in sorted({0}.union(*(folder.ops_files() | folder.libraries_files() for folder in folders))):
        loaded = [reader.read(folder.libraries_file(rank)) for folder in folders]
        if None not in loaded:
            before, after = map(_flatten, loaded)
            found[f"libraries.{rank}"] = _compare_values(started, before, after, _list_loaded(switches))
    return PairRecord(differences={part: _limit(items) for part, items in found.items()}, missing=reader.missing)


def _list_loaded(switches: Collection[str]) -> frozenset[str]:
    """Return the libraries in which the variants may differ because each imports its own checkout of a code base."""
    names = set()
    for source in PINNED:
        if source.variable in switches:
            names |= {source.module, *source.distributions, f"sources.{source.module}"}
    return frozenset(names)


def _limit(differences: Iterable[Difference]) -> tuple[Difference, ...]:
    found = tuple(islice(differences, MAX_DIFFERENCES + 1))
    if len(found) <= MAX_DIFFERENCES:
        return found
    more = Difference(name=MORE, baseline="not compared", enabled="not compared", kind=Kind.UNDECLARED)
    return (*found[:MAX_DIFFERENCES], more)


class _RecordReader:
    def __init__(self, run_dir: RunDir) -> None:
        self.missing: dict[str, str] = {}
        self._root = run_dir.root

    def read(self, path: Path, key: str | None = None, kind: type = dict) -> Any:
        try:
            value = load_json(path)
        except BundleUnreadable as error:
            self.missing[path.relative_to(self._root).as_posix()] = error.problems[0].what
            return None
        found = value.get(key) if key is not None and isinstance(value, dict) else value
        if isinstance(found, kind):
            return found
        self.missing[path.relative_to(self._root).as_posix()] = f"holds no {key or 'libraries'}"
        return None


def _flatten(libraries: Mapping[str, Any]) -> dict[str, str]:
    packages, sources = (
        found if isinstance(found := libraries.get(part), dict) else {} for part in ("packages", "sources")
    )
    flat = {**libraries, **packages, **{f"sources.{name}": tree for name, tree in sources.items()}}
    return {name: str(item) for name, item in flat.items() if name not in ROUTED_IN}


def _flags(argv: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for flag, values in split_arguments(argv):
        shown = " ".join(values) or GIVEN
        found[flag] = f"{found[flag]} {shown}" if flag in found else shown
    return found


def _compare_values(
    trials: Sequence[Started],
    first: Mapping[str, str],
    second: Mapping[str, str],
    switches: Collection[str] = (),
) -> Iterator[Difference]:
    for name in sorted(first.keys() | second.keys()):
        was, now = first.get(name), second.get(name)
        if was == now:
            continue
        kind = Kind.SWITCH if name in switches else Kind.UNDECLARED
        if kind is Kind.UNDECLARED and was and now and was.replace(trials[0].trial, trials[1].trial) == now:
            kind = Kind.FOLDER
        shown = [_show(name, value, trial) for value, trial in zip((was, now), trials, strict=True)]
        yield Difference(name=name or PROGRAM, baseline=shown[0], enabled=shown[1], kind=kind)


def _show(name: str, value: str | None, started: Started) -> str:
    if value is None:
        return ABSENT
    if looks_secret(name, value):
        return REDACTED
    return shorten(scrub(value).replace(started.trial, f"<nn>-<pair>-{started.variant}"))


def split_arguments(argv: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each flag with its values; values before the first flag belong to the flag ``""``."""
    flag = ""
    values: list[str] = []
    for word in argv:
        if word.startswith("--"):
            if flag or values:
                yield flag, tuple(values)
            flag, *values = word.split("=", 1)
        else:
            values.append(word)
    if flag or values:
        yield flag, tuple(values)
