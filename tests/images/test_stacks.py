"""Stacks: the shipped ones are whole, what does not belong together is refused, no image runs that nobody built."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from rlk_repro.base.errors import SpecError
from rlk_repro.base.files import sha256_bytes
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.resources import list_names, stack_folders
from rlk_repro.images import stacks
from rlk_repro.images.build import CONTEXT
from rlk_repro.images.running import match_pins
from rlk_repro.images.stacks import get_stack, lock_path, read_lock
from rlk_repro.probes import code
from rlk_repro.rundir.manifest import Fact, Manifest, Unknown
from rlk_repro.sources import SECTIONS
from rlk_repro.spec import ImagePlatform, Stack
from rlk_repro.spec.load import load_stack
from rlk_repro.spec.stack import stack_problems
from tests import ROOT
from tests.support import copied_package

ALL = list_names(stack_folders())


def test_no_shipped_stack_has_a_digest_that_only_an_example_has() -> None:
    example = {image.digest for image in load_stack("example").model.images.values()}
    for name in set(ALL) - {"example"}:
        stack = load_stack(name).model
        found = {image.digest for image in stack.images.values()}
        assert not example & (found | {base.digest for base in stack.bases.values()})


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
    assert error.startswith("rlk-repro: stack 2026-07: cuda-amd64: its image is not published (")
    assert error.endswith("\n  hint: rlk-repro images build --stack 2026-07 --platform cuda-amd64\n")
    code, out, _ = call(*words, "--dry-run")
    assert (code, "image            not published" in out) == (0, True)


def test_published_and_not_published_exclude_each_other() -> None:
    image = {"reference": "x", "digest": f"sha256:{'0' * 64}"}
    stack = Stack.model_validate(
        {
            "stack": "both",
            "purpose": "x",
            "images": {"cpu": image},
            "pins": {"vime": {"repository": "https://git.example/x", "commit": "2" * 40}},
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


# Folders of a checkout that a wheel lacks, in the texts that the package prints.
ELSEWHERE = re.compile(r"(?:docs|tests|tools|docker|benchmarks)/[\w./*-]+|python -m (?:tools|tests|benchmarks)\.\w+")


def test_no_text_of_an_installed_wheel_names_a_file_that_the_wheel_lacks(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    named = []
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith(".py"):
                continue
            nodes = list(ast.walk(ast.parse(archive.read(name))))
            notes = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            named += [
                f"{name}: {node.value}" for node in nodes
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in notes
                and ELSEWHERE.search(node.value)
            ]  # fmt: skip
        metadata = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        assert "Requires-Dist: pydantic>=2.8\n" in archive.read(metadata).decode()
    assert named == []


def test_the_build_context_holds_the_files_of_the_wheel() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    assert {line[1:] for line in lines if line.startswith("!")} == set(CONTEXT)
    assert set(WHEEL["only-include"]) < set(CONTEXT)
    lines = (ROOT / "docker" / "Dockerfile.vime").read_text().splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    assert {name for names in copied for name in names} == set(CONTEXT)


# A node has the sources that the stack pins, or a finding says which it has.


COMMIT, OTHER, TREE, PATCHED = ("1" * 40, "2" * 40, "3" * 40, "5" * 40)
WAY_OUT = ", pinned by stack pinned; --stack host uses what is installed"
NO_COMMIT = Unknown("no checkout")


def make_pinned(**trees: str) -> Stack:
    pin = {"repository": "https://git.example/x", "commit": COMMIT, **trees}
    return Stack.model_validate({"stack": "pinned", "purpose": "x", "pins": {"megatron_lm": pin}})


WITHOUT_TREES = make_pinned()
WITH_TREES = make_pinned(tree=TREE, patched_tree=PATCHED)


@pytest.mark.parametrize(
    ("stack", "facts", "fact", "expected", "found"),
    [
        (WITHOUT_TREES, {"commit": COMMIT, "is_dirty": NO_COMMIT}, "", "", ""),
        (WITHOUT_TREES, {"commit": COMMIT, "is_dirty": True}, "is_dirty", f"{COMMIT} unchanged", "changed files"),
        (WITHOUT_TREES, {"commit": OTHER}, "commit", f"{COMMIT}{WAY_OUT}", OTHER),
        (WITHOUT_TREES, {}, "commit", f"{COMMIT}{WAY_OUT}", "unknown (not recorded)"),
        # an archive of the pinned tree is the pinned commit
        (WITH_TREES, {"commit": NO_COMMIT, "tree": TREE}, "", "", ""),
        (WITH_TREES, {"commit": NO_COMMIT, "tree": "4" * 40}, "tree",
         f"{TREE} (the files of {COMMIT[:12]}){WAY_OUT}", "4" * 40),
        (WITH_TREES, {"commit": NO_COMMIT, "tree": Unknown("installed")}, "commit",
         f"{COMMIT}{WAY_OUT}", "unknown (no checkout)"),
        (WITH_TREES, {"commit": OTHER, "tree": TREE}, "commit", f"{COMMIT}{WAY_OUT}", OTHER),
        (WITH_TREES, {"commit": NO_COMMIT, "tree": TREE, "is_dirty": True}, "is_dirty",
         f"{COMMIT} unchanged", "changed files"),
        (WITH_TREES, {"commit": NO_COMMIT, "tree": PATCHED}, "", "", ""),
        (WITH_TREES, {"commit": COMMIT, "tree": PATCHED, "is_dirty": True}, "", "", ""),
        (WITH_TREES, {"commit": OTHER, "tree": PATCHED}, "commit", f"{COMMIT}{WAY_OUT}", OTHER),
    ],
)  # fmt: skip
def test_a_pin_that_is_not_confirmed_blocks(
    stack: Stack, facts: dict[str, Fact], fact: str, expected: str, found: str
) -> None:
    manifest = Manifest(node="n", sections={"code": {"megatron": facts}})
    blocking = [Finding(Level.BLOCKING, f"code.megatron.{fact}", expected, found)] if fact else []
    assert list(match_pins(stack, manifest)) == blocking


@pytest.mark.parametrize(("tree", "is_taken"), [(TREE, False), (PATCHED, True)])
def test_a_run_that_needs_the_patch_takes_no_unpatched_sources(tree: str, is_taken: bool) -> None:
    manifest = Manifest(node="n", sections={"code": {"megatron": {"commit": NO_COMMIT, "tree": tree}}})
    told, without = f"{PATCHED} (with upstream's patch)", f"{tree} (without this patch)"
    expected = Finding(Level.BLOCKING, "code.megatron.tree", told, without)
    found = list(match_pins(WITH_TREES, manifest, patched=frozenset({"megatron_lm"})))
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


def test_the_lock_is_the_one_that_the_stack_names_and_equal_for_both_processors() -> None:
    locked, other = (read_lock(get_stack(STACK), platform) for platform in PLATFORMS)
    assert locked == other == locked | RAN
    assert locked["protobuf"].partition(".")[0] == "6"  # wandb breaks with 7
    assert locked["nvidia-cuda-nvcc"].startswith("13.0.")


def test_nothing_of_the_stack_is_without_hash_or_commit() -> None:
    stack = get_stack(STACK)
    assert stack.moving == {}
    assert set(stack.locks) == set(stack.bases) == set(PLATFORMS)
    assert all(base.digest for base in stack.bases.values())
    assert set(stack.pins) == {"vime", "megatron_lm", "rl_kernel"}
    assert all(pin.commit and pin.tree for pin in stack.pins.values())
    assert all(item.sha256 for item in stack.components.values())
    for platform in PLATFORMS:
        text = lock_path(STACK, platform).read_text()
        assert text.count("--hash=sha256:") == len(text.splitlines()) - 1
        assert "://" not in text


def test_one_changed_hash_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "FOLDER", tmp_path)
    stack, path = get_stack(STACK), lock_path(STACK, "cuda-amd64")
    path.write_text("# x\ntorch==2.11.0 --hash=sha256:" + "0" * 64 + "  # 1\n")
    with pytest.raises(SpecError) as caught:
        read_lock(stack, "cuda-amd64")
    (problem,) = caught.value.problems
    assert problem.where == "requirements/2026-11-cuda-amd64.txt"
    assert problem.got == f"sha256:{sha256_bytes(path.read_bytes())}"
    assert problem.expected == stack.locks["cuda-amd64"]
