"""Load the base manifests in ``k8s/base``: plain objects, without templates, so that any linter can read them."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

from rlk_repro.base.resources import data_dir


def load_base(name: str) -> dict[str, Any]:
    """Return a new copy of the object in ``<name>.yaml``; the caller may change the copy."""
    return deepcopy(_read_base(name))


@cache
def _read_base(name: str) -> dict[str, Any]:
    import yaml

    text = (data_dir("k8s") / "base" / f"{name}.yaml").read_text()
    value: dict[str, Any] = yaml.safe_load(text)
    return value
