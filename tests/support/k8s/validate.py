"""Check objects as an API server does: by Kubernetes' own schemas, and by CRDs in the folder ``RLK_CRD_DIR``."""

from __future__ import annotations

import gzip
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import yaml

VERSIONS = ("1.28", kubernetes_validate.latest_version())
CLAIMS_FROM = (1, 31)
CRD_DIR = os.environ.get("RLK_CRD_DIR", "")

# the package reads two megabytes of JSON for every object it is asked about
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)


def find_errors(item: Mapping[str, Any], versions: tuple[str, ...] = VERSIONS) -> list[str]:
    if item["kind"] == "ComputeDomain":
        return _find_custom_errors(item) if CRD_DIR else []
    found = []
    for version in versions:
        if "resourceClaims" in str(item) and tuple(map(int, version.split("."))) < CLAIMS_FROM:
            continue
        try:
            kubernetes_validate.validate(dict(item), version, strict=True)
        except jsonschema.ValidationError as error:
            found.append(f"{version}: {'.'.join(map(str, error.path))}: {error.message[:200]}")
    return found


def _find_custom_errors(item: Mapping[str, Any]) -> list[str]:
    crd = yaml.safe_load(gzip.decompress((Path(CRD_DIR) / "resource.nvidia.com_computedomains.yaml.gz").read_bytes()))
    wanted = str(item["apiVersion"]).partition("/")[2]
    version = next(version for version in crd["spec"]["versions"] if version["name"] == wanted)
    schema = _close(version["schema"]["openAPIV3Schema"])
    return [error.message[:200] for error in jsonschema.Draft202012Validator(schema).iter_errors(item)]


def _close(schema: Any) -> Any:
    """Refuse unknown fields, as strict validation does; a CRD lists no properties of metadata."""
    if not isinstance(schema, dict):
        return schema
    closed = {key: _close(value) for key, value in schema.items() if not key.startswith("x-") and key != "default"}
    if isinstance(schema.get("properties"), dict):
        closed["properties"] = {name: _close(value) for name, value in schema["properties"].items()}
        closed["additionalProperties"] = False
    return closed
