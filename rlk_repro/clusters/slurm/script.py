"""Fill the templates of ``slurm/templates`` with the values of one plan."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from rlk_repro.base.errors import SpecError
from rlk_repro.base.resources import data_dir
from rlk_repro.clusters.asking import list_secrets
from rlk_repro.clusters.slurm.client import SACCT_FIELDS
from rlk_repro.clusters.slurm.container import (
    AMD_VISIBILITY,
    CACHE,
    ENGINES,
    container_settings,
    find_container_problems,
    find_image,
    find_python,
    find_remarks,
    find_runtime,
    list_binds,
    list_entry,
    list_fabric,
    list_runtime_options,
    make_import,
)
from rlk_repro.clusters.slurm.options import find_option_problems, list_options, slurm_settings
from rlk_repro.plan import Plan
from rlk_repro.probes import environment
from rlk_repro.rundir.paths import RunDir

_PLAIN: Final = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


class Directive(str):
    """One option of an ``#SBATCH`` line, which has sbatch's own syntax, not the shell's."""

    __slots__ = ()


class ShellLine(str):
    __slots__ = ()


def quote(value: Any) -> str:
    """Return ``value`` in a script's syntax: strings become shell words; raise TypeError for an unsupported type."""
    match value:
        case Directive():
            return quote_directive(value)
        case ShellLine():
            return value
        case str():
            return _quote_word(value)
        case int() if not isinstance(value, bool):
            return str(value)
        case Sequence():
            return " ".join(_quote_word(item) for item in value)
        case _:
            raise TypeError(f"no rule to quote {value!r}")


def quote_directive(text: str) -> str:
    """Quote ``--name=value`` for sbatch: in double quotes, sbatch takes the character after a backslash unchanged."""
    if "\n" in text or "\0" in text:
        raise ValueError(f"not one line: {text!r}")
    return "=".join(_quote_part(part) for part in text.split("=", 1))


def _quote_part(text: str) -> str:
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _quote_word(value: Any) -> str:
    """Quote as shlex does; also quote words with commas, which shellcheck takes for mistakes in an array."""
    if not isinstance(value, str):
        raise TypeError(f"not a text: {value!r}")
    return f"'{value}'" if "," in value and "'" not in value else shlex.quote(value)


if TYPE_CHECKING:
    from jinja2 import Environment

SCRIPT: Final = "job.sbatch"

# a task gets all cores of its node, even if there is only one task
_SRUN_OPTIONS: Final = ("--ntasks-per-node=1", "--cpu-bind=none")


def render_sbatch(plan: Plan, run_dir: RunDir, *, nodes: Sequence[str] = ()) -> str:
    """Render the script, whose exit code is the highest exit code of the agents.

    Raises:
        SpecError: Slurm or the container runtime cannot take a value, or an image is missing.
    """
    problems = [*find_option_problems(plan, nodes), *find_container_problems(plan, run_dir)]
    if problems:
        raise SpecError(*problems)
    return _environment().get_template("job.sbatch.j2").render(_list_values(plan, run_dir, nodes))


def sbatch_command(run_dir: RunDir) -> tuple[str, ...]:
    """Return the sbatch command with the options that hold a path: a path's line feed would split an #SBATCH line."""
    absolute = RunDir(run_dir.root.absolute())
    folder = str(absolute.root).replace("%", "%%")
    if "\\" in folder:  # Slurm expands % only in a path without a backslash
        folder = str(absolute.root).replace("\\", "\\\\")
    output = f"--output={folder}/{absolute.job_output('%j').name}"
    return ("sbatch", "--parsable", f"--chdir={absolute.root}", output, str(absolute.job / SCRIPT))


def _list_values(plan: Plan, run_dir: RunDir, nodes: Sequence[str]) -> Mapping[str, Any]:
    slurm, container = slurm_settings(plan), container_settings(plan)
    absolute, image = RunDir(run_dir.root.absolute()), find_image(plan)
    mounts = []
    for bind in list_binds(plan, absolute):
        mounts.append(f"{bind.source}:{bind.target}" + (":ro" if bind.is_read_only else ""))
    return {
        "options": [Directive(option) for option in list_options(plan, absolute, nodes)],
        "setup": [ShellLine(line) for line in slurm.setup],
        "run_dir": str(absolute.root),
        "bundle": absolute.bundle.name,
        "checksums": absolute.checksums.name,
        "state": absolute.state.name,
        "again": absolute.again.name,
        "cancelled": absolute.cancelled.name,
        "requeue": slurm.requeue,
        "stop_before_s": slurm.stop_before_s,
        "scheduler": absolute.scheduler.name,
        "accounting_fields": ShellLine(SACCT_FIELDS),
        "srun_options": [*_SRUN_OPTIONS, *slurm.srun_extra],
        "private": environment.PRIVATE.pattern,
        "num_nodes": plan.layout.num_nodes,
        "python": find_python(plan),
        "runtime": find_runtime(plan),
        "remarks": [ShellLine(remark) for remark in find_remarks(plan)],
        "platform": plan.hardware.platform,
        "leaves_things": find_runtime(plan) in {*ENGINES, "apptainer"},
        "cache": CACHE,
        "shown": list(AMD_VISIBILITY if plan.hardware.platform == "rocm" else AMD_VISIBILITY[:1]),
        "secrets": list_secrets(plan),
        "entry": list_entry(plan),
        "has_package": container.package_dir is not None,
        "runtime_options": list_runtime_options(plan, absolute),
        "fabric": list_fabric(plan),
        "mounts": ",".join(mounts),
        "image_name": "" if image is None else image.pinned,
        "image": make_import(plan),
    }


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(  # noqa: S701 (the text is a shell script, and quote is its escaping)
        loader=FileSystemLoader(data_dir("slurm") / "templates"),
        undefined=StrictUndefined,
        finalize=quote,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
