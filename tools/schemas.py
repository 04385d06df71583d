"""Write the JSON Schemas by which an editor completes and checks the keys of authors' files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter

from rlk_repro.base.files import dump_json, write_bytes
from rlk_repro.base.resources import data_dir
from rlk_repro.clusters.registry import BACKENDS
from rlk_repro.spec import Hardware, Profile, Run, Stack

AUTHORED: Final[Mapping[str, type[BaseModel]]] = {"run": Run, "stack": Stack, "hardware": Hardware, "profile": Profile}


def make_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of one kind of file."""
    schema = TypeAdapter(AUTHORED[name]).json_schema(by_alias=True)
    if name == "profile":  # the model takes any name, because a user may add clusters
        schema["properties"]["cluster"]["enum"] = list(BACKENDS)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"rlk-repro {name}", **schema}


def write_schemas() -> None:
    for name in AUTHORED:
        write_bytes(data_dir("manifests") / "schema" / f"{name}.schema.json", dump_json(make_schema(name)))


if __name__ == "__main__":
    write_schemas()
