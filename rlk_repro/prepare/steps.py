"""What one run needs, in the order in which it can be had, and doing it: room first, then one folder after another."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from rlk_repro.base.errors import EnvironmentMissing, Problem
from rlk_repro.base.units import format_bytes
from rlk_repro.prepare import arithmetic, random_model
from rlk_repro.prepare.contents import Contents, list_folders, load_contents, record_files
from rlk_repro.prepare.fetch import Fetch, bytes_there
from rlk_repro.prepare.layout import PreparedDir
from rlk_repro.prepare.making import Made, Order, Tell, WorkDir, fill, find_contents, require_unchanged
from rlk_repro.prepare.origins import MODEL_FILES, Origin, Repository, list_origins
from rlk_repro.prepare.progress import watch_growth
from rlk_repro.prepare.stored_rollouts import Storage
from rlk_repro.spec import ArithmeticData, Hardware, HubData, HubSource, Run, Stack, VimeWorkload
from rlk_repro.workloads.vime.conversion import TOOL, Conversion

T = TypeVar("T")

# what is left free beside what is written: file systems slow down and jobs write too
SPARE_BYTES: Final = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Request:
    """Whose needs, where they go, and where they may come from."""

    run: Run
    stack: Stack
    hardware: Hardware
    prepared: PreparedDir
    mirror: Path | None = None
    is_offline: bool = False


@dataclass(frozen=True, kw_only=True)
class Step:
    """One folder.  ``estimate`` gives the bytes that are still to be written, None where nobody knows before.

    ``pin`` is where the run would name the revision, of what it leaves to the hub.
    """

    order: Order
    what: str
    estimate: Callable[[], int | None]
    pin: str = ""
    command: Callable[[], Sequence[str]] = list

    @property
    def is_there(self) -> bool:
        return find_contents(self.order) is not None


@dataclass(frozen=True, kw_only=True)
class Done:
    """A step and what lies in its folder now."""

    step: Step
    contents: Contents

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.contents.kind,
            "folder": str(self.step.order.folder),
            "source": dict(self.contents.source),
            "num_files": len(self.contents.files),
            "size_bytes": self.contents.size_bytes,
            "digest": self.contents.digest,
        }

    @property
    def unpinned(self) -> dict[str, str] | None:
        """Where the run leaves a revision to the hub, and what the hub served."""
        if not self.step.pin:
            return None
        return {"path": self.step.pin, "revision": str(self.contents.source.get("revision"))}


def list_steps(request: Request) -> list[Step]:
    """Everything the run needs; nothing where its workload makes everything itself.

    Raises:
        SpecError: the mirror is no folder, or a random model lacks a size.
    """
    workload = request.run.workload
    if not isinstance(workload, VimeWorkload):
        return []
    origins = list_origins(request.mirror, is_offline=request.is_offline)
    folders = list_folders(request.run, request.stack, request.prepared)
    steps = []
    if "data" in folders:
        steps.append(_data_step(workload, folders["data"], origins))
    if "rollouts" in folders:
        steps.append(_rollouts_step(request, workload, folders["rollouts"]))
    steps.append(_model_step(workload, folders["model"], origins))
    if "checkpoint" in folders:
        steps.append(_checkpoint_step(request, workload, folders["checkpoint"], steps[-1]))
    return steps


def prepare(request: Request, steps: Sequence[Step], tell: Tell, *, is_live: bool) -> list[Done]:
    """Do everything that is not done.

    Raises:
        EnvironmentMissing: no room, or something cannot be had here.
        CheckFailed: something that lies there is damaged, or a conversion failed.
    """
    sizes = {step.order.folder: step.estimate() for step in steps if not step.is_there}
    require_room(request.prepared.root, sum(size or 0 for size in sizes.values()))
    done = []
    for step in steps:
        folder = step.order.folder
        with watch_growth(folder, step.what, sizes.get(folder), tell, is_live=is_live):
            done.append(Done(step=step, contents=fill(step.order, tell)))
    return done


def verify(done: Sequence[Done], tell: Tell) -> None:
    """Read every byte again.  Raises CheckFailed, naming each file that is not as recorded."""
    for item in done:
        tell(f"{item.contents.name}: hashing {format_bytes(item.contents.size_bytes)}")
        require_unchanged(item.step.order.folder, item.contents, is_full=True)


def require_room(root: Path, needed: int) -> None:
    """Raises EnvironmentMissing where so many bytes would fill the file system."""
    place = next(folder for folder in (root.absolute(), *root.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    if needed + SPARE_BYTES > free and needed:
        raise EnvironmentMissing(
            Problem(str(root), "has not enough room", got=f"{format_bytes(free)} free",
                    expected=f"{format_bytes(needed)} and {format_bytes(SPARE_BYTES)} to spare",
                    hint="--cache DIR puts it elsewhere")
        )  # fmt: skip


def _fetch_step(kind: str, folder: Path, fetch: Fetch, pin: str) -> Step:
    repository = fetch.repository

    def is_wanted(source: Mapping[str, Any]) -> bool:
        same = source.get("repository") == repository.name
        return same and repository.revision in {None, source.get("revision")}

    def estimate() -> int:
        work = WorkDir.of(folder)
        return fetch.find(work)[1].size_bytes - bytes_there(work)

    return Step(
        order=Order(kind=kind, folder=folder, is_wanted=is_wanted, make=fetch.run),
        what=str(repository),
        estimate=estimate,
        pin="" if repository.revision else pin,
    )


def _model_step(workload: VimeWorkload, folder: Path, origins: Sequence[Origin]) -> Step:
    model, source = workload.model, workload.model.source
    if isinstance(source, HubSource):
        wanted = Repository(kind="model", name=source.repository, revision=source.revision, patterns=MODEL_FILES)
        return _fetch_step("model", folder, Fetch(repository=wanted, origins=origins), "workload.model.source.revision")
    recipe = random_model.recipe(model)

    def make(work: WorkDir) -> None:
        random_model.write_model(model, work.files)

    num_bytes = random_model.weights_bytes(random_model.Sizes.of(model))
    return _recipe_step("model", folder, recipe, make, num_bytes)


def _data_step(workload: VimeWorkload, folder: Path, origins: Sequence[Origin]) -> Step:
    source = workload.data.source
    if isinstance(source, HubData):
        wanted = Repository(kind="dataset", name=source.repository, revision=source.revision, patterns=(source.file,))
        return _fetch_step("data", folder, Fetch(repository=wanted, origins=origins), "workload.data.source.revision")
    prompts: ArithmeticData = source

    def make(work: WorkDir) -> None:
        arithmetic.write_prompts(prompts, work.files / PreparedDir(Path()).data_file(prompts).name)

    num_bytes = prompts.num_prompts * arithmetic.BYTES_PER_PROMPT
    return _recipe_step("data", folder, arithmetic.recipe(prompts), make, num_bytes)


def _recipe_step(
    kind: str, folder: Path, recipe: Mapping[str, Any], write: Callable[[WorkDir], None], num_bytes: int
) -> Step:
    """Made here, the same bytes everywhere; an attempt that was cut off is begun again."""

    def make(work: WorkDir, tell: Tell) -> Made:
        shutil.rmtree(work.files, ignore_errors=True)
        work.files.mkdir(parents=True)
        tell(f"{folder.name}: making it")
        write(work)
        return Made(source=recipe, files=record_files(work.files))

    order = Order(kind=kind, folder=folder, is_wanted=lambda source: dict(source) == dict(recipe), make=make)
    return Step(order=order, what=folder.name, estimate=lambda: num_bytes)


def _checkpoint_step(request: Request, workload: VimeWorkload, folder: Path, model: Step) -> Step:
    conversion = Conversion(
        model=workload.model,
        folder=model.order.folder,
        stack=request.stack,
        hardware=request.hardware,
        layout=request.run.layouts[request.hardware.hardware],
    )

    def is_wanted(source: Mapping[str, Any]) -> bool:
        wanted = conversion.source
        is_known = wanted["model"] is not None  # else it is fetched first, and asked again
        return all(source.get(key) == value for key, value in wanted.items() if is_known or key != "model")

    def estimate() -> int | None:
        """The same weights once more."""
        contents = load_contents(model.order.folder)
        return model.estimate() if contents is None else contents.size_bytes

    return Step(
        order=Order(kind="checkpoint", folder=folder, is_wanted=is_wanted, make=conversion.run),
        what=folder.name,
        estimate=estimate,
        command=lambda: conversion.command(Path("{vime}") / TOOL, folder, estimate() or 0),
    )


def _rollouts_step(request: Request, workload: VimeWorkload, folder: Path) -> Step:
    assert workload.rollouts is not None
    storage = Storage(stored=workload.rollouts, mirror=request.mirror, is_offline=request.is_offline)
    order = Order(
        kind="rollouts", folder=folder, is_wanted=lambda source: dict(source) == storage.source, make=storage.run
    )
    return Step(order=order, what=f"rollouts {workload.rollouts.name}", estimate=lambda: None)


def describe_steps(steps: Sequence[Step]) -> Iterator[str]:
    """What ``--dry-run`` shows: what is there, and what would be written; sizes are asked of the origins."""
    for step in steps:
        kind = f"{step.order.kind:<10}"
        if step.is_there:
            yield f"{kind} there    {step.order.folder}"
            continue
        yield f"{kind} missing  {step.order.folder}  ({_describe_size(step)})"
        words: Sequence[str] = _try(step.command, default=())
        if words:
            yield f"{'':<10} by       {shlex.join(words)}"


def _describe_size(step: Step) -> str:
    size_bytes = _try(step.estimate, default=None)
    return "size not known here" if size_bytes is None else format_bytes(size_bytes)


def _try(ask: Callable[[], T], default: T) -> T:
    """An answer that needs an origin, where none may be at hand."""
    try:
        return ask()
    except EnvironmentMissing:
        return default
