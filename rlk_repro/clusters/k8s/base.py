"""Load the base manifests in ``k8s/base``, which have no templates and so can be checked by any linter."""

from __future__ import annotations

from typing import Any

from rlk_repro.base.resources import data_dir


def load_base(name: str) -> dict[str, Any]:
    import yaml

    text = (data_dir("k8s") / "base" / f"{name}.yaml").read_text()
    value: dict[str, Any] = yaml.safe_load(text)
    return value
