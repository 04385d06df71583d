import json
import os
import re
import shutil
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.base import proc
from rlk_repro.base.files import dump_json, sha256_bytes
from rlk_repro.probes import code, installed
from rlk_repro.probes.checkout import make_patch, probe_checkout
from rlk_repro.probes.installed import (
    BUILD_RECORD,
    AppliedRepair,
    BuildRecord,
    find_changed_files,
    list_device_code,
    probe_extension,
    probe_installed,
    record_digest,
)
from rlk_repro.rundir.manifest import Unknown
from rlk_repro.sources import RL_KERNEL, VIME
from tests.support.probe_examples import commit_files, write_tool, write_tree

pytestmark = pytest.mark.usefixtures("rl_kernel_not_imported")
# as the linker lays them out: bound names are C strings, mangled names and file names are not
EXTENSION = (
    b"\x7fELF\0fused_logp\0fused_logp_sm90\0Fused logp forward\0_Z18fused_logp_forwardN2at6TensorE\0"
    b"fused_logp_kernel.cu\0prefix_shared_attention\0xfused_other"
)


@pytest.fixture
def checkout(tmp_path):
    """A repository with one commit and a package in it."""
    folder = tmp_path / "with space"
    commit_files(folder, {"rl_engine/__init__.py": "", ".gitignore": "*.so\n", "README": "x\n"})
    return folder


def test_changes_and_new_files_make_it_dirty_and_the_hash_tells_which(checkout):
    hashes = {probe_checkout(checkout)["diff_sha256"]}
    for name, text in (("README", "y\n"), ("README", "z\n"), ("new file", "")):
        (checkout / name).write_text(text)
        facts = probe_checkout(checkout)
        assert facts["is_dirty"] is True
        hashes.add(facts["diff_sha256"])
    assert len(hashes) == 4
    (checkout / "ignored.so").write_text("")
    assert probe_checkout(checkout)["diff_sha256"] in hashes


def test_a_folder_that_merely_lies_in_a_repository_is_no_checkout(checkout):
    inside = checkout / ".venv/lib/rl_engine"
    inside.mkdir(parents=True)
    assert probe_checkout(inside)["commit"] == Unknown("its folder is not a git checkout")


def test_without_git_or_folder_there_is_a_reason(checkout, tmp_path, monkeypatch):
    assert probe_checkout(tmp_path / "absent")["commit"] == Unknown("its folder is absent")
    (checkout / "pyproject.toml").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = _probe(checkout)  # its files are hashed like those of an archive
    assert facts["is_dirty"] == Unknown("git is not on PATH")
    assert re.fullmatch("[0-9a-f]{40}", str(facts["tree"]))


def test_changes_are_a_patch_that_makes_the_same_files_of_the_commit(checkout, tmp_path):
    clone = tmp_path / "clone"
    assert proc.run(["git", "clone", "-q", str(checkout), str(clone)]).is_ok
    assert make_patch(checkout, ["rl_engine", "README"]) == (b"", [])
    objects = sorted((checkout / ".git/objects").rglob("*"))
    (checkout / "README").write_bytes(bytes(range(256)))
    (checkout / "rl_engine/__init__.py").unlink()
    (checkout / "rl_engine/built.so").write_text("")
    made = make_patch(checkout / "rl_engine", ["rl_engine", "README"])
    assert not isinstance(made, Unknown)
    patch, untracked = made
    assert untracked == []
    done = proc.run(["git", "apply", "-"], cwd=clone, stdin=patch)
    assert done.is_ok, done.stderr
    assert probe_checkout(clone)["tree"] == probe_checkout(checkout)["tree"]
    assert sorted((checkout / ".git/objects").rglob("*")) == objects, "nothing is written there"


