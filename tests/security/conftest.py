"""Fixtures: a process in whose forks commands run, and an honest run from which hostile runs are made."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlk_repro.rundir.paths import RunDir
from tests.security.hostile import make_honest
from tests.security.sandbox import Sandbox


@pytest.fixture(scope="session")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    box = Sandbox(tmp_path_factory.mktemp("sandbox").resolve())
    yield box
    box.close()


@pytest.fixture(scope="session")
def honest(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_honest(tmp_path_factory.mktemp("honest"))


@pytest.fixture
def case(sandbox: Sandbox, tmp_path: Path) -> Path:
    """Make a new folder inside the sandbox."""
    folder = sandbox.scratch / tmp_path.name
    folder.mkdir()
    return folder
