"""``rlk-repro images`` and the steps of a build, without engine and registry; those are in test_images_build."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlk_repro.base.errors import CheckFailed, SpecError
from rlk_repro.images import build, stacks
from rlk_repro.images import pin as pinning
from rlk_repro.images.pin import renew
from rlk_repro.spec import Stack
from rlk_repro.spec.load import load_stack
from tests import ROOT
from tests.support.copied_package import mirror_folder
from tests.support.images.examples import commit_files
from tests.support.probe_examples import write_tree
from tools.image_build.gfx import check_gfx
from tools.image_build.inputs import read_inputs
from tools.image_build.nvcc import rewrite
from tools.image_build.package import check_untouched, select_missing

Call = Callable[..., tuple[int, str, str]]
DIGEST = f"sha256:{'ab' * 32}"
ARGUMENTS = {
    "BASE_NAME": "registry.example/vime",
    "BASE_DIGEST": DIGEST,
    "STACK": "test",
    "GPU_PLATFORM": "cuda",
    "REVISION": "1" * 40,
    "SOURCE_DATE_EPOCH": "1767225600",
    "VIME_REPOSITORY": "https://git.example/vime",
    "VIME_COMMIT": "2" * 40,
    "RL_KERNEL_REPOSITORY": "https://git.example/rl-kernel",
    "RL_KERNEL_COMMIT": "3" * 40,
    "RL_KERNEL_ARCHITECTURES": "80 90 100",
}
TEXT = f"""\
# a comment that stays
stack: test
purpose: A test.
unpublished:
  cuda-amd64: {{build: b, reason: r}}
  cuda-arm64:
    build: b
    reason: r
pins:
  vime: {{repository: URL, commit: {"a" * 40}}}  # kept
  rl_kernel:
    repository: URL
    commit: {"b" * 40}
    confidence: likely
    evidence: hearsay
bases:
  cuda-amd64:
    reference: registry.example/vime
    tag: "1"
    confidence: likely
    evidence: here
