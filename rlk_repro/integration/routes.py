"""RL-Kernel's routes by operator.  An operator that is not here falls back or is refused, as the mode says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rlk_repro.integration.decisions import RouteFactory

ROUTES: Final[Mapping[str, RouteFactory]] = {}
