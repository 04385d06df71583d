"""Ask registries through skopeo, which reads the site's credentials, mirrors and certificates."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from rlk_repro.base import proc
from rlk_repro.base.errors import EnvironmentMissing, Problem
from rlk_repro.base.files import sha256_bytes
from rlk_repro.rundir.manifest import Unknown

DIGEST: Final = re.compile("sha256:[0-9a-f]{64}")
SKOPEO: Final = "skopeo"
ASK_TIMEOUT_S: Final = 120.0
_TROUBLE: Final = (
    ("manifest unknown", "the registry has no such tag or digest (any more)"),
    ("unauthorized", "log in: skopeo login REGISTRY"),
    ("denied", "log in: skopeo login REGISTRY"),
    ("no such host", "the registry's name cannot be resolved here"),
    ("connection refused", "nothing listens at the registry's address"),
)


def resolve_tag(reference: str) -> str:
    """Return a tag's present digest; if the tag names an index of several platforms, the index's digest."""
    return f"sha256:{sha256_bytes(_ask_raw(reference))}"


def ask_size(reference: str) -> int | Unknown:
    """Return how many bytes a pull fetches; for an index of several platforms, the bytes of the largest image."""
    try:
        manifest = json.loads(_ask_raw(reference))
        listed = [item for item in manifest.get("manifests", []) if "annotations" not in item]
        if listed:
            name = reference.partition("@")[0]
            sizes = [_sum(json.loads(_ask_raw(f"{name}@{_check_digest(item['digest'])}"))) for item in listed]
            return max(sizes)
        return _sum(manifest)
    except EnvironmentMissing as error:
        return Unknown(str(error.problems[0]).splitlines()[0])
    except (ValueError, KeyError, TypeError) as error:
        return Unknown(f"the registry's answer is not a manifest ({error!r})")


def _check_digest(value: Any) -> str:
    if not isinstance(value, str) or DIGEST.fullmatch(value) is None:
        raise ValueError(f"no digest: {value!r}")
    return value


def _sum(manifest: dict[str, Any]) -> int:
    return sum(int(item["size"]) for item in [manifest["config"], *manifest["layers"]])


def _ask_raw(reference: str) -> bytes:
    argv = [SKOPEO, "inspect", "--raw", "--", f"docker://{reference}"]
    done = proc.run(argv, timeout_s=ASK_TIMEOUT_S, is_binary=True)
    if not done.is_ok:
        raise EnvironmentMissing(
            Problem(reference, f"cannot be looked up in its registry ({_words(done)})", hint=_hint(done))
        )
    return done.data


def _words(done: proc.Completed) -> str:
    return done.last_words.split('msg="')[-1].rstrip('"')[:300]


def _hint(done: proc.Completed) -> str | None:
    return next((hint for needle, hint in _TROUBLE if needle in done.stderr), None)
