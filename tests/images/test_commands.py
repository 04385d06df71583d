"""``rlk-repro images`` and the steps of a build, without engine and registry; those are in test_build."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlk_repro.base.errors import CheckFailed, SpecError
from rlk_repro.clusters.slurm.script import render_sbatch
from rlk_repro.images import build, stacks
from rlk_repro.spec.load import load_stack
from tests import ROOT
from tests.support.copied_package import make_environment, make_wheel
from tests.support.slurm.examples import IMAGE_DIR, plan_for, run_dir_of, with_site
from tools.image_build.inputs import check_gfx, read_inputs
from tools.image_build.package import check_untouched, select_missing
from tools.rl_kernel.nvcc import rewrite

Call = Callable[..., tuple[int, str, str]]
ALL = ("cuda-amd64", "cuda-arm64", "rocm-amd64")
DIGEST = f"sha256:{'ab' * 32}"
ARGUMENTS = {
    "BASE_NAME": "registry.example/vime",
    "BASE_DIGEST": DIGEST,
    "STACK": "test",
    "IMAGE_PLATFORM": "cuda-amd64",
    "REVISION": "1" * 40,
    "SOURCE_DATE_EPOCH": "1767225600",
    "VIME_REPOSITORY": "https://git.example/vime",
    "VIME_COMMIT": "2" * 40,
    "RL_KERNEL_REPOSITORY": "https://git.example/rl-kernel",
    "RL_KERNEL_COMMIT": "3" * 40,
}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"BASE_DIGEST": "latest"}, "build argument BASE_DIGEST: a tag can move, got 'latest'"),
        ({"RL_KERNEL_COMMIT": "202f0e3"}, "build argument RL_KERNEL_COMMIT: a branch or a tag can move"),
        ({"STACK": ""}, "build argument STACK: missing"),
        ({"IMAGE_PLATFORM": "cuda-arm64"}, "build argument IMAGE_PLATFORM: differs from this machine's"),
        ({"SOURCE_DATE_EPOCH": "yesterday"}, "build argument SOURCE_DATE_EPOCH: no time"),
    ],
)
def test_arguments_that_move_are_refused(monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], says: str) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    inputs = read_inputs(ARGUMENTS)
    assert (inputs.image_platform, inputs.architectures) == ("cuda-amd64", ["80", "90", "100"])
    assert read_inputs({**ARGUMENTS, "IMAGE_PLATFORM": "rocm-amd64"}).architectures == []
    with pytest.raises(SpecError) as caught:
        read_inputs({**ARGUMENTS, **changed})
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


def test_a_base_keeps_its_packages_and_gets_only_those_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = (ROOT / "requirements/base.txt").read_text()
    wanted = select_missing(lock, {"pydantic", "pydantic-core", "typer", "rich"})
    assert "isal" in wanted
    assert not {"pydantic", "colorama"} & wanted.keys()
    assert all("--hash=sha256:" in entry for entry in wanted.values())
    assert select_missing(lock, {re.split("==", entry)[0] for entry in lock.split("\n") if "==" in entry}) == {}
    now = {"torch": "2.12.0", "rlk-repro": "0.1.0", "isal": "1.9.1", "flash-attn": "2.8.3"}
    monkeypatch.setattr("tools.image_build.package.list_packages", lambda: now)
    with pytest.raises(CheckFailed) as caught:
        check_untouched({"torch": "2.11.0", "numpy": "1.26.4"}, ["isal"])
    assert [(problem.where, problem.got) for problem in caught.value.problems] == [
        ("package flash-attn", "2.8.3"), ("package numpy", None), ("package torch", "2.12.0"),
    ]  # fmt: skip


def test_a_base_for_other_amd_gpus_is_refused(tmp_path: Path) -> None:
    for name, gpu in (("lib/rocblas/library", "gfx942"), ("lib/hipblaslt/library", "gfx950")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / f"kernels_{gpu}.co").write_text("")
    with pytest.raises(CheckFailed) as caught:
        check_gfx(tmp_path)
    (problem,) = caught.value.problems
    assert (problem.got, problem.expected) == (["gfx950"], "gfx942")


def test_without_options_it_is_the_newest_stack_and_this_machines_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for processor, driver, stack, platform in (
        ("x86_64", tmp_path / "none", "2026-11", "cuda-amd64"),
        ("x86_64", tmp_path, "2026-07", "rocm-amd64"),
        ("aarch64", tmp_path / "none", "2026-11", "cuda-arm64"),
    ):
        monkeypatch.setattr("platform.machine", lambda found=processor: found)
        monkeypatch.setattr(stacks, "AMD_DRIVER", driver)
        assert (stacks.get_stack(None).stack, stacks.find_platform()) == (stack, platform)


def test_the_build_command_holds_the_stacks_pins(call: Call) -> None:
    pins = load_stack("2026-07").model.pins
    on_rocm = ("--platform", "rocm-amd64")
    for words, code, told in (
        (("--platform", "cuda-amd64"), 0, f"--build-arg=RL_KERNEL_COMMIT={pins['rl_kernel'].commit}"),
        (on_rocm, 2, "has no digest, which a build needs, expected --base NAME@sha256:…"),
        ((*on_rocm, "--base", f"a/b@{DIGEST}"), 0, f"--build-arg=BASE_DIGEST={DIGEST}"),
        ((*on_rocm, "--base", "a/b:latest"), 2, "--base: a tag can move"),
    ):
        found, out, error = call("images", "build", "--stack", "2026-07", "--engine", "podman", "--dry-run", *words)
        assert (found, told in out + error) == (code, True), out + error


def test_a_changed_file_of_the_build_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record names this tool's commit, so a build begins only where the files are the commit's."""
    monkeypatch.setattr(build, "_git", lambda *_: " M requirements/2026-11-cuda-amd64.txt\n?? tools/new.py")
    with pytest.raises(SpecError, match=r"has changed files.* got 'M requirements/2026-11-cuda-amd64\.txt'"):
        build.require_clean()


