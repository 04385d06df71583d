"""Write JSON Schemas: editors read the schemas of authors' files, and scripts read the schemas of this tool's files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter

from rlk_repro.agent.preflight.doctor import Diagnoses
from rlk_repro.base.files import dump_json, write_bytes
from rlk_repro.base.resources import data_dir
from rlk_repro.bundle.verify import Verification
from rlk_repro.claims.files import Claim
from rlk_repro.claims.results import ClaimsCheck
from rlk_repro.cli import answers
from rlk_repro.clusters.registry import BACKENDS
from rlk_repro.images.archive_check import ArchiveChecked
from rlk_repro.images.stacks import StackRows
from rlk_repro.plan import PlanRecord
from rlk_repro.replay.answers import Reanalysis, ReplayDryRun, Replayed, ReplayStopped
from rlk_repro.replay.compare import Differences
from rlk_repro.replay.gate import DiffGate
from rlk_repro.report.record import ReportRecord
from rlk_repro.rundir.results import Analysis
from rlk_repro.spec import Hardware, Profile, Run, Stack
from rlk_repro.submit.finishing import Finished
from rlk_repro.submit.show import DryRun
from rlk_repro.workloads.vime.contract import Contract

AUTHORED: Final[Mapping[str, type[BaseModel]]] = {
    "run": Run,
    "stack": Stack,
    "hardware": Hardware,
    "profile": Profile,
    "claim": Claim,
}
WRITTEN: Final[Mapping[str, type[Any]]] = {
    "plan": PlanRecord,
    "analysis": Analysis,
    "claims-check": ClaimsCheck,
    "report": list[ReportRecord],
    "contract": Contract,
}
ANSWERS: Final[Mapping[str, Any]] = {
    "agreement": answers.EnginesCompared,
    "cancel": answers.Cancelled,
    "claims check": ClaimsCheck,
    "claims list": list[Claim],
    "collect": answers.Collected,
    "diff": Differences | DiffGate,
    "doctor": Diagnoses,
    "env check": answers.Environment,
    "env create": answers.Environment,
    "env export": answers.Environment,
    "images build": answers.Built,
    "images check": ArchiveChecked | answers.ImageInRuntime,
    "images export": ArchiveChecked,
    "images import": ArchiveChecked,
    "images list": StackRows,
    "images pin": answers.Pinned,
    "images pull": answers.ImageInRuntime,
    "index": answers.Index,
    "inspect": dict[str, Any],
    "list": dict[str, dict[str, str]],
    "logs": answers.LogAnswer,
    "prepare": answers.PrepareAnswer | list[answers.PartMissing],
    "profile check": answers.ProfileChecked,
    "profile init": answers.NewProfile,
    "profile show": dict[str, Any],
    "replay": Reanalysis | ReplayStopped | Replayed | ReplayDryRun,
    "report": list[ReportRecord],
    "runs list": list[answers.RunRow] | list[answers.SubmittedRow],
    "runs show": Run,
    "status": answers.Status,
    "submit": answers.Submitted | Finished | DryRun,
    "verify": Verification,
}
"""The answers by command; for ``logs``, each line of the output is one answer."""
DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
KINDS: Final = (*AUTHORED, *WRITTEN)


def make_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of one kind of file."""
    schema = TypeAdapter({**AUTHORED, **WRITTEN}[name]).json_schema(by_alias=True)
    if name == "profile":  # the model takes any name, because a user may add clusters
        schema["properties"]["cluster"]["enum"] = list(BACKENDS)
    return {"$schema": DIALECT, "title": f"rlk-repro {name}", **schema}


def make_answers_schema() -> dict[str, Any]:
    """Return the JSON Schema of the answers that commands print: an object with one answer per command."""
    adapters = [(words, "validation", TypeAdapter(kind)) for words, kind in ANSWERS.items()]
    found, shared = TypeAdapter.json_schemas(adapters, title="rlk-repro answers")  # type: ignore[arg-type]
    properties = {words: schema for (words, _), schema in found.items()}
    return {"$schema": DIALECT, "type": "object", "additionalProperties": False, "properties": properties, **shared}


def render_schemas() -> dict[str, bytes]:
    """Return the files of ``manifests/schema/``: their names and contents."""
    schemas = {**{name: make_schema(name) for name in KINDS}, "answers": make_answers_schema()}
    return {f"{name}.schema.json": dump_json(schema) for name, schema in schemas.items()}


def write_schemas(folder: Path | None = None) -> None:
    target = data_dir("manifests") / "schema" if folder is None else folder
    for name, data in render_schemas().items():
        write_bytes(target / name, data)
