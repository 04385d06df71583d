"""Which generation of RL-Kernel is taken, and the version that a decision names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.integration.route import rl_kernel
from rlk_repro.integration.route.rl_kernel import LoadedOperator, load_operator
from tests import SUPPORT
from tests.support.rl_kernel_path import importing_from


@pytest.fixture(autouse=True)
def packages(tmp_path: Path) -> Iterator[Path]:
    """The folder from which this process imports RL-Kernel."""
    folder = tmp_path / "packages"
    folder.mkdir()
    with importing_from(folder):
        yield folder


@pytest.mark.parametrize("generation", ["kernels", "runtime"])
def test_the_newest_registry_that_is_there_is_asked(packages: Path, generation: str) -> None:
    package = packages / "rl_engine"
    shutil.copytree(SUPPORT / "fake_rl_engine/rl_engine", package)
    if generation == "runtime":
        (package / "runtime").mkdir()
        (package / "runtime/registry.py").write_text("from rl_engine.kernels.registry import kernel_registry\n")
    for name, class_name in [("logp", "NativeLogpOp"), ("ratio_kl", "NativeRatioKLOp")]:
        found = load_operator(name, "cpu")
        assert isinstance(found, LoadedOperator)
        assert (found.implementation, found.version) == (class_name, f"unversioned (rl_engine.{generation}.registry)")


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"rlk_repro_build.json": {"commit": "036450b82b551dd7"}}, "0.1.0 at 036450b82b55"),
        ({"direct_url.json": {"vcs_info": {"commit_id": "202f0e30e56729d1"}}}, "0.1.0 at 202f0e30e567"),
        ({"direct_url.json": {"dir_info": {}}, "rlk_repro_build.json": {"commit": None}}, "0.1.0"),
        ({}, "0.1.0"),
    ],
)
def test_a_version_names_the_commit_where_its_installation_did(
    packages: Path, record: dict[str, Any], expected: str
) -> None:
    folder = packages / "rl_kernel-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: RL-Kernel\nVersion: 0.1.0\n")
    for name, value in record.items():
        (folder / name).write_text(json.dumps(value))
    assert rl_kernel.find_version() == expected
