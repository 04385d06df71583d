"""Run the commands of ``kubectl exec`` in a pod: report facts, send blocks of the bundle and of logs, stop the run."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

from rlk_repro.base import proc
from rlk_repro.base.errors import CheckFailed, Problem
from rlk_repro.clusters.k8s.facts import BLOCK_BYTES, BUNDLE, Facts, wrap_block
from rlk_repro.clusters.k8s.pod.notes import Note, list_logs, note_log_read, read_note
from rlk_repro.rundir.paths import TRIALS, RunDir
from rlk_repro.rundir.state import read_state


def read_facts(run_dir: RunDir, environ: Mapping[str, str]) -> Facts:
    """Return this pod's facts; raise CheckFailed if the pod's first process has not reported yet."""
    note = _require_note(run_dir, environ)
    state = read_state(run_dir)
    return Facts(
        state=None if state is None else state.to_json(),
        is_sealed=run_dir.is_sealed,
        waits_for=note.waits_for,
        failure=note.failure,
        bundle_bytes=note.bundle_bytes,
        bundle_sha256=note.bundle_sha256,
        trials=list_logs(run_dir),
    )


def read_block(run_dir: RunDir, what: str, offset: int, size: int) -> bytes:
    """Return bytes of the bundle or of a log with their checksum; fewer bytes than requested at the end of the file."""
    trial = what.removeprefix(f"{TRIALS}/") if what.startswith(f"{TRIALS}/") else ""
    path = _find_file(run_dir, what, trial)
    if path is None or offset < 0 or not 0 <= size <= BLOCK_BYTES:
        raise CheckFailed(Problem(f"{what} {offset} {size}", "cannot be requested",
                                  expected=f"{BUNDLE} or {TRIALS}/NAME, at most {BLOCK_BYTES} bytes"))  # fmt: skip
    try:
        with path.open("rb") as stream:
            stream.seek(offset)
            data = stream.read(size)
    except OSError as error:
        raise CheckFailed(Problem(what, f"cannot be read ({error.strerror})")) from None
    if trial:
        note_log_read(run_dir, trial, offset + len(data))
    return wrap_block(data)


def ask_to_stop(run_dir: RunDir, environ: Mapping[str, str]) -> bool:
    """Send SIGINT to the pod's first process; return False if that process has ended.

    SIGTERM is not used: the kubelet sends it too, and then the run continues in another pod.
    """
    return proc.signal_process(_require_note(run_dir, environ).pid, signal.SIGINT)


def _require_note(run_dir: RunDir, environ: Mapping[str, str]) -> Note:
    note = read_note(run_dir, environ)
    if note is None:
        raise CheckFailed(Problem(str(run_dir.root), "the pod's first process has not reported yet", hint="try again"))
    return note


def _find_file(run_dir: RunDir, what: str, trial: str) -> Path | None:
    if what == BUNDLE:
        return run_dir.bundle
    return next((folder.stdout for folder in run_dir.trial_dirs() if trial and folder.name == trial), None)
