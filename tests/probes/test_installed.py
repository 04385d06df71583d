"""What was recorded when a code base was installed, and whether its files still are what was installed."""

import json
from dataclasses import asdict, replace
from importlib import metadata

import pytest

from rlk_repro.base.files import dump_json
from rlk_repro.probes import code
from rlk_repro.probes.installed import (
    BUILD_RECORD,
    AppliedRepair,
    BuildRecord,
    find_changed_files,
    probe_installed,
    record_digest,
)
from rlk_repro.rundir.manifest import Unknown
from tests.support.probe_examples import write_tree

pytestmark = pytest.mark.usefixtures("rl_kernel_not_imported")
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


def install(folder, record: BuildRecord | None = RECORD, direct_url: object = None):
    """A distribution as pip leaves it, with our installer's record."""
    info = "rl_kernel-0.1.0.dist-info"
    write_tree(folder, {"rl_engine/__init__.py": "", "rl_engine/op.py": "x = 1\n"})
    files = {f"{info}/METADATA": "Metadata-Version: 2.1\nName: RL-Kernel\nVersion: 0.1.0\n"}
    if record is not None:
        files[f"{info}/{BUILD_RECORD}"] = dump_json(asdict(record)).decode()
    if direct_url is not None:
        files[f"{info}/direct_url.json"] = json.dumps(direct_url)
    lines = [f"{name},sha256={record_digest(folder / name)},1" for name in ("rl_engine/__init__.py", "rl_engine/op.py")]
    files[f"{info}/RECORD"] = "\n".join([*lines, "rl_engine/__pycache__/op.pyc,,", f"{info}/RECORD,,", ""])
    write_tree(folder, files)
    return next(iter(metadata.distributions(path=[str(folder)])))


def test_the_manifest_describes_the_installation(tmp_path, monkeypatch):
    install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    facts = code.probe(tmp_path, {})["rl_kernel"]
    assert isinstance(facts, dict)
    assert {name: facts[name] for name in ("version", "source", "commit", "is_dirty", "diff_sha256", "tree")} == {
        "version": "0.1.0",
        "source": "installed",
        "commit": "1" * 40,
        "is_dirty": False,
        "diff_sha256": "clean",
        "tree": "2" * 40,
    }
    assert facts["repairs"] == ["cccl3-functionals"]
    assert facts["build_variables"] == {"TORCH_CUDA_ARCH_LIST": "9.0"}
    assert facts["is_compiled"] is False


def test_a_file_edited_after_the_installation_makes_it_dirty(tmp_path):
    distribution = install(tmp_path)
    assert find_changed_files(distribution, "rl_engine") == []
    (tmp_path / "rl_engine/op.py").write_text("x = 2\n")
    first = probe_installed(distribution, "rl_engine")
    (tmp_path / "rl_engine/__init__.py").unlink()
    second = probe_installed(distribution, "rl_engine")
    assert (first["is_dirty"], second["is_dirty"]) == (True, True)
    assert first["diff_sha256"] != second["diff_sha256"] != "clean"


def test_sources_that_were_dirty_when_they_were_built_stay_so(tmp_path):
    facts = probe_installed(install(tmp_path, replace(RECORD, is_dirty=True, diff_sha256="5" * 64)), "rl_engine")
    assert facts == {"commit": "1" * 40, "is_dirty": True, "diff_sha256": "5" * 64, "tree": "2" * 40}


def test_without_our_record_pips_own_word_for_a_commit_counts(tmp_path):
    direct_url = {"url": "https://example.com/x.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}}
    facts = probe_installed(install(tmp_path, None, direct_url), "rl_engine")
    tree = Unknown("the installation recorded no hash of the source tree")
    assert facts == {"commit": "c0ffee", "is_dirty": False, "diff_sha256": "clean", "tree": tree}


def test_a_copy_in_front_of_the_installed_one_borrows_nothing_from_it(tmp_path, monkeypatch):
    install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(write_tree(tmp_path / "front", {"rl_engine/__init__.py": ""})))
    facts = code.probe(tmp_path, {})["rl_kernel"]
    assert isinstance(facts, dict)
    assert facts["commit"] == Unknown("its folder is not a git checkout")
    assert facts["tree"] == Unknown("its folder is not a git checkout")
    assert facts["repairs"] == Unknown("RL-Kernel was not installed by make demo-rl-kernel")
