"""Stacks: the shipped ones are whole, what does not belong together is refused, no image runs that nobody built."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_repro.base.errors import SpecError
from rlk_repro.base.resources import list_names, stack_folders
from rlk_repro.images.build import CONTEXT
from rlk_repro.spec import Image, Pin, Stack
from rlk_repro.spec.load import load_stack
from rlk_repro.spec.stack import stack_problems
from tests import ROOT
from tests.support import copied_package

ALL = list_names(stack_folders())


@pytest.mark.parametrize("name", ALL)
def test_every_shipped_stack_loads_and_is_named_like_its_file(name: str) -> None:
    assert load_stack(name).model.stack == name


@pytest.mark.parametrize("name", [name for name in ALL if name != "example"])
def test_no_shipped_stack_has_a_digest_that_only_an_example_has(name: str) -> None:
    example = load_stack("example").model
    stack = load_stack(name).model
    digests = {image.digest for image in stack.images.values()} | {base.digest for base in stack.bases.values()}
    assert not digests & {image.digest for image in example.images.values()}


def test_every_pin_and_component_of_a_release_has_a_confidence() -> None:
    stack = load_stack("2026-07").model
    assert all(pin.confidence and pin.evidence for pin in stack.pins.values())
    assert {"vllm", "flash-attention", "apex", "mbridge", "torch-memory-saver"} <= stack.components.keys()
    assert {"ray", "torch", "transformer-engine", "apt"} <= stack.moving.keys()
    assert stack.images == {}
    assert set(stack.unpublished) == {"cuda-amd64", "cuda-arm64", "rocm-amd64"}


def test_a_stack_is_held_to_the_contract_of_its_vime(tmp_path: Path) -> None:
    shipped = (stack_folders()[0] / "2026-07.yaml").read_text()
    path = tmp_path / "2026-07.yaml"
    path.write_text(shipped.replace("1dcf0dafa884ad52", "1dcf0dafa884ad53").replace("9296463a", "9296463b"))
    with pytest.raises(SpecError) as caught:
        load_stack(str(path))
    problems = [(item.where.partition(": ")[2], item.what) for item in caught.value.problems]
    what = "differs from the value recorded in vime-1fc199d9d57eb9d9e66d337cce406c27e7bd916f.json"
    assert problems == [("pins.megatron_lm.commit", what), ("components.megatron-patch.sha256", what)]


def test_an_image_with_another_vime_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mixed.yaml"
    path.write_text(
        "schema: 1\nstack: mixed\npurpose: x\n"
        f"images:\n  cuda-amd64: {{reference: x, digest: 'sha256:{'0' * 64}', vime: {'a' * 40}}}\n"
        f"pins:\n  vime: {{repository: https://git.example/x, commit: {'b' * 40}}}\n"
    )
    with pytest.raises(SpecError) as caught:
        load_stack(str(path))
    assert str(caught.value) == (
        f"{path}:5: images.cuda-amd64.vime: differs from the vime that the stack pins, got '{'a' * 40}', "
        f"expected {'b' * 40}"
    )


def test_submit_refuses_an_unpublished_image_and_says_how_to_build_it(
    call: Callable[..., tuple[int, str, str]],
) -> None:
    words = ("submit", "--cluster", "local", "--run", "smoke", "--stack", "2026-07", "--hardware", "h200")
    code, _, error = call(*words)
    assert code == 2
    assert error == (
        "rlk-repro: stack 2026-07: cuda-amd64: its image is not published (its build was tested only with a "
        "small test image in place of vime's image), expected an image by digest, or a stack without images, such as "
        "--stack vime-host\n"
        "  hint: rlk-repro images build --stack 2026-07 --platform cuda-amd64\n"
    )
    code, out, _ = call(*words, "--dry-run")
    assert code == 0
    assert "image            not published" in out


def test_published_and_not_published_exclude_each_other() -> None:
    image = Image(reference="x", digest=f"sha256:{'0' * 64}")
    pins = {"vime": Pin(repository="https://git.example/x", commit="2" * 40)}
    stack = Stack.model_validate(
        {
            "stack": "both",
            "purpose": "x",
            "images": {"cpu": image.model_dump()},
            "pins": {name: pin.model_dump() for name, pin in pins.items()},
            "unpublished": {"cpu": {"build": "make it", "reason": "nobody did"}},
            "components": {"ray": {"confidence": "certain", "evidence": "x"}},
        }
    )
    assert [what for _, what, _, _ in stack_problems(stack)] == [
        "is listed under images as well",
        "has no commit and no version",
    ]


# Every list of what is shipped names the same: the wheel, the image's build, its context and its Dockerfiles.


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