def test_the_workflow_names_the_pushed_images_in_the_stack(tmp_path: Path) -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/images.yml").read_text())
    step = next(step for step in workflow["jobs"]["propose"]["steps"] if step.get("name") == "Propose the digests")
    words, _, _ = step["run"].partition("git switch")
    path = tmp_path / "manifests/stacks/2026-07.yaml"
    path.parent.mkdir(parents=True)
    shutil.copy(ROOT / "manifests/stacks/2026-07.yaml", path)
    environ = {**os.environ, "TAG": "images-2026-07", "REPOSITORY": "registry.site/name"}
    for pushed in (ALL[:1], ALL, ALL):  # the last time it replaces what it wrote
        given = {name.upper().replace("-", "_"): f"{name} {DIGEST if name in pushed else ''}" for name in ALL}
        subprocess.run(["bash", "-c", words], cwd=tmp_path, env=environ | given, check=True)
        stack = load_stack(str(path)).model
        assert {name: image.digest for name, image in stack.images.items()} == dict.fromkeys(pushed, DIGEST)
        assert set(stack.unpublished) == set(ALL) - set(pushed)


def test_workflows_pin_their_actions_and_start_without_rights() -> None:
    for path in sorted((ROOT / ".github/workflows").glob("*.yml")):
        text = path.read_text()
        workflow: dict[Any, Any] = yaml.safe_load(text)
        assert workflow["permissions"] == {"contents": "read"}
        used = re.findall(r"uses: (\S+)(.*)", text)
        assert used
        assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) for action, _ in used), used
        assert all(re.fullmatch(r" # v\d+\.\d+\.\d+", comment) for _, comment in used), used


@pytest.mark.parametrize("name", ["locked", "vime"])
def test_the_dockerfiles_are_clean(name: str) -> None:
    from rlk_repro.base import proc

    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint is not None
    done = proc.run(
        # one step, one layer: a step that did not change is taken from the cache
        [hadolint, "--ignore", "DL3059", str(ROOT / f"docker/Dockerfile.{name}")]
    )
    assert done.is_ok, done.stdout + done.stderr


# Image runs and the torch of ``make`` are pinned and have only the rights that they need.


def test_torch_is_installed_only_as_one_of_the_listed_files(tmp_path: Path) -> None:
    """The index serves a stand-in of the same name and version, as a careless or hostile index would."""
    (tmp_path / "requirements").mkdir()
    lock = (ROOT / "requirements" / "torch.txt").read_text()
    (tmp_path / "requirements" / "torch.txt").write_text(lock)
    wheels = tmp_path / "wheels"
    wheel = make_wheel(wheels, "torch", "2.13.0")
    make_environment(tmp_path / "env")
    env = {"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}

    def install(*words: str) -> subprocess.CompletedProcess[str]:
        script = ROOT / "tools" / "install-torch.sh"
        argv = ["sh", str(script), "env", *words]
        return subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    done = install()
    assert done.returncode == 1
    assert "make: this index serves another build of torch==2.13.0 than those of requirements/torch.txt" in done.stderr
    assert not list((tmp_path / "env").rglob("torch*"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / "requirements" / "torch.txt").write_text(f"torch==2.13.0 --hash=sha256:{digest}\n")
    assert install().returncode == 0
    assert list((tmp_path / "env").rglob("torch-2.13.0.dist-info"))
    assert (install().returncode, install("torch==0.0.0").returncode) == (0, 0)  # torch is installed


@pytest.mark.parametrize(("runtime", "hardware"), [("docker", "h200"), ("podman", "mi300x")])
def test_containers_have_no_capability_and_no_way_to_one(runtime: str, hardware: str) -> None:
    plan = plan_for(hardware=hardware, stack="example")
    site = with_site(plan, container={"runtime": runtime, "image_dir": IMAGE_DIR})
    script = render_sbatch(site, run_dir_of(site))
    assert "\n  --cap-drop=ALL\n  --security-opt=no-new-privileges\n" in script
    assert ('"--user=$(id -u):$(id -g)"' in script) is (runtime == "docker")
