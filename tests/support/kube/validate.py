"""What real API servers check, offline: schemas of Kubernetes itself, real CRD schemas, and their CEL rules.

The CRDs are not ours to copy: ``RLK_CRD_DIR`` names a folder with them, as ``*.yaml.gz``.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import celpy
import celpy.adapter
import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import pytest
import yaml

from rlk_repro.clusters.k8s.tree import as_list, as_map
from tests.support.kube.templates import find_templates

VERSIONS = ("1.28", "1.31", "1.34", kubernetes_validate.latest_version())
CLAIMS_FROM = "1.31"
CRD_DIR = os.environ.get("RLK_CRD_DIR", "")
needs_crds = pytest.mark.skipif(not CRD_DIR, reason="RLK_CRD_DIR names no folder with CRDs")

# the package reads two megabytes of JSON for every object it is asked about
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)


def find_errors(item: Mapping[str, Any], versions: tuple[str, ...] = VERSIONS) -> list[str]:
    """Everything that a real API server would say; custom resources only where their CRDs are at hand."""
    found = []
    if is_custom(item):
        found += check_custom(item) if CRD_DIR else []
        pods = [make_pod(template.value) for template in find_templates(item)]
        # the schema of a CRD says nothing of metadata, which the server knows without it
        pods.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": item.get("metadata")})
        pods += [make_job(job) for job in as_list(as_map(item.get("spec")).get("replicatedJobs"))]
    else:
        pods = [dict(item)]
    for version in versions:
        found += [f"{version}: {error}" for pod in pods for error in check_core(pod, version)]
    return found


def make_job(replicated: Any) -> dict[str, Any]:
    return {"apiVersion": "batch/v1", "kind": "Job", **as_map(as_map(replicated).get("template"))}


def is_custom(item: Mapping[str, Any]) -> bool:
    group = str(item.get("apiVersion")).partition("/")[0]
    return group in {"ray.io", "resource.nvidia.com"}


def make_pod(template: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", **template}


def check_core(item: dict[str, Any], version: str) -> list[str]:
    if "resourceClaims" in str(item) and tuple(map(int, version.split("."))) < (1, 31):
        return []
    try:
        kubernetes_validate.validate(item, version, strict=True)
    except jsonschema.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message[:200]}"]
    return []


def check_custom(item: Mapping[str, Any]) -> list[str]:
    schema = load_schema(str(item["apiVersion"]), str(item["kind"]))
    errors = [
        f"{'.'.join(map(str, error.path))}: {error.message[:200]}" for error in _validator(schema).iter_errors(item)
    ]
    return errors or list(check_cel(schema.raw, item, ""))


class Schema:
    """One version of a CRD, as it is and closed for a JSON Schema library."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw
        self.closed = close(raw)


@cache
def load_schema(api_version: str, kind: str) -> Schema:
    for path in sorted(Path(CRD_DIR).glob("*.yaml.gz")):
        crd = _load_crd(path)
        version = api_version.partition("/")[2]
        if crd["spec"]["names"]["kind"] == kind and api_version.startswith(crd["spec"]["group"]):
            found = next(item for item in crd["spec"]["versions"] if item["name"] == version)
            return Schema(found["schema"]["openAPIV3Schema"])
    raise LookupError(f"no CRD of {kind} in {CRD_DIR}")


@cache
def _load_crd(path: Path) -> Any:
    return yaml.load(gzip.decompress(path.read_bytes()), Loader=yaml.CSafeLoader)


@cache
def _validator(schema: Schema) -> Any:
    return jsonschema.Draft202012Validator(schema.closed)


def close(schema: Any) -> Any:
    """Unknown fields are refused, as with strict field validation; int-or-string is either."""
    if isinstance(schema, list):
        return [close(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        key: {name: close(item) for name, item in value.items()} if key == "properties" else close(value)
        for key, value in schema.items()
        if not key.startswith("x-") and key not in {"format", "default"}
    }
    if schema.get("x-kubernetes-int-or-string"):
        closed.pop("anyOf", None)
        closed["type"] = ["integer", "string"]
    if "properties" in closed and "additionalProperties" not in closed:
        is_open = schema.get("x-kubernetes-preserve-unknown-fields") or set(closed["properties"]) == {"name"}
        # metadata has no properties in a CRD; whoever has some lists all of them
        closed["additionalProperties"] = bool(is_open) and bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    return closed


def check_cel(schema: Mapping[str, Any], value: Any, where: str) -> Iterator[str]:
    """The rules at this place and below; those that compare with an earlier object say nothing of a new one."""
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in rule["rule"] and not _holds(rule["rule"], value):
            yield f"{where or 'object'}: {rule.get('message', rule['rule'])}"
    if isinstance(value, Mapping):
        for name, part in schema.get("properties", {}).items():
            if name in value:
                yield from check_cel(part, value[name], f"{where}.{name}".lstrip("."))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from check_cel(schema.get("items", {}), item, f"{where}[{index}]")


@cache
def _program(rule: str) -> Any:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule))


def _holds(rule: str, value: Any) -> bool:
    return bool(_program(rule).evaluate({"self": celpy.adapter.json_to_cel(value)}))
