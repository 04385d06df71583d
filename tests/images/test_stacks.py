"""Stacks: the shipped ones are whole, what does not belong together is refused, no image runs that nobody built."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from rlk_repro.base.errors import SpecError
from rlk_repro.base.files import sha256_bytes
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.resources import list_names, stack_folders
from rlk_repro.images import lock
from rlk_repro.images.build import CONTEXT
from rlk_repro.images.lock import Locked, parse_lock, read_lock
from rlk_repro.images.pins import match_pins
from rlk_repro.images.stacks import get_stack
from rlk_repro.probes import code
from rlk_repro.rundir.manifest import Fact, Manifest, Unknown
from rlk_repro.sources import SECTIONS
from rlk_repro.spec import Image, ImagePlatform, Pin, Stack
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


# A node has the sources that the stack pins, or a finding says which it has.


PINNED = Stack(
    stack="pinned", purpose="x", pins={"megatron_lm": Pin(repository="https://git.example/x", commit="1" * 40)}
)
WAY_OUT = ", pinned by stack pinned; --stack host uses what is installed"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ({"megatron": {"commit": "1" * 40, "is_dirty": False}}, None),
        ({"megatron": {"commit": "1" * 40, "is_dirty": Unknown("no checkout")}}, None),
        ({"megatron": {"commit": "1" * 40, "is_dirty": True}}, ("is_dirty", f"{'1' * 40} unchanged", "changed files")),
        ({"megatron": {"commit": "2" * 40}}, ("commit", f"{'1' * 40}{WAY_OUT}", "2" * 40)),
        ({"megatron": {"commit": Unknown("absent")}}, ("commit", f"{'1' * 40}{WAY_OUT}", "unknown (absent)")),
        ({}, ("commit", f"{'1' * 40}{WAY_OUT}", "unknown (not recorded)")),
    ],
)
def test_a_pin_that_is_not_confirmed_blocks(code: dict[str, Fact], expected: tuple[str, str, str] | None) -> None:
    found = list(match_pins(PINNED, Manifest(node="n", sections={"code": code})))
    assert found == ([] if expected is None else
                     [Finding(Level.BLOCKING, f"code.megatron.{expected[0]}", expected[1], expected[2])])  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"commit": Unknown("no checkout"), "tree": "3" * 40}, None),
        (
            {"commit": Unknown("no checkout"), "tree": "4" * 40},
            ("tree", f"{'3' * 40} (the files of {'1' * 12}){WAY_OUT}", "4" * 40),
        ),
        (
            {"commit": Unknown("no checkout"), "tree": Unknown("installed")},
            ("commit", f"{'1' * 40}{WAY_OUT}", "unknown (no checkout)"),
        ),
        ({"commit": "2" * 40, "tree": "3" * 40}, ("commit", f"{'1' * 40}{WAY_OUT}", "2" * 40)),
        (
            {"commit": Unknown("none recorded"), "tree": "3" * 40, "is_dirty": True},
            ("is_dirty", f"{'1' * 40} unchanged", "changed files"),
        ),
        ({"commit": Unknown("no checkout"), "tree": "5" * 40}, None),
        ({"commit": "1" * 40, "tree": "5" * 40, "is_dirty": True}, None),
        ({"commit": "2" * 40, "tree": "5" * 40}, ("commit", f"{'1' * 40}{WAY_OUT}", "2" * 40)),
    ],
)
def test_an_archive_of_the_pinned_tree_is_the_pinned_commit(
    facts: dict[str, Fact], expected: tuple[str, str, str] | None
) -> None:
    pin = PINNED.pins["megatron_lm"].model_copy(update={"tree": "3" * 40, "patched_tree": "5" * 40})
    stack = PINNED.model_copy(update={"pins": {"megatron_lm": pin}})
    found = list(match_pins(stack, Manifest(node="n", sections={"code": {"megatron": facts}})))
    assert found == ([] if expected is None else
                     [Finding(Level.BLOCKING, f"code.megatron.{expected[0]}", expected[1], expected[2])])  # fmt: skip


@pytest.mark.parametrize(("tree", "is_taken"), [("3" * 40, False), ("5" * 40, True)])
def test_a_run_that_needs_the_patch_takes_no_unpatched_sources(tree: str, is_taken: bool) -> None:
    pin = PINNED.pins["megatron_lm"].model_copy(update={"tree": "3" * 40, "patched_tree": "5" * 40})
    stack = PINNED.model_copy(update={"pins": {"megatron_lm": pin}})
    facts: dict[str, Fact] = {"commit": Unknown("no checkout"), "tree": tree}
    manifest = Manifest(node="n", sections={"code": {"megatron": facts}})
    told, without = f"{'5' * 40} (with upstream's patch)", f"{tree} (without this patch)"
    expected = Finding(Level.BLOCKING, "code.megatron.tree", told, without)
    found = list(match_pins(stack, manifest, patched=frozenset({"megatron_lm"})))
    assert found == ([] if is_taken else [expected])


def test_every_pin_of_a_stack_is_a_source_that_manifests_describe() -> None:
    pins = get_args(get_args(Stack.model_fields["pins"].annotation)[0])
    assert set(pins) == set(SECTIONS)
    assert set(SECTIONS.values()) <= code.probe().keys()


# Locks of stacks: everything by version and hash, both processors alike, and one changed character is found.


STACK = "2026-11"
PLATFORMS: tuple[ImagePlatform, ...] = ("cuda-amd64", "cuda-arm64")
# what a trial imports, at the versions that ran
RAN = {
    "torch": "2.11.0",
    "vllm": "0.25.1",
    "transformer-engine-cu13": "2.12.0",
    "ray": "2.60.0",
    "vllm-router": "0.1.17",
    "torch-memory-saver": "0.0.10",
    "mbridge": "0.15.1",
    "numpy": "1.26.4",
    "wandb": "0.24.2",
}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_lock_is_the_one_that_the_stack_names(platform: ImagePlatform) -> None:
    locked = {item.name: item.version for item in read_lock(get_stack(STACK), platform)}
    assert locked | RAN == locked
    assert locked["protobuf"].partition(".")[0] == "6"  # wandb breaks with 7
    assert locked["nvidia-cuda-nvcc"].startswith("13.0.")


def test_both_processors_get_the_same_versions() -> None:
    one, other = ([(item.name, item.version) for item in read_lock(get_stack(STACK), name)] for name in PLATFORMS)
    assert one == other


def test_nothing_of_the_stack_is_without_hash_or_commit() -> None:
    stack = get_stack(STACK)
    assert stack.moving == {}
    assert set(stack.locks) == set(stack.bases) == set(PLATFORMS)
    assert all(base.digest for base in stack.bases.values())
    assert set(stack.pins) == {"vime", "megatron_lm", "rl_kernel"}
    assert all(pin.commit and pin.tree for pin in stack.pins.values())
    assert all(item.sha256 for item in stack.components.values())
    for platform in PLATFORMS:
        text = lock.lock_path(STACK, platform).read_text()
        assert text.count("--hash=sha256:") == len(text.splitlines()) - 1
        assert "://" not in text


def test_one_changed_hash_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "FOLDER", tmp_path)
    stack, path = get_stack(STACK), lock.lock_path(STACK, "cuda-amd64")
    path.write_text("# x\ntorch==2.11.0 --hash=sha256:" + "0" * 64 + "  # 1\n")
    with pytest.raises(SpecError) as caught:
        read_lock(stack, "cuda-amd64")
    (problem,) = caught.value.problems
    assert problem.where == "requirements/2026-11-cuda-amd64.txt"
    assert problem.got == f"sha256:{sha256_bytes(path.read_bytes())}"
    assert problem.expected == stack.locks["cuda-amd64"]


@pytest.mark.parametrize(
    "line",
    ["torch==2.11.0", "torch --hash=sha256:" + "0" * 64 + "  # 1", "torch @ https://example.org/torch.whl", "-e .",
     "--index-url https://example.org"],
)  # fmt: skip
def test_a_line_without_version_and_hash_is_refused_by_its_number(line: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_lock(f"# head\n{line}\n", "x.txt")
    assert [problem.where for problem in caught.value.problems] == ["x.txt:2"]


def test_a_line_is_read_as_it_was_written() -> None:
    written = Locked("torch", "2.11.0+cu130", "a" * 64, 530)
    assert parse_lock(f"{written}\n", "x.txt") == [written]
