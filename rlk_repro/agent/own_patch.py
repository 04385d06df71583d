"""Put rlk-repro's own uncommitted changes into the bundle: the commit alone does not identify the code that ran."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

import rlk_repro
from rlk_repro.base.files import write_bytes
from rlk_repro.base.secrets import Scrubber
from rlk_repro.images.build import CONTEXT
from rlk_repro.probes.checkout import make_patch
from rlk_repro.probes.code import SECTION
from rlk_repro.rundir.manifest import OWN_PATCH, PATCH_IS_SCRUBBED, PATCH_IS_WHOLE, Fact, Manifest, Unknown
from rlk_repro.rundir.paths import RunDir
from rlk_repro.sources import OURSELVES

MAX_BYTES: Final = 1 << 20
_BINARY: Final = b"\nGIT binary patch\n"


def with_own_patch(manifest: Manifest, run_dir: RunDir, scrubber: Scrubber) -> Manifest:
    """Write the checkout's changes as a patch, without secrets; the manifest says whether the patch is complete."""
    own = manifest.sections.get(SECTION, {}).get(OURSELVES.section)
    if not isinstance(own, dict) or own.get("is_dirty") is not True:
        return manifest
    facts = {**own, OWN_PATCH: _write_patch(run_dir, scrubber)}
    code = {**manifest.sections[SECTION], OURSELVES.section: facts}
    return dataclasses.replace(manifest, sections={**manifest.sections, SECTION: code})


def _write_patch(run_dir: RunDir, scrubber: Scrubber) -> Fact:
    patch = make_patch(Path(rlk_repro.__file__).parent, CONTEXT)
    if isinstance(patch, Unknown):
        return patch
    if not patch:
        return Unknown("no patch, because no changed file belongs to the package")
    if len(patch) > MAX_BYTES:
        return Unknown(f"the patch is larger than {MAX_BYTES >> 20} MiB")
    if _BINARY in patch:
        return Unknown("the changes include binary files, which may hide secrets")
    clean = scrubber.bytes(patch)
    write_bytes(run_dir.own_patch, clean)
    return PATCH_IS_WHOLE if clean == patch else PATCH_IS_SCRUBBED
