"""Makes a run directory: a new name, the author's bytes, the plan, the rendered job.  Sending it is the backend's."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rlk_repro.backends.api import Job
from rlk_repro.errors import EnvironmentMissing, Problem, SpecError
from rlk_repro.files import dump_json, write_bytes
from rlk_repro.plan import Plan, make_record
from rlk_repro.rundir import RunDir, runs_root


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The author's bytes, untouched."""

    run: bytes
    stack: bytes
    hardware: bytes
    profile: bytes


def new_run_dir(plan: Plan) -> RunDir:
    """A name nobody has: UTC time, plan, random.  Nothing is created."""
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return RunDir(runs_root() / plan.run.run / f"{moment}-{plan.plan_hash[:8]}-{secrets.token_hex(2)}")


def stage(plan: Plan, inputs: Inputs, run_dir: RunDir, job: Job) -> None:
    """Write everything that is known before the job is sent.

    Raises:
        SpecError: the directory exists already, or the job names a file outside ``job/``.
        EnvironmentMissing: the directory cannot be made or written.
    """
    files = dict(_list_files(plan, inputs, run_dir, job))
    try:
        run_dir.root.mkdir(parents=True)
        for path, data in files.items():
            write_bytes(path, data)
    except FileExistsError:
        raise SpecError(Problem(str(run_dir.root), "exists already", expected="a new run directory")) from None
    except OSError as error:
        raise EnvironmentMissing(
            Problem(str(run_dir.root), f"cannot be written ({error.strerror})", hint="export RLK_REPRO_RUNS=…")
        ) from error


def _list_files(plan: Plan, inputs: Inputs, run_dir: RunDir, job: Job) -> Iterator[tuple[Path, bytes]]:
    yield run_dir.run_yaml, inputs.run
    yield run_dir.stack_yaml, inputs.stack
    yield run_dir.hardware_yaml, inputs.hardware
    yield run_dir.profile_yaml, inputs.profile
    yield run_dir.plan, dump_json(make_record(plan, run_dir.run_id))
    for name, text in job.files.items():
        if not name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise SpecError(Problem("job file", "leaves the job folder", got=name, expected="a relative path"))
        yield run_dir.job / name, text.encode()
