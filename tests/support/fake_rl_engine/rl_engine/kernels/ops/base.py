"""Whether the compiled extension is there.  The double has none."""

from __future__ import annotations

from typing import Any

_C: Any = None
_EXT_AVAILABLE = False
