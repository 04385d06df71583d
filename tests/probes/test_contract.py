"""What every probe keeps, on this machine and on recorded ones."""

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from rlk_repro.base.findings import Level
from rlk_repro.probes import gpu, gpu_amd, gpu_nvidia, nvml
from rlk_repro.probes.node import PROBES, probe_node
from rlk_repro.rundir.manifest import SEVERITY, TRAINER_PACKAGES, Manifest, Unknown, severity
from rlk_repro.rundir.paths import RunDir
from tests.support.probe_examples import HOST, NETWORK, SMI_ANSWERS, FakeNvml, tools, write_amd, write_tool, write_tree

__all__ = ["tools"]


@pytest.fixture(scope="module", params=["this machine", "nothing at all", "h200", "mi300x"])
def node(request, tmp_path_factory):
    """Probed once for all tests: a manifest does not change."""
    if request.param == "this machine":
        return probe_node("here")
    folder = tmp_path_factory.mktemp("node")
    root = write_tree(folder / "root", {} if request.param == "nothing at all" else HOST | NETWORK)
    fake = FakeNvml() if request.param == "h200" else FakeNvml("nvmlInit")
    (folder / "bin").mkdir()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PATH", str(folder / "bin"))
        monkeypatch.setattr(nvml, "load_pynvml", lambda: fake)
        if request.param == "h200":
            write_tool(folder / "bin", "nvidia-smi", SMI_ANSWERS)
        if request.param == "mi300x":
            write_amd(root)
        return probe_node(request.param, root=root)


def test_every_section_is_there_and_every_fact_has_a_value_or_a_reason(node):
    assert list(node.sections) == list(PROBES) == ["host", "gpu", "network", "code", "container", "environment"]
    for path, fact in node.facts():
        assert fact is not None, path
        assert not isinstance(fact, Unknown) or fact.reason.strip(), path


def test_a_manifest_survives_its_file(node, tmp_path):
    text = json.dumps(node.to_json(), allow_nan=False)
    assert "null" not in re.sub(r'"[^"]*"', "", text)
    assert Manifest.from_json(json.loads(text)) == node
    assert RunDir(tmp_path).node(node.node).manifest.name == "manifest.json"


def test_no_path_of_a_user_gets_into_a_reason(node):
    reasons = [fact.reason for _, fact in node.facts() if isinstance(fact, Unknown)]
    assert not [reason for reason in reasons if str(Path.home()) in reason or "/tmp/" in reason]


@pytest.mark.parametrize(
    ("path", "level"),
    [
        ("gpu.devices.0.name", Level.BLOCKING),
        ("gpu.devices.7.memory_partition", Level.BLOCKING),
        ("gpu.devices.0.uuid", Level.INFO),
        ("gpu.fabric.state", Level.WARNING),
        ("gpu.fabric.cluster_uuid", Level.INFO),
        ("gpu.topology_links.gpu_gpu.NV18", Level.WARNING),
        ("gpu.topology_text", Level.INFO),
        ("code.rl_kernel.extension_symbols", Level.BLOCKING),
        ("code.rl_kernel.extension_sha256", Level.WARNING),
        ("code.rl_kernel.repairs", Level.BLOCKING),
        ("code.rl_kernel.source", Level.INFO),
        ("code.rl_kernel.build_variables.TORCH_CUDA_ARCH_LIST", Level.WARNING),
        ("code.packages.torch", Level.BLOCKING),
        ("code.packages.torchvision", Level.WARNING),
        ("environment.NCCL_ALGO", Level.WARNING),
        ("environment.SLURM_JOB_ID", Level.INFO),
        ("host.boot_id", Level.INFO),
        ("network.rdma_devices.mlx5_0.firmware", Level.WARNING),
        ("container.runtime", Level.WARNING),
    ],
)
def test_facts_matter_as_documented(path, level):
    assert severity(path) is level


def test_every_fact_that_diff_judges_exists(tmp_path, tools, monkeypatch):
    """A rule whose fact no probe writes would be dead."""
    write_tool(tools, "nvidia-smi", SMI_ANSWERS)
    root = write_amd(write_tree(tmp_path / "root", HOST | NETWORK))
    nvidia, amd = gpu_nvidia.probe(root, FakeNvml()), gpu_amd.probe(root)
    monkeypatch.setattr(gpu, "probe", lambda _: nvidia)
    facts = dict(probe_node("x", root=root).facts())
    assert isinstance(nvidia, dict)
    assert isinstance(amd, dict)
    facts |= dict(Manifest(node="x", sections={"gpu": nvidia}).facts())
    facts |= dict(Manifest(node="x", sections={"gpu": amd}).facts())
    facts |= {
        "code.packages.vllm": "",
        "environment.SLURM_X": "",
        "environment.RLK_REPRO_X": "",
        "environment.VIME_SRC": "",
    }
    facts["code.rlk_repro.commit"] = facts["code.rlk_repro.is_dirty"] = ""
    facts["network.all_reduce.bus_gb_s"] = ""  # of version 0.2
    facts |= dict.fromkeys((f"code.packages.{name}" for name in TRAINER_PACKAGES), "")
    assert [pattern for pattern, _ in SEVERITY if not any(fnmatchcase(path, pattern) for path in facts)] == []
