"""Load the base manifests in ``k8s/base``, and read maps, lists and quantities from objects that no schema checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from rlk_repro.base.resources import data_dir

_QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_FACTORS: Final[Mapping[str, Decimal]] = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{name: Decimal(1000) ** power for power, name in enumerate("kMGTPE", start=1)},
    **{f"{name}i": Decimal(1024) ** power for power, name in enumerate("KMGTPE", start=1)},
}


def load_base(name: str) -> dict[str, Any]:
    """Load a manifest, which has no templates and so can be checked by any linter."""
    import yaml

    value: dict[str, Any] = yaml.safe_load((data_dir("k8s") / "base" / f"{name}.yaml").read_text())
    return value


def as_map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def parse_quantity(value: Any) -> Decimal | None:
    """Read a quantity such as ``64Gi`` as a number; None for a text that is not a quantity."""
    if isinstance(value, int) and not isinstance(value, bool):
        return Decimal(value)
    found = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    return Decimal(found[1]) * _FACTORS[found[2] or ""]
