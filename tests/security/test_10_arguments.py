"""No value of a stranger's file becomes an option, a command or a second line: patterns prevent it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from rlk_repro.agent.ray.launch import RaySeat, render_env, render_start, require_tokens
from rlk_repro.base.errors import EnvironmentMissing, SpecError
from rlk_repro.clusters.slurm.script import render_sbatch
from rlk_repro.images.pin import resolve_ref
from rlk_repro.images.registry import ask_size
from rlk_repro.rundir.manifest import Unknown
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
from tests.support.images.examples import commit_files
from tests.support.probe_examples import write_tree
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
    for words in ((address, option), (option, "main")):
        with pytest.raises(EnvironmentMissing, match="git fetch"):
            resolve_ref(*words)
    assert not marker.exists()
    assert resolve_ref(address, "main")[0] == commit
    monkeypatch.delenv("GIT_ALLOW_PROTOCOL")
    with pytest.raises(EnvironmentMissing, match="transport 'file' not allowed"):
        resolve_ref(address, "main")
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


@pytest.mark.parametrize("name", ["-x", "--wrap=id", "a b", "a,b", "a[1-3]", "a\nb", "a;b", "", "a\u202e"])
def test_an_invalid_node_name_is_not_requested(tmp_path: Path, name: str) -> None:
    plan = make_two_nodes_plan()
    nodes = [name] * plan.layout.num_nodes
    with pytest.raises(SpecError, match="not a node name"):
        render_sbatch(plan, RunDir(tmp_path / "run"), nodes=nodes)


def test_an_answer_of_a_registry_is_never_read_as_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording stand-in replaces skopeo; the test checks the arguments that it gets."""
    listed = {"manifests": [{"digest": "x --tls-verify=false"}]}
    log = tmp_path / "log"
    tool = f"#!/bin/sh\nprintf '%s\\n' \"$*\" >> {log}\ncat <<'END'\n{json.dumps(listed)}\nEND\n"
    (write_tree(tmp_path / "bin", {"skopeo": tool}) / "skopeo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    answer = ask_size("registry.example/x@sha256:1")
    assert isinstance(answer, Unknown)
    assert "no digest" in answer.reason
    assert log.read_text().splitlines() == ["inspect --raw -- docker://registry.example/x@sha256:1"]


def test_a_build_fetches_from_no_other_place(monkeypatch: pytest.MonkeyPatch) -> None:
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


# Ray authenticates by token in every job, and the token stays where it is needed.


def test_a_ray_that_ignores_tokens_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "2.51.1")
    with pytest.raises(EnvironmentMissing, match="python module ray: has no authentication"):
        require_tokens()


def test_our_own_ray_has_no_dashboard_and_its_token_is_a_file() -> None:
    seat = RaySeat(index=0, node="n0", address="192.0.2.1", head="192.0.2.1:6379", num_gpus=8, first_port=6379,
                has_client=True, store_bytes=1 << 30)  # fmt: skip
    argv = render_start(seat, "/tmp/x")
    assert argv[argv.index("--include-dashboard") + 1] == "false"
    assert not [word for word in argv if "token" in word]
    env = render_env(seat, "/run/dir/.ray-token")
    assert (env["RAY_AUTH_MODE"], env["RAY_AUTH_TOKEN_PATH"]) == ("token", "/run/dir/.ray-token")
