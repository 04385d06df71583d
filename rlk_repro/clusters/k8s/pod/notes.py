"""Keep notes in files of the run directory, by which a pod's first process and ``kubectl exec`` share data."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.files import load_json, sha256_file, write_json
from rlk_repro.clusters.k8s.facts import TrialLog
from rlk_repro.rundir.paths import RunDir

SCHEMA: Final = 1
UID_VARIABLE: Final = "RLK_REPRO_POD_UID"
# a reader that has sent no request for 30 s counts as gone
FOLLOWER_S: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class Note:
    """A note written by a pod's first process; ``pod`` is the pod's unique id, ``failure`` why no bundle was made."""

    pod: str
    pid: int
    waits_for: str = ""
    failure: str = ""
    bundle_bytes: int | None = None
    bundle_sha256: str = ""


class Notes:
    def __init__(self, run_dir: RunDir, environ: Mapping[str, str]) -> None:
        self._run_dir = run_dir
        self._told: Note | None = None
        self._note = Note(pod=environ.get(UID_VARIABLE, ""), pid=os.getpid())

    def write(self, **changes: Any) -> None:
        self._note = dataclasses.replace(self._note, **changes)
        if self._note == self._told:
            return
        write_json(self._run_dir.pod_note, {"schema": SCHEMA, **dataclasses.asdict(self._note)}, is_durable=False)
        self._told = self._note

    def write_bundle(self) -> None:
        path = self._run_dir.bundle
        if path.is_file():
            self.write(waits_for="", bundle_bytes=path.stat().st_size, bundle_sha256=sha256_file(path))


def read_note(run_dir: RunDir, environ: Mapping[str, str]) -> Note | None:
    """Return the note of this pod's first process; None without a note, or if an earlier pod wrote the note."""
    try:
        value: dict[str, Any] = load_json(run_dir.pod_note, schema=SCHEMA)
        note = Note(**{key: value[key] for key in Note.__dataclass_fields__})
    except (BundleUnreadable, KeyError):
        return None
    return note if note.pod == environ.get(UID_VARIABLE, "") else None


def list_logs(run_dir: RunDir) -> tuple[TrialLog, ...]:
    return tuple(
        TrialLog(name=trial.name, size_bytes=trial.stdout.stat().st_size, has_ended=trial.exit.is_file())
        for trial in run_dir.trial_dirs()
        if trial.stdout.is_file()
    )


def note_log_read(run_dir: RunDir, trial: str, end: int) -> None:
    seen = _read_seen(run_dir)[1]
    seen = {**seen, trial: max(end, seen.get(trial, 0))}
    write_json(run_dir.pod_read, {"schema": SCHEMA, "at": time.time(), "seen": seen}, is_durable=False)


def is_followed(run_dir: RunDir) -> bool:
    """Whether a reader is following the trials' logs and has not read them to the end yet."""
    at, seen = _read_seen(run_dir)
    return time.time() - at < FOLLOWER_S and any(
        seen.get(trial.name, 0) < trial.size_bytes for trial in list_logs(run_dir)
    )


def _read_seen(run_dir: RunDir) -> tuple[float, dict[str, int]]:
    try:
        value = load_json(run_dir.pod_read, schema=SCHEMA)
        return float(value["at"]), dict(value["seen"])
    except (BundleUnreadable, KeyError):
        return 0.0, {}
