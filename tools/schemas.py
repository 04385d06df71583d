"""Write JSON Schemas: of the files that authors write, for editors; of files that this tool writes, for scripts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter

from rlk_repro.base.files import dump_json, write_bytes
from rlk_repro.base.resources import data_dir
from rlk_repro.claims.files import Claim
from rlk_repro.claims.results import ClaimsCheck
from rlk_repro.cli.answers import ANSWERS
from rlk_repro.clusters.registry import BACKENDS
from rlk_repro.plan import PlanRecord
from rlk_repro.report.record import ReportRecord
from rlk_repro.rundir.results import Analysis
from rlk_repro.spec import Hardware, Profile, Run, Stack
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
    """Return file names and contents for ``manifests/schema/``."""
    schemas = {**{name: make_schema(name) for name in KINDS}, "answers": make_answers_schema()}
    return {f"{name}.schema.json": dump_json(schema) for name, schema in schemas.items()}


def write_schemas(folder: Path | None = None) -> None:
    target = data_dir("manifests") / "schema" if folder is None else folder
    for name, data in render_schemas().items():
        write_bytes(target / name, data)
