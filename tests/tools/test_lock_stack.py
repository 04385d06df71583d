"""Of a package's wheels the one that pip would take is locked; a package without one is named."""

from __future__ import annotations

from typing import Any

import pytest

from rlk_repro.base.errors import CheckFailed
from tools.lock_stack import render


def _package(name: str, *tags: str) -> dict[str, Any]:
    wheels = [
        {"url": f"https://x.example/{name}-1.0-{tag}.whl", "size": number, "hashes": {"sha256": f"{number:064x}"}}
        for number, tag in enumerate(tags)
    ]
    return {"name": name, "version": "1.0", "wheels": wheels}


@pytest.mark.parametrize(("machine", "wanted"), [("x86_64", 2), ("aarch64", 3)])
def test_the_most_specific_wheel_is_locked(machine: str, wanted: int) -> None:
    tags = ("py3-none-any", "cp312-cp312-manylinux_2_39_x86_64", "cp312-cp312-manylinux_2_28_x86_64",
            "cp312-cp312-manylinux2014_aarch64")  # fmt: skip
    line = render([_package("x", *tags)], machine).splitlines()[1]
    assert line == f"x==1.0 --hash=sha256:{wanted:064x}  # {wanted}"


def test_packages_without_a_wheel_are_named() -> None:
    with pytest.raises(CheckFailed) as caught:
        render([_package("x", "cp312-cp312-win_amd64"), _package("y", "py3-none-any"), _package("z")], "x86_64")
    assert [problem.where for problem in caught.value.problems] == ["x", "z"]
