"""Keys that were added after plans had been recorded do not change the hashes of those plans."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from rlk_repro.plan import Plan
from rlk_repro.spec import Hardware, Image, Measure, Pin, Preflight, Profile, Stack
from rlk_repro.spec.values import GrowingModel
from tests import ROOT

EVIDENCE = sorted((ROOT / "docs" / "evidence").glob("*.tgz"))


def test_a_key_that_came_later_is_left_out_while_it_has_its_default() -> None:
    old = {"min_free_disk_gib": 1.0, "min_free_memory_gib": 1.0, "on_blocking": "stop"}
    assert Preflight().model_dump(mode="json") == old
    assert Preflight(policy={"load": "fail"}).model_dump(mode="json") == {**old, "policy": {"load": "fail"}}


@pytest.mark.parametrize("model", [Preflight, Measure, Hardware, Profile, Stack, Pin, Image])
def test_added_later_names_only_existing_keys(model: type[GrowingModel]) -> None:
    assert model.added_later <= model.model_fields.keys()


@pytest.mark.parametrize("bundle", EVIDENCE, ids=lambda path: path.name)
def test_older_plans_keep_their_hashes(bundle: Path) -> None:
    with tarfile.open(bundle) as archive:
        name = next(name for name in archive.getnames() if name.endswith("plan.json"))
        stream = archive.extractfile(name)
        assert stream is not None
        record = json.load(stream)
    assert Plan.from_json(record).plan_hash == record["plan_hash"]
