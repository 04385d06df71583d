"""Locks of stacks: everything by version and hash, both processors alike, and one changed character is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlk_repro.base.errors import SpecError
from rlk_repro.base.files import sha256_bytes
from rlk_repro.images import lock
from rlk_repro.images.lock import Locked, parse_lock, read_lock
from rlk_repro.images.stacks import get_stack
from rlk_repro.spec import ImagePlatform

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
