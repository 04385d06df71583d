"""Load the base manifests in ``k8s/base``: plain objects, without templates, so that any linter can read them."""

from __future__ import annotations

from typing import Any

from rlk_repro.base.resources import data_dir


def load_base(name: str) -> dict[str, Any]:
    """Return the object of ``<name>.yaml``, read anew, so that the caller may change it."""
    import yaml

    text = (data_dir("k8s") / "base" / f"{name}.yaml").read_text()
    value: dict[str, Any] = yaml.safe_load(text)
    return value