def test_a_patch_has_only_what_is_asked_for_and_runs_no_filter(checkout, tmp_path, monkeypatch):
    config = tmp_path / "config"
    config.write_text('[filter "trap"]\n\tclean = "touch trapped; cat"\n[diff "trap"]\n\tcommand = touch trapped\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    (checkout / ".gitattributes").write_text("* filter=trap diff=trap\n")
    (checkout / "private.txt").write_text("mine")
    (checkout / "README").write_text("y\n")
    (checkout / "rl_engine/kubeconfig").write_text("client-key-data: mine")
    made = make_patch(checkout, ["README", "rl_engine"])
    assert not isinstance(made, Unknown)
    patch, untracked = made
    assert b"+y\n" in patch
    assert b"mine" not in patch
    assert untracked == ["rl_engine/kubeconfig"]
    assert not list(checkout.rglob("trapped"))
    assert make_patch(tmp_path / "absent", ["README"]) == Unknown("its folder is absent")


def test_rl_kernel_is_described_from_its_checkout(checkout, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(checkout))
    library = checkout / "rl_engine/_C.cpython-311-x86_64-linux-gnu.so"
    library.write_bytes(EXTENSION)
    facts = code.probe(tmp_path, {"RLK_SRC": str(checkout), "TORCH_CUDA_ARCH_LIST": "9.0+PTX"})["rl_kernel"]
    assert isinstance(facts, dict)
    assert facts["source"] == "RLK_SRC"
    assert facts["is_dirty"] is False
    assert facts["is_compiled"] is True
    assert facts["extension"] == library.name
    assert facts["extension_sha256"] == sha256_bytes(EXTENSION)
    assert facts["extension_symbols"] == ["fused_logp", "fused_logp_sm90", "prefix_shared_attention"]
    assert facts["build_variables"] == {"TORCH_CUDA_ARCH_LIST": "9.0+PTX"}


def test_a_build_names_the_gpus_it_holds_code_for(tmp_path, monkeypatch):
    library = tmp_path / "_C.so"
    library.write_bytes(EXTENSION)
    monkeypatch.setattr(installed, "CUOBJDUMP", ("cuobjdump-of-a-test",))
    assert list_device_code(library) == Unknown("cuobjdump is not on PATH")
    machine = "ELF file    1: _C.1.sm_80.cubin\nELF file    2: _C.2.sm_90a.cubin\n"
    answers = {"--list-elf": machine, "--list-ptx": "PTX file    1: _C.1.sm_90.ptx"}
    write_tool(tmp_path, "cuobjdump-of-a-test", answers)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list_device_code(library) == ["compute_90", "sm_80", "sm_90a"]
    assert probe_extension(tmp_path)["extension_architectures"] == ["compute_90", "sm_80", "sm_90a"]
    write_tool(tmp_path, "cuobjdump-of-a-test", {"--list-elf": machine})
    assert list_device_code(library) == ["sm_80", "sm_90a"]
    write_tool(tmp_path, "cuobjdump-of-a-test", {}, refusal=f"no code in {library}")
    assert list_device_code(library) == Unknown("cuobjdump found no code for a GPU")


def test_code_that_is_neither_installed_nor_named_is_unknown(tmp_path):
    facts = code.probe_source(VIME, {}, {})
    assert facts["commit"] == Unknown("VIME_SRC is not set and vime is not installed")
    assert code.probe_source(VIME, {"VIME_SRC": str(tmp_path / "x")}, {})["source"] == Unknown(
        "VIME_SRC names no folder"
    )


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, direct_url: object) -> None:
    record = {"vime/__init__.py": "raise RuntimeError('a probe must not import')\n"}
    record["vime-0.3.dist-info/METADATA"] = "Metadata-Version: 2.1\nName: Vime\nVersion: 0.3\n"
    record["vime-0.3.dist-info/direct_url.json"] = direct_url if isinstance(direct_url, str) else json.dumps(direct_url)
    write_tree(folder, record)
    monkeypatch.syspath_prepend(str(folder))


def test_the_imported_package_counts_not_the_one_that_a_variable_names(tmp_path, monkeypatch):
    _install(tmp_path / "site", monkeypatch, {"vcs_info": {"vcs": "git", "commit_id": "c0ffee"}})
    elsewhere = write_tree(tmp_path / "elsewhere", {"vime/__init__.py": ""})
    facts = code.probe_source(VIME, {"VIME_SRC": str(elsewhere)}, {})
    assert (facts["source"], facts["commit"]) == ("installed", "c0ffee")
    monkeypatch.syspath_prepend(str(elsewhere))
    facts = code.probe_source(VIME, {"VIME_SRC": str(elsewhere)}, {})
    assert (facts["source"], facts["commit"]) == ("VIME_SRC", Unknown("its folder is not a git checkout"))


def test_the_images_record_counts_without_checkout_and_pip_record(tmp_path, monkeypatch):
    record = '{"commits": {"vime": "0ddba11"}}'
    root = write_tree(tmp_path / "root", {"/opt/rlk-repro/provenance.json": record})
    _install(tmp_path / "site", monkeypatch, "{")
    vime = code.probe(root, {})["vime"]
    assert isinstance(vime, dict)
    assert vime["commit"] == "0ddba11"
    for direct_url in ("[]", {"url": "file:///x", "dir_info": {}}, {"vcs_info": {"commit_id": 3}}):
        _install(tmp_path / "site", monkeypatch, direct_url)
        assert code.probe_source(VIME, {}, {"vime": "0ddba11"})["commit"] == "0ddba11"


def _probe(*folders: Path) -> dict[str, Any]:
    return code.probe_source(RL_KERNEL, {"PYTHONPATH": os.pathsep.join(map(str, folders))}, {})