"""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


def test_whole_arguments_are_taken(machine: None) -> None:
    inputs = read_inputs({**ARGUMENTS, "IMAGE_PLATFORM": "cuda-amd64"})
    assert (inputs.image_platform, inputs.architectures) == ("cuda-amd64", ("80", "90", "100"))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"BASE_DIGEST": "latest"}, "build argument BASE_DIGEST: a tag can move, got 'latest'"),
        ({"VIME_COMMIT": "main"}, "build argument VIME_COMMIT: a branch or a tag can move, got 'main'"),
        ({"RL_KERNEL_COMMIT": "202f0e3"}, "build argument RL_KERNEL_COMMIT: a branch or a tag can move"),
        ({"STACK": ""}, "build argument STACK: missing"),
        ({"IMAGE_PLATFORM": "cuda-arm64"}, "build argument IMAGE_PLATFORM: differs from this machine's"),
        ({"SOURCE_DATE_EPOCH": "yesterday"}, "build argument SOURCE_DATE_EPOCH: no time"),
    ],
)
def test_arguments_that_move_are_refused(machine: None, changed: dict[str, str], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_inputs({**ARGUMENTS, "IMAGE_PLATFORM": "cuda-amd64", **changed})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("source", "flags"),
    [
        ("csrc/ops.cpp", ["-gencode=arch=compute_90a,code=sm_90a"]),
        ("csrc/a.cu", [f"-gencode=arch=compute_{name},code=sm_{name}" for name in ("80", "90", "100")]),
        ("csrc/a_sm90.cu", ["-gencode=arch=compute_90a,code=sm_90a"]),
    ],
)
def test_every_file_is_compiled_for_its_gpus(source: str, flags: list[str]) -> None:
    given = ["-O3", "-gencode=arch=compute_90a,code=sm_90a", "-c", source, "-o", "a.o"]
    found = rewrite(given, ("80", "90", "100"))
    assert [item for item in found if "gencode" in item] == flags
    assert [item for item in found if "gencode" not in item] == ["-O3", "-c", source, "-o", "a.o"]
    assert rewrite(["-gencode", "arch=x", "-arch=sm_70", "-c", "a.cu"], ("80",))[:2] == ["-c", "a.cu"]


def test_only_packages_that_the_base_lacks_are_installed() -> None:
    lock = (ROOT / "requirements/base.txt").read_text()
    wanted = select_missing(lock, {"pydantic", "pydantic-core", "typer", "rich"})
    assert "isal" in wanted
    assert "pydantic" not in wanted
    assert "colorama" not in wanted
    assert all("--hash=sha256:" in entry for entry in wanted.values())
    assert select_missing(lock, {re.split("==", entry)[0] for entry in lock.split("\n") if "==" in entry}) == {}


def test_a_package_of_the_base_that_changed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"torch": "2.12.0", "rlk-repro": "0.1.0", "isal": "1.9.1", "flash-attn": "2.8.3"}
    monkeypatch.setattr("tools.image_build.package.list_packages", lambda: now)
    with pytest.raises(CheckFailed) as caught:
        check_untouched({"torch": "2.11.0", "numpy": "1.26.4"}, ["isal"])
    assert str(caught.value).splitlines() == [
        "package flash-attn: was changed by the build, got '2.8.3', expected absent, as in the base",
        "package numpy: was changed by the build, got None, expected 1.26.4, the version of the base image",
        "package torch: was changed by the build, got '2.12.0', expected 2.11.0, the version of the base image",
    ]


def test_a_base_for_other_amd_gpus_is_refused(tmp_path: Path) -> None:
    for name, gpu in (("lib/rocblas/library", "gfx942"), ("lib/hipblaslt/library", "gfx950")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / f"kernels_{gpu}.co").write_text("")
    with pytest.raises(CheckFailed) as caught:
        check_gfx(None, tmp_path)
    (problem,) = caught.value.problems
    assert (problem.got, problem.expected) == (["gfx950"], "gfx942")


def test_submitting_to_an_unpublished_image_names_the_command(call: Call) -> None:
    code, out, _ = call("images", "list", "2026-07", "--json")
    rows = json.loads(out)["images"]
    assert (code, [row["platform"] for row in rows]) == (0, ["cuda-amd64", "cuda-arm64", "rocm-amd64"])
    code, _, error = call("images", "pull", "--stack", "2026-07", "--platform", "cuda-amd64")
    assert (code, "hint: rlk-repro images build --stack 2026-07 --platform cuda-amd64" in error) == (2, True)
    code, _, error = call("images", "pull", "--stack", "host")
    assert (code, "stack host: has no image for this platform" in error) == (2, True)


def test_what_was_removed_names_its_replacement(call: Call, tmp_path: Path) -> None:
    (tmp_path / "image.tar").touch()
    code, _, error = call("images", "check", str(tmp_path / "image.tar"))
    assert (code, "skopeo copy oci-archive:" in error) == (2, True)


def test_without_options_it_is_the_newest_stack_and_this_machines_platform(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for processor, driver, stack, platform in (
        ("x86_64", tmp_path / "none", "2026-11", "cuda-amd64"),
        ("x86_64", tmp_path, "2026-07", "rocm-amd64"),
        ("aarch64", tmp_path / "none", "2026-11", "cuda-arm64"),
    ):
        hint = f"hint: rlk-repro images build --stack {stack} --platform"
        monkeypatch.setattr("platform.machine", lambda found=processor: found)
        monkeypatch.setattr(stacks, "AMD_DRIVER", driver)
        code, _, error = call("images", "pull")
        assert (code, f"{hint} {platform}" in error) == (2, True), error


def test_the_build_command_holds_the_stacks_pins(call: Call) -> None:
    words = ("images", "build", "--stack", "2026-07", "--platform", "cuda-amd64", "--engine", "docker", "--dry-run")
    code, out, _ = call(*words)
    pins = load_stack("2026-07").model.pins
    assert code == 0
    assert f"--build-arg=VIME_COMMIT={pins['vime'].commit}" in out
    assert f"--build-arg=RL_KERNEL_COMMIT={pins['rl_kernel'].commit}" in out
    code, _, error = call("images", "build", "--stack", "2026-07", "--platform", "rocm-amd64", "--dry-run")
    assert (code, "has no digest, which a build needs, expected --base NAME@sha256:…" in error) == (2, True)
    code, out, _ = call(
        *words[:4], "--platform", "rocm-amd64", "--engine", "podman", "--dry-run", "--base", f"a/b@{DIGEST}"
    )
    assert (code, f"--build-arg=BASE_DIGEST={DIGEST}" in out, "Dockerfile.rocm" in out) == (0, True, True)
    assert call(*words[:4], "--platform", "rocm-amd64", "--dry-run", "--base", "a/b:latest")[0] == 2


def test_a_changed_file_of_the_build_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record names this tool's commit, so a build begins only where the files are the commit's."""
    monkeypatch.setattr(build, "_git", lambda *_: " M requirements/2026-11-cuda-amd64.txt\n?? tools/new.py")
    with pytest.raises(SpecError, match=r"has changed files.* got 'M requirements/2026-11-cuda-amd64\.txt'"):
        build.require_clean()


