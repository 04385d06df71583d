"""A node has the sources that the stack pins, or a finding says which it has."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from rlk_repro.base.errors import SpecError
from rlk_repro.base.files import sha256_bytes
from rlk_repro.base.findings import Finding, Level
from rlk_repro.images import lock
from rlk_repro.images.lock import Locked, parse_lock, read_lock
from rlk_repro.images.pins import match_pins
from rlk_repro.images.stacks import get_stack
from rlk_repro.probes import code
from rlk_repro.rundir.manifest import Fact, Manifest, Unknown
from rlk_repro.sources import SECTIONS
from rlk_repro.spec import ImagePlatform, Pin, Stack

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