def test_an_archive_has_the_tree_of_the_commit_that_it_was_made_of(checkout, tmp_path):
    commit_files(checkout, {"pyproject.toml": "[project]\n"})
    archive = tmp_path / "archive"
    shutil.copytree(checkout, archive, ignore=shutil.ignore_patterns(".git"))
    for generated in ("rl_engine/__pycache__/x.pyc", "rl_engine/_C.so", "rl_kernel.egg-info/PKG-INFO"):
        write_tree(archive, {generated: "x"})
    known, unpacked = _probe(checkout), _probe(archive)
    assert known["is_dirty"] is False
    assert (unpacked["tree"], unpacked["package_tree"]) == (known["tree"], known["package_tree"])
    assert unpacked["commit"] == Unknown("its folder is not a git checkout")
    (archive / "rl_engine/__init__.py").write_text("x = 1\n")
    (checkout / "rl_engine/__init__.py").write_text("x = 1\n")
    edited = _probe(archive)
    assert edited["tree"] != known["tree"]
    assert edited["package_tree"] != known["package_tree"]
    known = _probe(checkout)
    assert known["is_dirty"] is True
    assert (edited["tree"], edited["package_tree"]) == (known["tree"], known["package_tree"])


def test_an_installation_has_the_package_tree_of_its_sources(checkout, tmp_path):
    shutil.copytree(checkout / "rl_engine", tmp_path / "site/rl_engine")
    write_tree(tmp_path / "site", {"rl_engine/_C.so": "x", "rl_engine/py.typed": ""})
    installed = _probe(tmp_path / "site")
    assert installed["package_tree"] == _probe(checkout)["package_tree"]
    assert isinstance(installed["tree"], Unknown)
    write_tree(tmp_path / "front", {"rl_engine/__init__.py": "front = True\n"})
    first = _probe(tmp_path / "front", checkout)
    assert first["package_tree"] != installed["package_tree"], "the first folder on the path counts"


# What was recorded when a code base was installed, and whether its files still are what was installed.

RECORD = BuildRecord(
    repository="https://example.com/x",
    commit="1" * 40,
    tree="2" * 40,
    is_dirty=False,
    diff_sha256="clean",
    repairs=(AppliedRepair(name="cccl3-functionals", file="a.cu", before_sha256="3", after_sha256="4"),),
    build_variables={"TORCH_CUDA_ARCH_LIST": "9.0"},
    platform="cuda",
    device_capability="9.0",
    torch="2.11.0+cu130",
    toolkit="13.0",
    nvcc="13.0",
)


def install(folder, record: BuildRecord = RECORD):
    """A distribution as pip leaves it, with our installer's record."""
    info = "rl_kernel-0.1.0.dist-info"
    write_tree(folder, {"rl_engine/__init__.py": "", "rl_engine/op.py": "x = 1\n"})
    files = {f"{info}/METADATA": "Metadata-Version: 2.1\nName: RL-Kernel\nVersion: 0.1.0\n"}
    files[f"{info}/{BUILD_RECORD}"] = dump_json(asdict(record)).decode()
    lines = [f"{name},sha256={record_digest(folder / name)},1" for name in ("rl_engine/__init__.py", "rl_engine/op.py")]
    files[f"{info}/RECORD"] = "\n".join([*lines, "rl_engine/__pycache__/op.pyc,,", f"{info}/RECORD,,", ""])
    write_tree(folder, files)
    return next(iter(metadata.distributions(path=[str(folder)])))


def test_the_manifest_describes_the_installation(tmp_path, monkeypatch):
    install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    facts = code.probe(tmp_path, {})["rl_kernel"]
    assert isinstance(facts, dict)
    expected = {
        "version": "0.1.0",
        "source": "installed",
        "commit": "1" * 40,
        "is_dirty": False,
        "diff_sha256": "clean",
        "tree": "2" * 40,
        "repairs": ["cccl3-functionals"],
        "build_variables": {"TORCH_CUDA_ARCH_LIST": "9.0"},
        "is_compiled": False,
    }
    assert {name: facts[name] for name in expected} == expected


def test_a_file_edited_after_the_installation_makes_it_dirty(tmp_path):
    changed = replace(RECORD, is_dirty=True, diff_sha256="5" * 64)
    facts = probe_installed(install(tmp_path / "dirty", changed), "rl_engine")
    assert facts == {"commit": "1" * 40, "is_dirty": True, "diff_sha256": "5" * 64, "tree": "2" * 40}
    distribution = install(tmp_path)
    assert find_changed_files(distribution, "rl_engine") == []
    (tmp_path / "rl_engine/op.py").write_text("x = 2\n")
    first = probe_installed(distribution, "rl_engine")
    (tmp_path / "rl_engine/__init__.py").unlink()
    second = probe_installed(distribution, "rl_engine")
    assert (first["is_dirty"], second["is_dirty"]) == (True, True)
    assert first["diff_sha256"] != second["diff_sha256"] != "clean"


def test_a_copy_in_front_of_the_installed_one_borrows_nothing_from_it(tmp_path, monkeypatch):
    install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(write_tree(tmp_path / "front", {"rl_engine/__init__.py": ""})))
    facts = code.probe(tmp_path, {})["rl_kernel"]
    assert isinstance(facts, dict)
    assert facts["commit"] == Unknown("its folder is not a git checkout")
    assert facts["tree"] == Unknown("its folder is not a git checkout")
    assert facts["repairs"] == Unknown("RL-Kernel was not installed by make demo-rl-kernel")
