"""Read the record in an image, ``/opt/rlk-repro/provenance.json``: its code, base image and platform.

Equal inputs give equal records, except for the hash of the compiled extension: the compiler makes new internal names at
every build.  ``digest`` is a hash of the other fields; an edited field with the old digest is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlk_repro.base.errors import BundleUnreadable, Problem
from rlk_repro.base.files import check_schema, dump_json_line, sha256_bytes
from rlk_repro.operators import HAS_BATCH_INVARIANT_LOGP, OPERATORS, Platform
from rlk_repro.probes.container import PROVENANCE
from rlk_repro.rundir.manifest import Fact, Manifest, Section

SCHEMA: Final = 1

ARCHITECTURES: Final = {Platform.CUDA: ("sm_100", "sm_80", "sm_90", "sm_90a")}
"""The GPUs that the extension is compiled for: GB200, A100 and H200; ``sm_90a`` adds Hopper's own instructions."""


def list_symbols(platform: str, commit: str) -> tuple[str, ...]:
    """Return the functions that RL-Kernel's extension must have at a commit.

    On ROCm the operators use Triton and need none of them.
    """
    if platform not in ARCHITECTURES:
        return ()
    is_newer = HAS_BATCH_INVARIANT_LOGP.get(commit, False)
    symbols: set[str] = set()
    for operator in OPERATORS.values():
        for item in operator.implementations.get(platform, ()):
            if is_newer or not item.registered:
                symbols.update(item.symbols)
    return tuple(sorted(symbols))


@dataclass(frozen=True, kw_only=True)
class Base:
    """The base image; ``digest`` is the digest of an index or of one platform's manifest."""

    reference: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class ImageRecord:
    """An image's record; ``code`` is the section ``code`` of a manifest, as it was when the image was built."""

    stack: str
    platform: str
    base: Base
    commits: Mapping[str, str]
    code: Section
    build: Mapping[str, Any]
    added_packages: tuple[str, ...] = ()

    @property
    def gpu_platform(self) -> Platform:
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
    return sha256_bytes(dump_json_line({name: item for name, item in value.items() if name != "digest"}).encode())


def parse_record(data: bytes, where: str = PROVENANCE) -> ImageRecord:
    """Read a record; raise BundleUnreadable if the file is not a record, has a newer version, or was edited."""
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
        raise BundleUnreadable(Problem(where, f"is not an image's record ({error})")) from None
    if value.get("digest") != digest_of(value):
        raise BundleUnreadable(
            Problem(where, "was edited since it was written", got=value.get("digest"), expected=digest_of(value))
        )
    return record


def _section(value: dict[str, Any]) -> Mapping[str, Fact]:
    return Manifest.from_json({"schema": 1, "sections": {"code": value}}).sections["code"]
