"""Define the facts that a pod reports about its run, and the blocks with checksums in which a pod sends files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from rlk_repro.base.errors import BundleUnreadable, Problem
from rlk_repro.base.files import check_schema
from rlk_repro.rundir.paths import TRIALS

SCHEMA: Final = 1
BUNDLE: Final = "bundle"
# an interruption loses at most one block
BLOCK_BYTES: Final = 16 << 20
_DIGEST_BYTES: Final = hashlib.sha256().digest_size


@dataclass(frozen=True, kw_only=True)
class TrialLog:
    name: str
    size_bytes: int
    has_ended: bool


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts that a pod reports about its run; ``state`` is the agent's last progress report.

    ``bundle_bytes`` and ``bundle_sha256`` describe a complete bundle; ``failure`` says why there will be no bundle.
    """

    state: Mapping[str, Any] | None
    is_sealed: bool
    waits_for: str
    failure: str
    bundle_bytes: int | None
    bundle_sha256: str
    trials: tuple[TrialLog, ...]

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, value: Any) -> Facts:
        check_schema("pod", value, SCHEMA)
        try:
            trials = tuple(TrialLog(**item) for item in value["trials"])
            return cls(**{**{key: value[key] for key in cls.__dataclass_fields__}, "trials": trials})
        except (KeyError, TypeError) as error:
            raise BundleUnreadable(Problem("pod", f"gives an unexpected answer ({error!r})")) from None


def make_log_name(trial: str) -> str:
    return f"{TRIALS}/{trial}"


def wrap_block(data: bytes) -> bytes:
    return hashlib.sha256(data).digest() + data


def unwrap_block(answer: bytes) -> bytes | None:
    """Return the data of a block; None if the block arrived incomplete."""
    digest, data = answer[:_DIGEST_BYTES], answer[_DIGEST_BYTES:]
    return data if hashlib.sha256(data).digest() == digest else None