def test_bake_takes_its_variables_from_the_stack(call: Call) -> None:
    code, out, _ = call("images", "build", "--stack", "2026-07", "--bake")
    given = dict(line.removeprefix("export ").split("=", 1) for line in out.splitlines())
    declared = re.findall(r'^variable "(\w+)"', (ROOT / "docker/docker-bake.hcl").read_text(), re.MULTILINE)
    assert (code, set(declared) - set(given)) == (0, {"REPOSITORY"})
    for name in ("cuda", "rocm"):
        arguments = set(re.findall(r"^ARG (\w+)$", (ROOT / f"docker/Dockerfile.{name}").read_text(), re.MULTILINE))
        baked = set(re.findall(r"^ +(\w+) += ", (ROOT / "docker/docker-bake.hcl").read_text(), re.MULTILINE))
        assert arguments <= baked


def test_pin_renews_moved_tags_and_keeps_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = commit_files(tmp_path / "source", {"a": "1"})
    text = TEXT.replace("URL", f"{mirror_folder(tmp_path, tmp_path / 'home', monkeypatch)}/source")
    stack = Stack.model_validate(yaml.safe_load(text))
    monkeypatch.setattr(pinning, "resolve_tag", lambda _: DIGEST)
    after = renew(text, stack, {}, {})
    assert Stack.model_validate(yaml.safe_load(after)).bases["cuda-amd64"].digest == DIGEST
    after = renew(text, stack, {"vime": "main", "rl_kernel": commit}, {})
    renewed = Stack.model_validate(yaml.safe_load(after))
    assert [pin.commit for pin in renewed.pins.values()] == [commit, commit]
    assert renewed.pins["rl_kernel"].confidence == "certain"
    assert "# a comment that stays" in after
    assert "# kept" in after
    for platform in ("cuda-amd64", "cuda-arm64"):
        after = renew(text, stack, {}, {platform: f"ghcr.io/us/images@{DIGEST}"})
        published = Stack.model_validate(yaml.safe_load(after))
        assert published.images[platform].digest == DIGEST
        assert len(published.unpublished) == 1
    with pytest.raises(SpecError, match="no such pin"):
        renew(text, stack, {"torch": "main"}, {})
    with pytest.raises(SpecError, match="no such image"):
        renew(text, stack, {}, {"cuda-amd64": "ghcr.io/us/images:latest"})


@pytest.mark.parametrize("platform", ["cuda-amd64", "cuda-arm64", "rocm-amd64"])
def test_pin_adds_an_image_to_the_shipped_stack(platform: str) -> None:
    stack = load_stack("2026-07")
    after = yaml.safe_load(renew(stack.data.decode(), stack.model, {}, {platform: f"registry.site/name@{DIGEST}"}))
    assert after["images"][platform]["digest"] == DIGEST
    assert set(after["unpublished"]) == set(stack.model.unpublished) - {platform}


def test_workflows_pin_their_actions_and_start_without_rights() -> None:
    for path in sorted((ROOT / ".github/workflows").glob("*.yml")):
        text = path.read_text()
        workflow: dict[Any, Any] = yaml.safe_load(text)
        assert workflow["permissions"] == {"contents": "read"}
        used = re.findall(r"uses: (\S+)(.*)", text)
        assert used
        assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) for action, _ in used), used
        assert all(re.fullmatch(r" # v\d+\.\d+\.\d+", comment) for _, comment in used), used


@pytest.mark.parametrize("name", ["cuda", "locked", "rocm"])
def test_the_dockerfiles_are_clean(name: str) -> None:
    from rlk_repro.base import proc

    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint is not None
    done = proc.run(
        # one step, one layer: a step that did not change is taken from the cache
        [hadolint, "--ignore", "DL3059", str(ROOT / f"docker/Dockerfile.{name}")]
    )
    assert done.is_ok, done.stdout + done.stderr


def test_an_unknown_runtime_is_answered_with_the_known_ones(call: Call) -> None:
    code, _, err = call("images", "check", "name", "--runtime", "singularity")
    assert code == 2
    assert err.startswith("rlk-repro: --runtime: unknown, got 'singularity', expected one of podman, docker, ")


def test_the_complaint_of_docker_is_quoted_not_its_last_line(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "docker: Cannot connect to the Docker daemon.\n\nRun 'docker run --help' for more information"
    write_tree(tmp_path, {"docker": f'#!/bin/sh\necho "{words}" >&2\nexit 125\n'})
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    code, _, err = call("images", "check", "name", "--runtime", "docker")
    assert (code, err) == (3, "rlk-repro: docker run name: docker: Cannot connect to the Docker daemon.\n")
