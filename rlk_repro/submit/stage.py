"""Make a run directory; the cluster's backend sends the job later."""

from __future__ import annotations

import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlk_repro.base.disk import new_folder
from rlk_repro.base.errors import EnvironmentMissing, Problem, SpecError
from rlk_repro.base.files import dump_json, write_bytes, write_text
from rlk_repro.clusters.api import Job
from rlk_repro.clusters.registry import get_backend
from rlk_repro.plan import Plan, make_record
from rlk_repro.prepare.contents import Contents, find_parts, parts_json
from rlk_repro.rundir.paths import RUNS_VARIABLE, RunDir, runs_root
from rlk_repro.rundir.store import remember, require_own_place
from rlk_repro.submit.consent import find_build_hint
from rlk_repro.workloads import list_run_folders

CHOOSE_RUNS: Final = f"call this command in another folder, or set {RUNS_VARIABLE}"
CHOOSE_PREPARED: Final = "set prepared_dir in your profile"


@dataclass(frozen=True, kw_only=True)
class AuthorFiles:
    """The files from which a plan was made; ``prepare_hint`` is the command that makes what the run reads."""

    run: bytes
    stack: bytes
    hardware: bytes
    profile: bytes
    prepare_hint: str = "rlk-repro prepare with the run and the options of this command"


def new_run_dir(plan: Plan) -> RunDir:
    """Return the path of a new run directory, not made yet; its name is UTC time, plan hash and a random part.

    Raises:
        SpecError: the run directory or the prepared files would lie in a run that this user did not submit.
    """
    require_own_place(runs_root(), CHOOSE_RUNS)
    if plan.profile.prepared_dir is not None:
        require_own_place(Path(plan.profile.prepared_dir), CHOOSE_PREPARED)
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return RunDir(runs_root() / plan.run.run / f"{moment}-{plan.plan_hash[:8]}-{secrets.token_hex(2)}")


def stage(plan: Plan, inputs: AuthorFiles, run_dir: RunDir, job: Job) -> None:
    """Make the run directory, with everything that is known before the job is sent.

    Raises:
        SpecError: the directory exists already, or the stack's image is not published.
        EnvironmentMissing: the directory cannot be written, or what the run needs is not prepared.
    """
    _require_image(plan)
    parts = find_prepared(plan, run_dir, inputs.prepare_hint)
    names = RunDir(Path())
    files = {
        names.run_yaml: inputs.run,
        names.stack_yaml: inputs.stack,
        names.hardware_yaml: inputs.hardware,
        names.profile_yaml: inputs.profile,
        names.plan: dump_json(make_record(plan, run_dir.run_id)),
        **({names.prepared: dump_json(parts_json(parts))} if parts else {}),
        **{names.job / name: text.encode() for name, text in job.files.items()},
    }
    try:
        with new_folder(run_dir.root, hint="export RLK_REPRO_RUNS=/a/folder/with/room") as folder:
            for name, data in files.items():
                write_bytes(folder / name, data)
            remember(RunDir(folder))
    except FileExistsError:
        raise SpecError(Problem(str(run_dir.root), "exists already", expected="a new run directory")) from None


def find_prepared(plan: Plan, run_dir: RunDir, hint: str) -> dict[str, Contents]:
    """Return the prepared parts (model, data, rollouts) of a run; raise EnvironmentMissing if one is missing.

    For a remote cluster the result is empty, because its agents record the parts.
    """
    folders = list_run_folders(plan, run_dir)
    if get_backend(plan.cluster).IS_REMOTE:
        return {}
    parts = find_parts(folders)
    missing = [kind for kind in folders if kind not in parts]
    if missing:
        raise EnvironmentMissing(
            *(Problem(str(folders[kind]), f"the run's {kind} is not prepared", hint=hint) for kind in missing)
        )
    return parts


def _require_image(plan: Plan) -> None:
    """The software of the hosts never replaces an image that is not published."""
    missing = plan.stack.unpublished.get(plan.hardware.image_platform)
    if missing is not None:
        others = ", or a stack without images, such as --stack vime-host"
        without = "" if plan.profile.kubernetes is not None else others
        where = f"stack {plan.stack.stack}: {plan.hardware.image_platform}"
        what = f"its image is not published ({missing.reason})"
        raise SpecError(Problem(where, what, expected=f"an image by digest{without}", hint=find_build_hint(plan)))


def stage_again(run_dir: RunDir, job: Job) -> None:
    shutil.rmtree(run_dir.job, ignore_errors=True)
    for name, text in job.files.items():
        write_text(run_dir.job / name, text)
