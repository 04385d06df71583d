"""Writes JSON Schemas: of the files authors write, for editors; of what we write, for scripts that read it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter

from rlk_repro.base.files import dump_json, write_bytes
from rlk_repro.base.resources import data_dir
from rlk_repro.claims.files import Claim
from rlk_repro.claims.results import ClaimsCheck
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
KINDS: Final = (*AUTHORED, *WRITTEN)


def make_schema(name: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of one kind of file."""
    schema = TypeAdapter({**AUTHORED, **WRITTEN}[name]).json_schema(by_alias=True)
    if name == "profile":  # the model takes any name, for clusters that a user adds
        schema["properties"]["cluster"]["enum"] = list(BACKENDS)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"rlk-repro {name}", **schema}


def render_schemas() -> dict[str, bytes]:
    """File name to content for ``manifests/schema/``."""
    return {f"{name}.schema.json": dump_json(make_schema(name)) for name in KINDS}


def write_schemas(folder: Path | None = None) -> None:
    target = data_dir("manifests") / "schema" if folder is None else folder
    for name, data in render_schemas().items():
        write_bytes(target / name, data)
