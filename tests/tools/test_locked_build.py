"""The steps that only a stack with a lock has: one changed commit, hash or file stops the step, which names it."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.base.errors import CheckFailed, RlkReproError, SpecError
from rlk_repro.base.files import sha256_bytes
from rlk_repro.base.trees import hash_tree
from rlk_repro.images import environment
from rlk_repro.spec import Stack
from tests import ROOT
from tests.support.copied_package import make_wheel, mirror_folder
from tests.support.images.examples import commit_files, git
from tools.image_build import kernels, locked
from tools.image_build.__main__ import STEPS
from tools.image_build.inputs import Inputs
from tools.lock_stack import render

PATCH = """\
--- a/megatron/core.py
+++ b/megatron/core.py
@@ -1 +1 @@
-VALUE = 1
+VALUE = 2
"""
PATCH_NAME = "docker/patch/latest/megatron.patch"


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """With repositories of its own; what pip installs in place is left out."""
    address = mirror_folder(tmp_path / "git", tmp_path / "home", monkeypatch)
    commits = {
        "vime": commit_files(tmp_path / "git/vime", {PATCH_NAME: PATCH, "vime/__init__.py": ""}),
        "megatron_lm": commit_files(tmp_path / "git/megatron_lm", {"megatron/core.py": "VALUE = 1\n"}),
        "rl_kernel": commit_files(tmp_path / "git/rl_kernel", {"rl_engine/__init__.py": ""}),
    }
    pins: dict[str, Any] = {
        name: {"repository": f"{address}/{name}", "commit": commit, "confidence": "certain", "evidence": "made here",
               "tree": git(tmp_path / "git" / name, "rev-parse", f"{commit}^{{tree}}")}
        for name, commit in commits.items()
    }  # fmt: skip
    patched = tmp_path / "patched"
    shutil.copytree(tmp_path / "git/megatron_lm", patched)
    (patched / "megatron/core.py").write_text("VALUE = 2\n")
    pins["megatron_lm"]["patched_tree"] = hash_tree(patched)
    patch = {"repository": f"{address}/vime", "commit": commits["vime"], "version": PATCH_NAME,
             "sha256": sha256_bytes(PATCH.encode()), "confidence": "certain", "evidence": "made here"}  # fmt: skip
    made = Stack.model_validate(
        {"schema": 1, "stack": "test", "purpose": "test", "pins": pins, "components": {"megatron-patch": patch}}
    )
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(locked, "SOURCES", tmp_path / "src")
    monkeypatch.setattr(locked, "pip_install", lambda *_, **__: None)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(site))
    return made


def install(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked, "get_stack", lambda _: stack)
    locked.install_sources(make_inputs(stack))


def make_inputs(stack: Stack, **changed: str) -> Inputs:
    pins = stack.pins
    given: dict[str, Any] = {
        "base_name": "requirements/test.txt", "base_digest": f"sha256:{'1' * 64}", "stack": "test",
        "gpu_platform": "cuda", "image_platform": "cuda-amd64", "revision": "1" * 40, "source_date_epoch": "1",
        "vime_repository": pins["vime"].repository, "vime_commit": pins["vime"].commit,
        "rl_kernel_repository": pins["rl_kernel"].repository, "rl_kernel_commit": pins["rl_kernel"].commit,
        "rl_kernel_architectures": "80",
    }  # fmt: skip
    return Inputs(**(given | changed))


def change(stack: Stack, kind: str, name: str, **changed: str) -> Stack:
    items = dict(getattr(stack, kind))
    items[name] = items[name].model_copy(update=changed)
    return stack.model_copy(update={kind: items})


def test_sources_are_the_stacks_commits_with_vimes_patch(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    install(stack, monkeypatch)
    assert (locked.SOURCES / "megatron_lm/megatron/core.py").read_text() == "VALUE = 2\n"
    assert git(locked.SOURCES / "vime", "rev-parse", "HEAD") == stack.pins["vime"].commit
    assert not (locked.SOURCES / "vime/.git/FETCH_HEAD").exists()


@pytest.mark.parametrize("name", ["vime", "megatron_lm"])
def test_another_commit_is_named(stack: Stack, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = commit_files(tmp_path / "git" / name, {"more": "1"})
    with pytest.raises(SpecError, match=f"tree of {commit[:12]}"):
        install(change(stack, "pins", name, commit=commit), monkeypatch)


@pytest.mark.parametrize("name", ["vime", "megatron_lm"])
def test_a_commit_that_is_gone_is_named(stack: Stack, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RlkReproError, match=f"{name} at 2222"):
        install(change(stack, "pins", name, commit="2" * 40), monkeypatch)


def test_another_patch_and_other_patched_files_are_named(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckFailed, match=PATCH_NAME):
        install(change(stack, "components", "megatron-patch", sha256="3" * 64), monkeypatch)
    with pytest.raises(CheckFailed, match="the patched Megatron-LM"):
        install(change(stack, "pins", "megatron_lm", patched_tree="4" * 40), monkeypatch)


def test_rl_kernel_is_the_stacks_commit_and_files(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "get_stack", lambda _: stack)
    monkeypatch.setattr(kernels, "is_locked", lambda: True)
    assert kernels.find_pin(make_inputs(stack)).tree == stack.pins["rl_kernel"].tree
    with pytest.raises(CheckFailed, match="build argument RL_KERNEL_COMMIT"):
        kernels.find_pin(make_inputs(stack, rl_kernel_commit="5" * 40))


def test_a_wheel_with_another_hash_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By pip itself, without a network: the first lock fits, the second has one changed digit."""
    monkeypatch.setattr(shutil, "which", lambda _: None)
    folder, bundle = tmp_path / "env", tmp_path / "bundle"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    wheel = make_wheel(bundle / "wheels", "tiny", "1.0")
    right = sha256_bytes(wheel.read_bytes())
    wrong = ("0" if right[0] != "0" else "1") + right[1:]
    lock = tmp_path / "lock.txt"
    lock.write_text(f"tiny==1.0 --hash=sha256:{wrong}  # 1\n")
    with pytest.raises(CheckFailed, match="installing the packages"):
        environment._install(folder, lock, bundle)
    assert f"tiny==1.0 from file://{wheel}" in capfd.readouterr().err
    lock.write_text(f"tiny==1.0 --hash=sha256:{right}  # 1\n")
    environment._install(folder, lock, bundle)


