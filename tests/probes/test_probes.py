"""What every probe keeps, and what those of host, network, environment and container find."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_repro.base.findings import Level
from rlk_repro.probes import container, environment, gpu_nvidia, host, network
from rlk_repro.probes.node import PROBES, probe_node
from rlk_repro.rundir.manifest import Manifest, Unknown, severity
from tests.support.probe_examples import HOST, NETWORK, SMI_ANSWERS, FakeNvml, tools, write_amd, write_tool, write_tree

__all__ = ["tools"]
GIT = shutil.which("git") or "git"


@pytest.fixture(scope="module", params=["this machine", "nothing at all", "h200", "mi300x"])
def node(request, tmp_path_factory):
    """Probed once for all tests: a manifest does not change."""
    if request.param == "this machine":
        return probe_node("here")
    folder = tmp_path_factory.mktemp("node")
    root = write_tree(folder / "root", {} if request.param == "nothing at all" else HOST | NETWORK)
    fake = FakeNvml() if request.param == "h200" else FakeNvml("nvmlInit")
    (folder / "bin").mkdir()
    (folder / "bin/git").symlink_to(GIT)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PATH", str(folder / "bin"))
        monkeypatch.setattr(gpu_nvidia, "load_pynvml", lambda: fake)
        if request.param == "h200":
            write_tool(folder / "bin", "nvidia-smi", SMI_ANSWERS)
        if request.param == "mi300x":
            write_amd(root)
        return probe_node(request.param, root=root)


def test_every_section_is_there_and_every_fact_has_a_value_or_a_reason(node):
    assert list(node.sections) == list(PROBES) == ["host", "gpu", "network", "code", "container", "environment"]
    for path, fact in node.facts():
        assert fact is not None, path
        reason = fact.reason if isinstance(fact, Unknown) else "none"
        assert reason.strip(), path
        assert str(Path.home()) not in reason, path
        assert "/tmp/" not in reason, path
    text = json.dumps(node.to_json(), allow_nan=False)
    assert "null" not in re.sub(r'"[^"]*"', "", text)
    assert Manifest.from_json(json.loads(text)) == node


@pytest.mark.parametrize(
    ("path", "level"),
    [
        ("gpu.devices.0.name", Level.BLOCKING),
        ("gpu.devices.0.uuid", Level.INFO),
        ("gpu.fabric.state", Level.WARNING),
        ("gpu.fabric.cluster_uuid", Level.INFO),
        ("code.rl_kernel.extension_symbols", Level.BLOCKING),
        ("code.rl_kernel.extension_sha256", Level.WARNING),
        ("code.rl_kernel.source", Level.INFO),
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


def test_a_server_is_described_from_its_files(tmp_path):
    facts = host.probe(write_tree(tmp_path, HOST))
    expected = {
        "hostname": "node-1",
        "kernel": "6.8.0-60-generic",
        "cmdline": "iommu=pt",
        "clock_source": "tsc",
        "cpu_model": "Intel(R) Xeon(R) Platinum 8480C",
        "num_cpus": 2,
        "is_smt_active": True,
        "governor": "performance,powersave",
        "transparent_hugepages": "madvise",
        "memory_total_gib": 2016,
        "cgroup_cpu_max": 16.0,
        "cgroup_memory_max_gib": 64.0,
        "load_average": [0.5, 0.25, 0.1],
    }
    assert {name: facts[name] for name in expected} == expected


def test_an_empty_machine_gives_reasons_and_a_missing_limit_is_unlimited(tmp_path):
    facts = host.probe(tmp_path)
    assert facts["governor"] == Unknown("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor absent")
    assert facts["cgroup_cpu_max"] == Unknown("/sys/fs/cgroup is not of cgroup version 2")
    facts = host.probe(write_tree(tmp_path, {"/sys/fs/cgroup/cgroup.controllers": "cpu", "/proc/self/cgroup": "0::/"}))
    assert (facts["cgroup_cpu_max"], facts["cgroup_memory_max_gib"]) == ("unlimited", "unlimited")


def test_grace_processors_are_named_by_their_core():
    assert host.parse_cpu_model("processor : 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n") == "Neoverse-V2"
    assert host.parse_cpu_model("CPU implementer : 0x4e\nCPU part : 0x004\n") == "Arm implementer 0x4e part 0x004"
    assert host.parse_cpu_model("processor : 0") == Unknown("/proc/cpuinfo names no model")


@settings(deadline=None)
@given(st.text())
def test_no_text_of_a_file_crashes_a_parser(text):
    for parse in (
        host.comparable_cmdline,
        host.parse_os_release,
        host.parse_cpu_model,
        host.parse_bracketed,
        host.parse_meminfo,
        host.parse_cpu_max,
    ):
        assert parse(text) is not None


def test_runs_that_other_agents_have_in_hand_are_found(tmp_path: Path) -> None:
    def write(pid: int, *argv: str) -> None:
        write_tree(tmp_path, {f"/proc/{pid}/cmdline": "".join(f"{part}\0" for part in argv)})

    agent = ("/usr/bin/python3", "-m", "rlk_repro.job")
    write(1, "/sbin/init")
    write(10, *agent, "/home/x/runs/smoke/mine")
    write(11, *agent, "/home/x/runs/smoke/mine", "--node", "b")
    write(12, *agent, "/home/y/runs/smoke/theirs")
    write(14, "python", "-m", "rlk_repro.bench.module", "/home/y/runs/smoke/theirs")
    write(15, "vi", "rlk_repro.job")
    write(16)
    assert host.find_runs(tmp_path, 10) == (["theirs"], [])
    assert host.find_runs(tmp_path, 99) == (["mine", "theirs"], [])


@pytest.mark.parametrize(
    ("own", "theirs", "is_apart"),
    [("0", "1", True), ("0,1", "2,3", True), ("0,1", "1,2", False), ("0", "", False), ("0", "GPU-1", False),
     ("", "1", False)],
)  # fmt: skip
def test_a_run_is_beside_this_one_only_if_both_name_other_gpus(
    tmp_path: Path, own: str, theirs: str, is_apart: bool
) -> None:
    for pid, gpus in (("10", own), ("11", theirs)):
        files = {
            "cmdline": f"python\0-m\0rlk_repro.job\0/runs/{pid}\0",
            "environ": f"A=b\0CUDA_VISIBLE_DEVICES={gpus}\0",
        }
        write_tree(tmp_path, {f"/proc/{pid}/{name}": text for name, text in files.items()})
    assert host.find_runs(tmp_path, 10) == (([], ["11"]) if is_apart else (["11"], []))


def test_cores_are_divided_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    path = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    write_tree(tmp_path, {path.format(number): f"{number % 4},{number % 4 + 4}" for number in range(8)})
    assert host.divide_cores(2, tmp_path) == {0: (0, 4, 1, 5), 1: (2, 6, 3, 7)}
    assert host.divide_cores(5, tmp_path) == {}
    assert host.divide_cores(0, tmp_path) == {}


def test_interfaces_and_rdma_devices_are_described_without_addresses(tmp_path):
    root = write_tree(tmp_path, NETWORK)
    (root / "sys/class/net/ens1/device/driver").symlink_to(Path("/sys/bus/pci/drivers/mlx5_core"))
    facts: dict[str, Any] = dict(network.probe(root))
    assert facts["interfaces"] == {
        "ens1": {"mtu": 9000, "speed_mbps": 200000, "driver": "mlx5_core", "state": "up", "numa_node": 1}
    }
    assert facts["rdma_devices"]["mlx5_0"]["firmware"] == "28.39.3560"
    port = {"state": "ACTIVE", "physical_state": "LinkUp", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
    assert facts["rdma_devices"]["mlx5_0"]["ports"] == {"1": port}
    assert "aa:bb" not in str(facts)
    modules = facts["modules"]
    assert (modules["efa"], modules["gdrdrv"], modules["nvidia_peermem"]) == ("absent", "loaded", "580.159.04")


def test_a_verbs_device_opens_or_says_why_not(tmp_path):
    sysfs = "/sys/class/infiniband/mlx5_{}/device/infiniband_verbs/uverbs{}/dev"
    files = {sysfs.format(0, 0): "231:192\n", sysfs.format(1, 1): "231:193\n", "/dev/infiniband/uverbs0": ""}
    root = write_tree(tmp_path, {**NETWORK, **files, "/sys/class/infiniband/mlx5_2/fw_ver": "1\n"})
    assert network.probe(root)["rdma_verbs"] == {
        "mlx5_0": "opens",
        "mlx5_1": "/dev/infiniband/uverbs1: No such file or directory",
        "mlx5_2": "no verbs device",
    }
    assert network.probe(tmp_path / "none")["rdma_verbs"] == Unknown("/sys/class/infiniband has no device")


TOKEN = "hf_" + "aB3" * 11


def test_only_variables_that_steer_a_run_are_recorded_and_secrets_by_name_alone():
    kept = {"NCCL_DEBUG": "INFO", "PYTHONHASHSEED": "0", "SLURM_JOB_ID": "17"}
    private = ("VLLM_HOST_IP", "RAY_ADDRESS", "RAY_HEAD_SVC_SERVICE_HOST", "RAY_HEAD_PORT_6379_TCP_ADDR",
               "SLURM_JOB_USER", "SLURM_JOB_ACCOUNT", "SLURM_SUBMIT_DIR", "PYTHONPATH", "HOME",
               "AWS_SECRET_ACCESS_KEY")  # fmt: skip
    secret = {"VLLM_API_KEY": "x9Y8" * 5, "VIME_EXTRA": f"a {TOKEN}", "RAY_URL": "redis://me:" + "tulips@host"}
    found = environment.select({**kept, **dict.fromkeys(private, "10.0.0.7"), **secret})
    assert found == kept | dict.fromkeys(secret, "<redacted>")


@pytest.mark.parametrize(
    ("files", "variables", "runtime"),
    [
        ({}, {}, "none"),
        ({"/.dockerenv": ""}, {}, "docker"),
        ({"/.dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({"/run/.containerenv": ""}, {}, "podman"),
        ({"/.lock": ""}, {}, "enroot"),
        ({"/.lock": ""}, {"APPTAINER_CONTAINER": "/x.sif"}, "apptainer"),
        ({}, {"container": "lxc"}, "lxc"),
    ],
)
def test_the_runtime_is_recognised_by_its_marks(tmp_path, files, variables, runtime):
    facts = container.probe(write_tree(tmp_path, files), variables)
    assert (facts["runtime"], facts["is_container"]) == (runtime, runtime != "none")


def test_the_digest_comes_from_the_launcher(tmp_path):
    write_tree(tmp_path, {"/.dockerenv": ""})
    assert container.probe(tmp_path, {"RLK_REPRO_IMAGE_DIGEST": "sha256:bb"})["image_digest"] == "sha256:bb"
    assert container.probe(tmp_path, {})["image_digest"] == Unknown("RLK_REPRO_IMAGE_DIGEST is not set")


def test_an_environments_record_lies_in_its_own_folder(tmp_path, monkeypatch):
    assert container.find_record() == container.PROVENANCE
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    assert container.find_record() == container.PROVENANCE
    write_tree(tmp_path, {"/lock.txt": ""})
    assert container.find_record(tmp_path / "root") == container.PROVENANCE
    for text, what in (("{", "JSON"), ("[]", "a JSON object")):
        write_tree(tmp_path, {"/provenance.json": text})
        assert container.load_provenance(Path("/")) == Unknown(f"{tmp_path}/provenance.json is not {what}")
    write_tree(tmp_path, {"/provenance.json": '{"commits": {}}'})
    assert container.load_provenance(Path("/")) == {"commits": {}}


def test_the_kernel_counts_its_kills_for_memory() -> None:
    assert host.count_oom_kills() is not None
