"""The tests mirror the package; what they share is in ``support``."""

from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).resolve().parent
ROOT: Final = TESTS.parent
SUPPORT: Final = TESTS / "support"