def test_package_that_asks_for_another_version_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"pandas": "numpy>=2.0.2", "opencv_python_headless": "numpy>=2", "contented": "numpy>=1"}
    for name, requires in packages.items():
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: 1\nRequires-Dist: {requires}\n")
    (tmp_path / "numpy-1.26.4.dist-info").mkdir()
    (tmp_path / "numpy-1.26.4.dist-info/METADATA").write_text("Name: numpy\nVersion: 1.26.4\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(CheckFailed, match=r"pandas: asks for another version, got 'numpy 1\.26\.4'") as raised:
        locked.check_requirements()
    assert "opencv" not in str(raised.value)
    assert "contented" not in str(raised.value)


def test_nothing_is_installed_without_a_hash() -> None:
    """Every list of packages that a build of a stack with a lock reads, and every command of its Dockerfile."""
    for name in ("base.txt", "build.txt", "sbom.txt"):
        entries = (ROOT / "requirements" / name).read_text().replace("\\\n", " ").splitlines()
        packages = [line for line in entries if line.strip() and not line.lstrip().startswith("#")]
        assert [line for line in packages if "==" not in line or "--hash=sha256:" not in line] == []
        assert packages
    text = (ROOT / "docker/Dockerfile.locked").read_text().replace("\\\n", " ")
    commands = [line for line in text.splitlines() if line.startswith(("FROM", "ADD", "COPY", "RUN"))]
    assert "FROM ${BASE_NAME}@${BASE_DIGEST}" in commands
    fetching = [line for line in commands if any(word in line for word in ("pip", "apt", "curl", "wget", "ADD", "://"))]
    assert all("--require-hashes" in line for line in fetching)
    assert len(fetching) == 2


# Of a package's wheels the one that pip would take is locked; a package without one is named.


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


def test_every_step_of_a_build_has_its_function() -> None:
    for place in STEPS.values():
        module, _, name = place.partition(".")
        assert callable(getattr(importlib.import_module(f"tools.image_build.{module}"), name))
