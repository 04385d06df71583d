"""No value of a stranger's file becomes an option, a command or a second line: patterns prevent it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from rlk_repro.base import git
from rlk_repro.base.errors import EnvironmentMissing, SpecError
from rlk_repro.clusters.slurm.script import render_sbatch
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import (
    ContainerSettings,
    Hardware,
    Image,
    KubernetesSettings,
    Pin,
    Profile,
    Run,
    SlurmSettings,
    Stack,
)
from rlk_repro.spec.assets import HubSource
from rlk_repro.spec.site import Mount
from rlk_repro.spec.vime import ArgumentText
from tests.support.copied_package import mirror_folder
from tests.support.probe_examples import commit_files
from tests.support.slurm.examples import make_two_nodes_plan
from tools.image_build.inputs import read_inputs
from tools.rl_kernel.source import get_sources

Call = Callable[..., tuple[int, str, str]]
# People read these texts, and no command contains them.
FOR_READERS = re.compile(
    r"\.(purpose|title|evidence|reason|build|made_by|version|driver_floor|name_part|refused_name_parts\[\]"
    r"|all_reduce\.source|may_claim\[\]|may_not_claim\[\]|moving\.\*)$|^Run\.workload\.model$|\.env\.\*$"
)
HOSTILE = ("\n", "a\nb", "a\x1b[2Jb", "a\x9bb", "a\u202eb", "a\u2066b", "a\u200bb", "a\0b", "\x7f")


def test_git_fetches_over_https_alone_and_reads_no_value_as_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = commit_files(tmp_path / "source", {"rl_engine/__init__.py": ""})
    address = f"{mirror_folder(tmp_path, tmp_path / 'home', monkeypatch)}/source"
    marker = tmp_path / "marker"
    option = f"--upload-pack=touch {marker};"
    assert git.ask_git(tmp_path, "init", "--quiet", "--bare", timeout_s=60.0).is_ok
    for words in ((address, option), (option, "main")):
        assert not git.fetch(tmp_path, *words, timeout_s=60.0).is_ok
    assert not marker.exists()
    assert git.fetch(tmp_path, address, "main", timeout_s=60.0).is_ok
    monkeypatch.delenv("GIT_ALLOW_PROTOCOL")
    with pytest.raises(EnvironmentMissing, match="transport 'file' not allowed"):
        get_sources(Pin(repository=address, commit=commit), None, tmp_path / "copy")


class Held(BaseModel):
    value: ArgumentText


COMMIT = {"commit": "1" * 40}
REFUSED: tuple[tuple[type[BaseModel], str, tuple[Any, ...], dict[str, str]], ...] = (
    (Pin, "repository", ("https://token@git.example/x", "https://git.example/-x", "http://git.example/x",
                         "git@git.example:x", "--upload-pack=id;", "ext::sh -c id", "/src", "file:///src"), COMMIT),
    (Image, "reference", ("--privileged", "registry.example/x --volume=/:/host", "registry.example/x@sha256:1",
                          "registry.example/x\n#SBATCH --wrap=id"), {"digest": f"sha256:{'1' * 64}"}),
    (Mount, "source", ("/a\nb", "--device=/dev/sda"), {}),
    (Mount, "target", ("/b\x1b[2J",), {"source": "/a"}),
    (SlurmSettings, "partition", ("-x",), {}),
    (SlurmSettings, "account", ("a\u202eb",), {}),
    (ContainerSettings, "python", ("-i",), {}),
    (ContainerSettings, "image_dir", ("/a\x85b",), {}),
    (KubernetesSettings, "context", ("--kubeconfig=/tmp/x",), {}),
    (KubernetesSettings, "namespace", ("-n",), {}),
    (HubSource, "repository", ("--token/x",), {"kind": "hub"}),
    (HubSource, "revision", ("--force",), {"kind": "hub", "repository": "acme/tiny"}),
    (Held, "value", ("--load=/x", "-x", "- 1", "a\nb", "\x1b]0;x\x07"), {}),
)  # fmt: skip


def test_values_that_look_like_an_option_or_hold_a_line_break_are_refused() -> None:
    for model, key, values, others in REFUSED:
        for value in values:
            with pytest.raises(ValidationError) as caught:
                model.model_validate({**others, key: value})
            assert {error["loc"][0] for error in caught.value.errors()} == {key}, value
    for text in ("-1", "-.5", "([0]*1+[1]*45)", "cosine", "{a: 1}", "ünïcode"):
        assert Held(value=text).value == text


@pytest.mark.parametrize("model", [Run, Stack, Hardware, Profile])
def test_every_text_that_is_not_for_readers_has_a_pattern_without_hidden_characters(model: type[BaseModel]) -> None:
    schema = model.model_json_schema()
    open_ended = []
    for path, found in walk(schema, schema.get("$defs", {}), model.__name__, frozenset()):
        if FOR_READERS.search(path) or "enum" in found or "const" in found:
            continue
        pattern = found.get("pattern")
        if pattern is None or any(re.search(pattern.replace("$", r"\Z"), f"{start}{text}") for text in HOSTILE
                                  for start in ("", "/", "a", "/a", "--a", "a.b", "https://a/")):  # fmt: skip
            open_ended.append(path)
    assert open_ended == []


def test_an_invalid_node_name_is_not_requested_and_a_build_fetches_from_no_other_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_two_nodes_plan()
    for name in ("-x", "--wrap=id", "a b", "a,b", "a[1-3]", "a\nb", "a;b", "", "a\u202e"):
        with pytest.raises(SpecError, match="not a node name"):
            render_sbatch(plan, RunDir(tmp_path / "run"), nodes=[name] * plan.layout.num_nodes)
    for address in ("--upload-pack=id", "ext::id", "/src", "git://git.example/x"):
        monkeypatch.setenv("VIME_REPOSITORY", address)
        with pytest.raises(SpecError, match="VIME_REPOSITORY: not a repository that can be fetched"):
            read_inputs()


def walk(
    schema: Mapping[str, Any], definitions: Mapping[str, Any], path: str, seen: frozenset[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """List every place of a JSON Schema that takes text."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        if name not in seen:
            yield from walk(definitions[name], definitions, path, seen | {name})
        return
    if schema.get("type") == "string":
        yield path, schema
    parts = [(path, item) for key in ("anyOf", "oneOf", "allOf") for item in schema.get(key, [])]
    parts += [(f"{path}.{name}", item) for name, item in schema.get("properties", {}).items()]
    parts += [(f"{path}[]", schema[key]) for key in ("items",) if isinstance(schema.get(key), dict)]
    more = schema.get("additionalProperties")
    parts += [
        (f"{path}.*", item) for item in [more, *schema.get("patternProperties", {}).values()] if isinstance(item, dict)
    ]
    for place, item in parts:
        yield from walk(item, definitions, place, seen)
