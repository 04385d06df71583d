"""Generated files are what the code generates; ``make goldens`` rewrites them."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest

from rlk_repro.base.files import load_json
from rlk_repro.base.resources import data_dir
from rlk_repro.base.yamlfile import parse_yaml
from tests.support.make_run import finish_run, make_run
from tools.schemas import AUTHORED, make_schema, render_schemas

SCHEMAS = render_schemas()
FILES = {
    "run": [*data_dir("jobs").glob("*.yaml")],
    "hardware": [*data_dir("jobs").glob("hardware/*.yaml")],
    "profile": [
        *data_dir("jobs").glob("profiles/*.yaml"),
        *data_dir("slurm").glob("profiles/*.yaml"),
        *data_dir("k8s").glob("profiles/*.yaml"),
    ],
    "stack": [*data_dir("manifests").glob("stacks/*.yaml")],
    "claim": [*data_dir("manifests").glob("claims/*.yaml")],
}


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_schemas_on_disk_are_those_of_the_models(name: str) -> None:
    assert (data_dir("manifests") / "schema" / name).read_bytes() == SCHEMAS[name]


@pytest.mark.parametrize(("kind", "path"), [(kind, path) for kind, paths in FILES.items() for path in paths],
                         ids=lambda value: value if isinstance(value, str) else value.name)  # fmt: skip
def test_shipped_files_satisfy_the_exported_schema(kind: str, path: Path) -> None:
    jsonschema.Draft202012Validator(make_schema(kind)).validate(parse_yaml(path.name, path.read_bytes()).value)


@pytest.mark.parametrize("kind", sorted(AUTHORED))
def test_a_schema_refuses_an_unknown_key_as_the_models_do(kind: str) -> None:
    value = {**parse_yaml(kind, FILES[kind][0].read_bytes()).value, "no_such_key": 1}
    errors = list(jsonschema.Draft202012Validator(make_schema(kind)).iter_errors(value))
    assert any("no_such_key" in error.message for error in errors)


def test_what_a_run_leaves_satisfies_the_exported_schemas(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "id")
    finish_run(run_dir)
    for kind, path in (("plan", run_dir.plan), ("analysis", run_dir.analysis)):
        jsonschema.Draft202012Validator(make_schema(kind)).validate(load_json(path))
