"""The record inside an image, ``/opt/rlk-repro/provenance.json``: what was built into it, of which base, for what.

It holds no time and no path of the build machine, so that equal inputs give equal records but for the hash of the
compiled extension, in which the compiler gives names of its own at every build.  Its ``digest`` is over everything
else in it: that catches a careless edit; what catches a careful one is that every fact is compared with the image
itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlk_repro.base.errors import BundleUnreadable, Problem
from rlk_repro.base.files import check_schema, dump_json_line, sha256_bytes
from rlk_repro.operators import OPERATORS, Platform
from rlk_repro.probes.container import PROVENANCE
from rlk_repro.rundir.manifest import Fact, Manifest, Section

SCHEMA: Final = 1
LABEL_PREFIX: Final = "rlk-repro."

ARCHITECTURES: Final = {Platform.CUDA: ("sm_100", "sm_80", "sm_90", "sm_90a")}
"""Machine code that an image's extension holds: A100, H200, H200's own instructions, GB200."""

_LOGP_OPERATORS: Final = ("logp", "linear_logp")
SYMBOLS: Final = {
    Platform.CUDA: tuple(
        sorted(
            {
                symbol
                for name in _LOGP_OPERATORS
                for implementation in OPERATORS[name].implementations[Platform.CUDA]
                for symbol in implementation.symbols
            }
        )
    )
}
"""What the extension must offer; on ROCm RL-Kernel has none at the pinned commit, and its routes are Triton's."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """The image below ours: repository and the digest of what was built on (an index or one platform's manifest)."""

    reference: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class ImageRecord:
    """``code`` is the section of that name in a node's manifest, as it was when the image was built."""

    stack: str
    platform: str
    base: Base
    commits: Mapping[str, str]
    code: Section
    build: Mapping[str, Any]
    added_packages: tuple[str, ...] = ()

    @property
    def gpu_platform(self) -> Platform:
        """``cuda`` of ``cuda-arm64``."""
        return Platform(self.platform.partition("-")[0])

    def to_json(self) -> dict[str, Any]:
        value = {
            "schema": SCHEMA,
            "stack": self.stack,
            "platform": self.platform,
            "base": {"reference": self.base.reference, "digest": self.base.digest},
            "commits": dict(self.commits),
            "code": Manifest(node="image", sections={"code": self.code}).to_json()["sections"]["code"],
            "build": dict(self.build),
            "added_packages": list(self.added_packages),
        }
        return value | {"digest": digest_of(value)}


def digest_of(value: Mapping[str, Any]) -> str:
    """Over the record without its digest."""
    return sha256_bytes(dump_json_line({name: item for name, item in value.items() if name != "digest"}).encode())


def parse_record(data: bytes, where: str = PROVENANCE) -> ImageRecord:
    """Read a record; ``where`` is the file that it was read from.

    Raises:
        BundleUnreadable: not one of ours, of a newer version, or edited since it was written.
    """
    try:
        value = json.loads(data)
        check_schema(where, value, SCHEMA)
        record = ImageRecord(
            stack=str(value["stack"]),
            platform=str(value["platform"]),
            base=Base(**value["base"]),
            commits=dict(value["commits"]),
            code=_section(value["code"]),
            build=dict(value["build"]),
            added_packages=tuple(value["added_packages"]),
        )
        Platform(record.platform.partition("-")[0])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BundleUnreadable(Problem(where, f"is no record of an image ({error})")) from None
    if value.get("digest") != digest_of(value):
        raise BundleUnreadable(
            Problem(where, "was edited since it was written", got=value.get("digest"), expected=digest_of(value))
        )
    return record


def _section(value: dict[str, Any]) -> Mapping[str, Fact]:
    return Manifest.from_json({"schema": 1, "sections": {"code": value}}).sections["code"]
