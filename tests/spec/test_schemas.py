"""The JSON Schemas by which editors complete authors' files say what the models say; ``make goldens`` rewrites them."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest

from rlk_repro.base.files import dump_json
from rlk_repro.base.resources import data_dir
from rlk_repro.base.yamlfile import parse_yaml
from tests import ROOT
from tools.schemas import AUTHORED, make_schema

FILES = [
    *(("run", path) for path in ROOT.glob("jobs/*.yaml")),
    *(("hardware", path) for path in ROOT.glob("jobs/hardware/*.yaml")),
    *(("profile", path) for path in ROOT.glob("*/profiles/*.yaml")),
    *(("stack", path) for path in ROOT.glob("manifests/stacks/*.yaml")),
]


@pytest.mark.parametrize("kind", AUTHORED)
def test_a_schema_is_that_of_the_model_and_refuses_an_unknown_key(kind: str) -> None:
    schema = make_schema(kind)
    assert (data_dir("manifests") / "schema" / f"{kind}.schema.json").read_bytes() == dump_json(schema)
    errors = jsonschema.Draft202012Validator(schema).iter_errors({"no_such_key": 1})
    assert any("no_such_key" in error.message for error in errors)


@pytest.mark.parametrize(("kind", "path"), FILES, ids=lambda value: getattr(value, "name", value))
def test_a_shipped_file_satisfies_its_schema(kind: str, path: Path) -> None:
    value = parse_yaml(path.name, path.read_bytes()).value
    jsonschema.Draft202012Validator(make_schema(kind)).validate(value)
