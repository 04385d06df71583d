"""Record the changes of rlk-repro's own checkout as a patch, because its commit alone does not identify the code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import rlk_repro
from rlk_repro.base.files import write_bytes
from rlk_repro.base.secrets import Scrubber
from rlk_repro.base.units import name_some
from rlk_repro.images.build import CONTEXT
from rlk_repro.probes.checkout import make_patch
from rlk_repro.probes.code import SECTION
from rlk_repro.rundir.manifest import OWN_PATCH, PATCH_IS_SCRUBBED, PATCH_IS_WHOLE, Fact, Manifest, Unknown
from rlk_repro.sources import OURSELVES

MAX_PATCH_BYTES: Final = 1 << 20
_BINARY: Final = b"\nGIT binary patch\n"


def with_own_patch(manifest: Manifest, path: Path, scrubber: Scrubber) -> Manifest:
    """Write the checkout's changes as a patch, without secrets; the manifest says whether the patch is complete."""
    own = manifest.sections.get(SECTION, {}).get(OURSELVES.section)
    if not isinstance(own, dict) or own.get("is_dirty") is not True:
        return manifest
    facts = {**own, OWN_PATCH: _write_patch(path, scrubber)}
    code = {**manifest.sections[SECTION], OURSELVES.section: facts}
    return replace(manifest, sections={**manifest.sections, SECTION: code})


def _write_patch(path: Path, scrubber: Scrubber) -> Fact:
    made = make_patch(Path(rlk_repro.__file__).parent, CONTEXT)
    if isinstance(made, Unknown):
        return made
    patch, untracked = made
    lacking = f", which lacks files outside the commit: {name_some(untracked)}" if untracked else ""
    if not patch:
        return Unknown(f"no patch{lacking or ', because no changed file belongs to the package'}")
    if len(patch) > MAX_PATCH_BYTES:
        return Unknown(f"the patch is larger than {MAX_PATCH_BYTES >> 20} MiB")
    if _BINARY in patch:
        return Unknown("the changes include binary files, which may hide secrets")
    clean = scrubber.bytes(patch)
    write_bytes(path, clean)
    return (PATCH_IS_WHOLE if clean == patch else PATCH_IS_SCRUBBED) + lacking
