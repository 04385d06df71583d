"""The record in an image, and what is judged by it: stack, labels, kernels, and what is really there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from rlk_repro import image_check
from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.files import dump_json
from rlk_repro.base.findings import Level
from rlk_repro.images import running
from rlk_repro.images.match import (
    check_kernels,
    check_sources,
    is_recorded,
    match_operators,
    match_running,
    match_stack,
)
from rlk_repro.images.record import Base, ImageRecord, parse_record
from rlk_repro.images.running import load_record, match_image
from rlk_repro.rundir.manifest import Manifest, Unknown
from rlk_repro.spec import Stack
from rlk_repro.spec.load import load_hardware
from tests.support.job_examples import make_example_plan

VIME, KERNEL, MEGATRON = "1" * 40, "2" * 40, "3" * 40
SYMBOLS = ["fused_linear_logp_sm90", "fused_logp", "fused_logp_forward_online_fp32"]
NATIVE = {"logp": "NativeLogpOp", "ratio_kl": "NativeRatioKLOp"}


def make_code(**changed: Any) -> dict[str, Any]:
    clean = {"is_dirty": False, "diff_sha256": "clean", "version": "1"}
    return {
        "packages": {"torch": "2.11.0", "numpy": "1.26.4"},
        "vime": {**clean, "commit": VIME},
        "megatron": {**clean, "commit": MEGATRON, "is_dirty": True, "diff_sha256": "ab"},
        "rl_kernel": {
            **clean,
            "commit": KERNEL,
            "is_compiled": True,
            "extension_sha256": "00",
            "extension_symbols": SYMBOLS,
            "extension_architectures": ["sm_100", "sm_80", "sm_90", "sm_90a"],
        },
        "rlk_repro": {"version": "0.1.0", "commit": Unknown("its folder is not a git checkout")},
        **changed,
    }


def make_record(**changed: Any) -> ImageRecord:
    values: dict[str, Any] = {
        "stack": "test",
        "platform": "cuda-amd64",
        "base": Base(reference="registry.example/vime", digest=f"sha256:{'0' * 64}"),
        "commits": {"vime": VIME, "rl_kernel": KERNEL, "megatron_lm": MEGATRON, "rlk_repro": "4" * 40},
        "code": make_code(),
        "build": {},
    }
    return ImageRecord(**(values | changed))


def make_stack(**pins: str) -> Stack:
    known = {"vime": VIME, "rl_kernel": KERNEL, "megatron_lm": MEGATRON} | pins
    image = {"reference": "registry.example/x", "digest": f"sha256:{'5' * 64}"}
    return Stack.model_validate(
        {"stack": "test", "purpose": "A test.", "images": {"cuda-amd64": image},
         "pins": {name: {"repository": "https://git.example/r", "commit": commit} for name, commit in known.items()}}
    )  # fmt: skip


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"schema": 1}', b"\xff", b"[" * 100_000])
def test_an_invalid_record_is_refused(data: bytes) -> None:
    with pytest.raises(BundleUnreadable):
        parse_record(data)


def test_an_edit_is_noticed() -> None:
    record = make_record()
    value = record.to_json()
    assert parse_record(dump_json(value)) == record
    value["commits"]["vime"] = "9" * 40
    with pytest.raises(BundleUnreadable, match="was edited since it was written"):
        parse_record(json.dumps(value).encode())


def test_a_whole_image_has_no_findings_and_another_stack_is_named() -> None:
    record = make_record()
    assert list(match_stack(record, make_stack(), "cuda-amd64")) == []
    assert list(match_stack(record, make_stack(), "cpu")) == [], "without GPUs any of our images serves"
    found = match_stack(make_record(stack="other"), make_stack(vime="8" * 40), "cuda-arm64")
    assert [finding.where for finding in found] == ["image.stack", "image.platform", "image.commits.vime"]
    assert [*check_kernels(record), *check_sources(record), *match_running(record, make_code())] == []


@pytest.mark.parametrize(
    ("facts", "where"),
    [
        ({"is_compiled": False}, "rl_engine._C"),
        ({"extension_symbols": ["fused_logp"]}, "rl_engine._C symbols"),
        ({"extension_architectures": ["sm_90a"]}, "rl_engine._C architectures"),
        ({"extension_architectures": Unknown("cuobjdump is not on PATH")}, "rl_engine._C architectures"),
    ],
)
def test_missing_or_foreign_kernels_are_found(facts: dict[str, Any], where: str) -> None:
    code = make_code()
    code["rl_kernel"] |= facts
    assert [finding.where for finding in check_kernels(make_record(code=code))] == [where]
    assert list(check_kernels(make_record(code=code, platform="rocm-amd64"))) == []


def test_sources_are_their_commits_and_only_megatron_is_patched() -> None:
    code = make_code()
    code["vime"] |= {"is_dirty": True}
    code["rl_kernel"] |= {"commit": "9" * 40}
    found = [finding.where for finding in check_sources(make_record(code=code))]
    assert found == ["code.vime.is_dirty", "code.rl_kernel.commit"]


def test_changes_after_the_build_are_found() -> None:
    now = make_code(packages={"torch": "2.12.0", "flash-attn": "2.8.3"}, rlk_repro={"version": "0.2.0"})
    now["megatron"] |= {"diff_sha256": "cd"}
    found = [(finding.level, finding.where) for finding in match_running(make_record(), now)]
    assert found == [
        (Level.BLOCKING, "packages.flash-attn"),
        (Level.BLOCKING, "packages.numpy"),
        (Level.BLOCKING, "packages.torch"),
        (Level.BLOCKING, "code.megatron.diff_sha256"),
        (Level.WARNING, "code.rlk_repro.version"),
    ]


@pytest.mark.parametrize(
    ("platform", "error", "logp", "found"),
    [
        ("cuda", "", "FusedLogpGenericOp", []),
        ("cpu", "", "NativeLogpOp", []),
        ("cuda", "libcuda.so.1", "NativeLogpOp", ["blocking rl_engine._C", "blocking operators.logp"]),
        ("rocm", "", "NativeLogpOp", ["blocking operators.platform"]),
        ("cpu", "libcuda.so.1: cannot open", "NativeLogpOp", ["info rl_engine._C"]),
        ("cpu", "undefined symbol", "NativeLogpOp", ["blocking rl_engine._C"]),
    ],
)
def test_operators_are_those_of_the_platform(platform: str, error: str, logp: str, found: list[str]) -> None:
    record = make_record()
    answer = {"platform": platform, "extension_error": error, "operators": {"logp": logp}}
    findings = match_operators(record.gpu_platform, record.commits["rl_kernel"], answer)
    assert [f"{finding.level} {finding.where}" for finding in findings] == found


def test_a_patch_counts_as_pinned_only_as_the_image_recorded_it() -> None:
    record, facts = make_record(), make_code()["megatron"]
    assert is_recorded(record, "megatron", facts)
    assert not is_recorded(record, "megatron", facts | {"diff_sha256": "else"})
    assert not is_recorded(None, "megatron", facts)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "opt/rlk-repro"
    folder.mkdir(parents=True)
    (folder / "provenance.json").write_bytes(dump_json(make_record().to_json()))
    return tmp_path


def test_at_a_jobs_start(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"platform": "cpu", "extension_error": "", "operators": NATIVE}
    monkeypatch.setattr(running, "ask_registry", lambda: answer)
    assert running.check_running(make_code(), make_stack(), "cuda-amd64", root=root) == []
    assert running.check_running(make_code(), None, None, root=tmp_path / "none") == []
    (missing,) = running.check_running(make_code(), None, None, root=tmp_path / "none", is_required=True)
    assert (missing.level, missing.where) == (Level.BLOCKING, "/opt/rlk-repro/provenance.json")
    monkeypatch.setattr(running, "ask_registry", lambda: Unknown("No module named 'rl_engine'"))
    (unanswered,) = running.check_running(make_code(), make_stack(), "cuda-amd64", root=root)
    assert (unanswered.where, unanswered.found) == ("rl_engine", "No module named 'rl_engine'")
    (root / "opt/rlk-repro/provenance.json").write_text("{}")
    (broken,) = running.check_running(make_code(), None, None, root=root)
    assert broken.level is Level.BLOCKING


def test_an_environments_bad_record_is_named_by_its_own_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    (tmp_path / "lock.txt").touch()
    path = tmp_path / "provenance.json"
    path.write_text("{}")
    for _ in range(2):
        (finding,) = running.check_running(make_code(), None, None, is_required=True)
        assert finding.where == str(path)
        path.unlink(missing_ok=True)


def test_a_job_in_a_container_needs_the_stacks_image_where_there_are_gpus(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {"platform": "cpu", "extension_error": "", "operators": NATIVE}
    monkeypatch.setattr(running, "ask_registry", lambda: answer)
    hardware = load_hardware("h200").model
    made, _ = make_example_plan()
    plan = dataclasses.replace(made, hardware=hardware, stack=make_stack(vime="8" * 40))
    manifest = Manifest(node="n", sections={"code": make_code(), "container": {"is_container": True}})
    assert [finding.where for finding in match_image(plan, manifest, root)] == ["image.commits.vime"]
    (missing,) = match_image(plan, manifest, tmp_path / "none")
    assert (missing.level, missing.expected) == (Level.BLOCKING, "the record of an image that rlk-repro built")
    outside = Manifest(node="n", sections={"code": make_code(), "container": {"is_container": False}})
    assert match_image(plan, outside, tmp_path / "none") == []
    locked = plan.stack.model_copy(update={"locks": {"cuda-amd64": f"sha256:{'1' * 64}"}})
    (unrecorded,) = match_image(dataclasses.replace(plan, stack=locked), outside, tmp_path / "none")
    assert (unrecorded.level, unrecorded.where) == (Level.BLOCKING, "/opt/rlk-repro/provenance.json")
    assert load_record(root) == make_record()
    assert load_record(tmp_path / "none") is None


def test_the_check_has_exit_code_3_outside_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_check, "read_record", lambda: Unknown("no such file"))
    assert image_check.main([]) == 3
