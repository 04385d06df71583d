"""The JSON Schemas by which editors complete authors' files say what the models say; ``make goldens`` rewrites them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
from pydantic import BaseModel, TypeAdapter

from rlk_repro.base.files import dump_json
from rlk_repro.base.resources import data_dir
from rlk_repro.base.yamlfile import parse_yaml
from rlk_repro.clusters.registry import BACKENDS
from rlk_repro.spec import Hardware, Profile, Run, Stack
from tests import ROOT

AUTHORED: Final[dict[str, type[BaseModel]]] = {"run": Run, "stack": Stack, "hardware": Hardware, "profile": Profile}
FILES = [
    *(("run", path) for path in ROOT.glob("jobs/*.yaml")),
    *(("hardware", path) for path in ROOT.glob("jobs/hardware/*.yaml")),
    *(("profile", path) for path in ROOT.glob("*/profiles/*.yaml")),
    *(("stack", path) for path in ROOT.glob("manifests/stacks/*.yaml")),
]


def make_schema(kind: str) -> dict[str, Any]:
    schema = TypeAdapter(AUTHORED[kind]).json_schema(by_alias=True)
    if kind == "profile":  # the model takes any name, because a user may add clusters
        schema["properties"]["cluster"]["enum"] = list(BACKENDS)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"rlk-repro {kind}", **schema}


@pytest.mark.parametrize("kind", AUTHORED)
def test_a_schema_is_that_of_the_model_and_refuses_an_unknown_key(kind: str) -> None:
    schema, file = make_schema(kind), data_dir("manifests") / "schema" / f"{kind}.schema.json"
    if os.environ.get("RLK_REPRO_GOLDENS") == "write":
        file.write_bytes(dump_json(schema))
    assert file.read_bytes() == dump_json(schema), "make goldens"
    errors = jsonschema.Draft202012Validator(schema).iter_errors({"no_such_key": 1})
    assert any("no_such_key" in error.message for error in errors)


@pytest.mark.parametrize(("kind", "path"), FILES, ids=lambda value: getattr(value, "name", value))
def test_a_shipped_file_satisfies_its_schema(kind: str, path: Path) -> None:
    value = parse_yaml(path.name, path.read_bytes()).value
    jsonschema.Draft202012Validator(make_schema(kind)).validate(value)
