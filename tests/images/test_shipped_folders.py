"""Every list of what is shipped names the same: the wheel, the image's build, its context and its Dockerfiles."""

import re
import tomllib

import pytest

from rlk_repro.images.build import CONTEXT
from tests import ROOT
from tests.support import copied_package

TEXT = (ROOT / "pyproject.toml").read_text()
WHEEL = tomllib.loads(TEXT)["tool"]["hatch"]["build"]["targets"]["wheel"]


def test_the_wheel_has_every_data_folder_that_the_package_reads() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "rlk_repro").rglob("*.py"))
    read = set(re.findall(r'data_dir\("([a-z0-9]+)"\)', sources))
    assert read == WHEEL["sources"].keys()
    assert set(WHEEL["only-include"]) == {"rlk_repro", *WHEEL["sources"]}
    assert set(WHEEL["only-include"]) <= set(copied_package.FOLDERS)


def test_the_build_context_holds_the_files_of_the_wheel() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    assert {line[1:] for line in lines if line.startswith("!")} == set(CONTEXT)
    assert set(WHEEL["only-include"]) < set(CONTEXT)


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_a_dockerfile_copies_files_of_the_build_context(platform: str) -> None:
    lines = (ROOT / "docker" / f"Dockerfile.{platform}").read_text().splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    assert {name for names in copied for name in names} == set(CONTEXT)
