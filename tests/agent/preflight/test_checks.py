"""Preflight checks: nothing on a good node, the right complaint for each thing that is wrong, the level by policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from rlk_repro.agent.preflight.base import Situation, judge_node
from rlk_repro.agent.preflight.checks import CHECKS
from rlk_repro.agent.preflight.gpu import find_toolkit, serves
from rlk_repro.agent.preflight.network import compare_nodes
from rlk_repro.base.findings import Finding, Level
from rlk_repro.probes import gpu_amd, gpu_nvidia, host, network
from rlk_repro.rundir.manifest import Manifest, Unknown
from rlk_repro.spec import CheckName, Layout, Preflight
from rlk_repro.spec.load import load_hardware
from tests import ROOT
from tests.support.probe_examples import (
    HOST,
    NETWORK,
    NVIDIA,
    SMI_ANSWERS,
    FakeNvml,
    tools,
    write_amd,
    write_tool,
    write_tree,
)

__all__ = ["tools"]
# checks that are not of one node's facts: of who uses the GPUs now, and of several nodes
ELSEWHERE = {"gpu_idle", "imex", "nodes_alike", "nvlink_domain", "all_reduce"}
CLUSTER = "6f2a4b0e-0000-4000-8000-000000000001"
DEVICE = {
    "name": "NVIDIA H200",
    "compute_capability": "9.0",
    "nvlinks_up": 18,
    "ecc_mode": "enabled",
    "ecc_uncorrected": 0,
    "remapped_rows": {"is_pending": False, "is_failed": False},
    "mig_mode": "disabled",
    "compute_mode": "Default",
    "persistence_mode": "enabled",
    "power_limit_w": 700.0,
    "power_limit_default_w": 700.0,
    "throttle_reasons": ["gpu_idle"],
    "pcie_width": 16,
}
PORT = {"state": "ACTIVE", "rate": "400 Gb/sec (4X NDR)"}
GOOD: Mapping[str, Mapping[str, Any]] = {
    "host": {
        "governor": "performance",
        "numa_balancing": 0,
        "load_average": [1.0, 1.0, 1.0],
        "num_cpus": 224,
        "trainer_processes": [],
        "dev_shm_gib": 1007.8,
        "tmp_free_gib": 800.0,
        "limits": {"nofile": {"soft": 1024, "hard": 1048576}, "memlock": {"soft": "unlimited"}},
        "clock_source": "tsc",
        "clock_is_synchronized": True,
    },
    "gpu": {
        "vendor": "nvidia",
        "driver": "580.159.04",
        "kernel_module": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04",
        "fabric": {"state": "Completed", "status": "Success", "cluster_uuid": CLUSTER, "clique_id": 7},
        "imex_channels": 1,
        "devices": [{"index": index, **DEVICE} for index in range(8)],
    },
    "network": {
        "rdma_devices": {"mlx5_0": {"ports": {"1": PORT}}, "mlx5_1": {"ports": {"1": PORT}}},
        "rdma_verbs": {"mlx5_0": "opens", "mlx5_1": "no verbs device"},
        "modules": {"nvidia_peermem": "absent", "nv_peer_mem": "absent"},
        "ephemeral_ports": "32768-60999",
    },
    "code": {"packages": {"torch": "2.9.0+cu130"}, "rl_kernel": {"extension_architectures": ["sm_90"]}},
    "environment": {},
    "run_directory": {"clock_skew_s": 0.1, "file_latency_ms": 4.0, "free_inodes": 10**6},
}


def situation(*, hardware: str = "h200", layout: Any = None, policy: Any = None, **changes: Any) -> Situation:
    """The good node with some facts changed: ``host={"governor": …}``."""
    sections = {name: {**body, **changes.get(name, {})} for name, body in GOOD.items()}
    return Situation(
        manifest=Manifest(node="node-0", sections=sections),
        hardware=load_hardware(hardware).model,
        layout=Layout(**(layout or {"num_nodes": 2, "gpus_per_node": 8})),
        limits=Preflight(policy=policy or {}),
        has_enabled=True,
    )


def devices(**changes: object) -> dict[str, Any]:
    """All GPUs but the fourth are good."""
    return {"devices": [{"index": index, **DEVICE, **(changes if index == 3 else {})} for index in range(8)]}


def judged(found: Situation) -> list[Finding]:
    return list(judge_node(CHECKS, found))


def test_a_good_node_has_no_findings() -> None:
    assert judged(situation()) == []


def test_a_node_of_which_nothing_is_known_has_no_findings() -> None:
    nothing = Situation(
        manifest=Manifest(node="n"),
        hardware=load_hardware("h200").model,
        layout=Layout(num_nodes=2, gpus_per_node=8),
        limits=Preflight(),
    )
    assert judged(nothing) == []


BAD: dict[str, tuple[dict[str, Any], Level, tuple[str, str, str]]] = {
    "driver_toolkit": (
        {"gpu": {"driver": "570.86.15", "compat_libcuda": Unknown("absent")}},
        Level.BLOCKING,
        ("gpu.driver", "580 or newer for CUDA 13.0", "570.86.15"),
    ),
    "gpu_errors": (
        {"gpu": devices(ecc_uncorrected=2)}, Level.BLOCKING, ("gpu.devices.ecc_uncorrected", "0", "GPU 3"),
    ),
    "gpu_ecc_mode": (
        {"gpu": {"devices": [DEVICE | {"index": 0, "ecc_mode": "disabled"}]}},
        Level.WARNING,
        ("gpu.devices.ecc_mode", "enabled on all GPUs", "disabled on GPU 0"),
    ),
    "gpu_memory_repair": (
        {"gpu": devices(remapped_rows={"is_pending": True, "is_failed": False})},
        Level.BLOCKING,
        ("gpu.devices.remapped_rows", "no row remapping pending", "GPU 3"),
    ),
    "gpu_links": (
        {"gpu": devices(nvlinks_up=17)}, Level.BLOCKING, ("gpu.devices.3.nvlinks_up", "18", "17"),
    ),
    "gpu_fabric": (
        {"gpu": {"fabric": {"state": "In Progress", "status": Unknown("not yet")}}},
        Level.BLOCKING,
        ("gpu.fabric.state", "Completed", "In Progress"),
    ),
    "gpu_partition": (
        {"gpu": devices(mig_mode="enabled")},
        Level.BLOCKING,
        ("gpu.devices.mig_mode", "disabled on all GPUs", "enabled on GPU 3"),
    ),
    "gpu_compute_mode": (
        {"gpu": devices(compute_mode="Exclusive_Process")},
        Level.WARNING,
        ("gpu.devices.compute_mode", "Default", "Exclusive_Process"),
    ),
    "gpu_slowdown": (
        {"gpu": devices(throttle_reasons=["gpu_idle", "hw_thermal_slowdown"])},
        Level.WARNING,
        ("gpu.devices.3.throttle_reasons", "no slowdown", "hw_thermal_slowdown"),
    ),
    "gpu_power_limit": (
        {"gpu": {"devices": [DEVICE | {"index": 0, "power_limit_w": 500.0}]}},
        Level.WARNING,
        ("gpu.devices.0.power_limit_w", "700 W", "500 W"),
    ),
    "gpu_persistence": (
        {"gpu": devices(persistence_mode="disabled")},
        Level.WARNING,
        ("gpu.devices.persistence_mode", "enabled on all GPUs", "disabled on GPU 3"),
    ),
    "gpu_alike": (
        {"gpu": devices(pcie_width=8)},
        Level.WARNING,
        ("gpu.devices.pcie_width", "one value on all GPUs", "16, 8"),
    ),
    "rl_kernel_architecture": (
        {"code": {"rl_kernel": {"extension_architectures": ["sm_80", "sm_100a"]}}},
        Level.BLOCKING,
        ("code.rl_kernel.extension_architectures", "code for compute capability 9.0", "sm_80, sm_100a"),
    ),
    "governor": ({"host": {"governor": "powersave"}}, Level.WARNING, ("host.governor", "performance", "powersave")),
    "numa_balancing": ({"host": {"numa_balancing": 1}}, Level.WARNING, ("host.numa_balancing", "0", "1")),
    "load": (
        {"host": {"load_average": [150.5, 1.0, 1.0]}}, Level.WARNING, ("host.load_average", "at most 112", "150.5"),
    ),
    "stale_processes": (
        {"host": {"trainer_processes": ["raylet"]}},
        Level.WARNING,
        ("host.trainer_processes", "no such process before the first trial", "raylet"),
    ),
    "other_runs": (
        {"host": {"other_runs": ["20261120T120000Z-0123abcd-4567"]}},
        Level.BLOCKING,
        ("host.other_runs", "no other run", "other runs: 20261120T120000Z-0123abcd-4567"),
    ),
    "shared_memory": ({"host": {"dev_shm_gib": 0.06}}, Level.WARNING, ("host.dev_shm_gib", "at least 1", "0.06")),
    "scratch_room": ({"host": {"tmp_free_gib": 2.5}}, Level.WARNING, ("host.tmp_free_gib", "at least 10", "2.5")),
    "open_files": (
        {"host": {"limits": {"nofile": {"soft": 1024, "hard": 4096}}}},
        Level.WARNING,
        ("host.limits.nofile.hard", "at least 8192", "4096"),
    ),
    "locked_memory": (
        {"host": {"limits": {"memlock": {"soft": 8 << 20}}}},
        Level.WARNING,
        ("host.limits.memlock.soft", "unlimited", "8388608 bytes"),
    ),
    "clock_source": (
        {"host": {"clock_source": "hpet"}},
        Level.WARNING,
        ("host.clock_source", "a clock source that programs read without a system call", "hpet"),
    ),
    "clock_sync": (
        {"host": {"clock_is_synchronized": False}},
        Level.WARNING,
        ("host.clock_is_synchronized", "true", "false"),
    ),
    "clock_skew": (
        {"run_directory": {"clock_skew_s": -3.04}},
        Level.WARNING,
        ("clock", "the same time on this node and the file system", "a difference of -3.0 s"),
    ),
    "rdma_active": (
        {"network": {"rdma_devices": {"mlx5_0": {"ports": {"1": {"state": Unknown("gone")}}}}}},
        Level.BLOCKING,
        ("network.rdma_devices", "at least one active port", "0 of 1 ports active"),
    ),
    "rdma_opens": (
        {"network": {"rdma_verbs": {"mlx5_0": "no verbs device", "mlx5_1": "/dev/infiniband/uverbs1: Not found"}}},
        Level.BLOCKING,
        ("network.rdma_verbs", "a device with an active port that this process can open",
         "/dev/infiniband/uverbs1: Not found; no verbs device"),
    ),
    "rdma_ports": (
        {"network": {"rdma_devices": {"a": {"ports": {"1": PORT}}, "b": {"ports": {"1": {"state": "DOWN"}}}}}},
        Level.WARNING,
        ("network.rdma_devices.b.ports.1.state", "ACTIVE", "DOWN"),
    ),
    "gpudirect_rdma": (
        {"gpu": {"kernel_module": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03"}},
        Level.WARNING,
        ("network.modules.nvidia_peermem", "nvidia_peermem or NVIDIA's open kernel module", "neither"),
    ),
    "ephemeral_ports": (
        {"network": {"ephemeral_ports": "1024-60999"}},
        Level.WARNING,
        ("network.ephemeral_ports", "first port 9000 or higher", "1024-60999"),
    ),
    "file_latency": (
        {"run_directory": {"file_latency_ms": 2500.0}},
        Level.WARNING,
        ("run_directory.file_latency_ms", "at most 1000 ms", "2500 ms"),
    ),
    "free_inodes": (
        {"run_directory": {"free_inodes": 12}},
        Level.WARNING,
        ("run_directory.free_inodes", "at least 10000", "12"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_each_problem_is_found_by_its_own_check_only(name: CheckName) -> None:
    changes, level, complaint = BAD[name]
    assert judged(situation(**changes)) == [Finding(level, *complaint)]
    assert judged(situation(policy={name: "fail"}, **changes)) == [Finding(Level.BLOCKING, *complaint)]
    assert judged(situation(policy={name: "pass"}, **changes)) == [Finding(Level.INFO, *complaint)]


def test_every_check_has_a_name_that_a_profile_may_use_and_an_example_here() -> None:
    names = [str(check.name) for check in CHECKS]
    assert len(set(names)) == len(names)
    assert {*names, *ELSEWHERE} == set(get_args(CheckName))
    assert set(BAD) | {"gpu_visibility"} == set(names)


def test_every_check_is_documented_with_its_default() -> None:
    page = (ROOT / "docs" / "preflight.md").read_text()
    missing = [str(check.name) for check in CHECKS if f"| `{check.name}` | {check.policy} |" not in page]
    missing += [name for name in ELSEWHERE if f"| `{name}` |" not in page]
    assert missing == []


def test_a_run_without_gpus_skips_checks_of_disturbed_times() -> None:
    changes: dict[str, dict[str, Any]] = {}
    for facts, _, _ in BAD.values():
        for section, body in facts.items():
            changes.setdefault(section, {}).update(body)
    found = judged(situation(hardware="cpu", layout={"num_nodes": 1}, **changes))
    assert {finding.where for finding in found} == {"clock", "run_directory.free_inodes"}


def test_one_node_is_not_asked_about_the_network() -> None:
    changes: dict[str, Any] = {
        "network": {"ephemeral_ports": "1024-60999", "rdma_devices": {"a": {"ports": {"1": {"state": "DOWN"}}}}}
    }
    assert judged(situation(layout={"gpus_per_node": 8}, **changes)) == []


def test_a_job_with_one_gpu_uses_no_links() -> None:
    assert judged(situation(layout={"gpus_per_node": 1}, gpu=devices(nvlinks_up=0))) == []


@pytest.mark.parametrize(
    ("packages", "toolkit"),
    [
        ({"torch": "2.9.0a0+145a3a7bda.nv25.10", "CUDA_VERSION": "13.0.2.006"}, "13.0"),
        ({"torch": "2.9.0+cpu", "CUDA_VERSION": "<redacted>"}, None),
        ({"torch": "2.9.0+cu130", "nvidia-cuda-runtime-cu12": "12.8.90"}, "13.0"),
        ({"torch": "2.6.0+cu118"}, "11.8"),
        ({"torch": "2.13.0", "nvidia-cuda-runtime": "13.0.48"}, "13.0"),
        ({"torch": "2.8.0", "nvidia-cuda-runtime-cu12": "12.8.90"}, "12.8"),
        ({"torch": "2.9.0+cpu"}, None),
        ({"nvidia-cuda-runtime": Unknown("its metadata names no version")}, None),
        ({}, None),
    ],
)
def test_the_toolkit_is_that_of_torch_or_of_the_runtime_beside_it(packages: dict[str, Any], toolkit: str) -> None:
    of_image = packages.get("CUDA_VERSION", Unknown("not set"))
    assert find_toolkit(packages, of_image) == toolkit


@pytest.mark.parametrize(
    ("driver", "compat", "is_fine"),
    [
        ("580.65.06", Unknown("absent"), True),
        ("570.86.15", "580.95.05", True),
        ("550.54.15", "570.86.15", False),
    ],
)
def test_a_forward_compatibility_library_counts_as_the_driver(driver: str, compat: Any, is_fine: bool) -> None:
    assert (judged(situation(gpu={"driver": driver, "compat_libcuda": compat})) == []) is is_fine


@pytest.mark.parametrize(
    ("architecture", "capability", "is_served"),
    [
        ("sm_90", "9.0", True),
        ("sm_80", "8.9", True),
        ("sm_89", "8.0", False),
        ("sm_80", "9.0", False),
        ("compute_80", "10.0", True),
        ("sm_90a", "9.0", True),
        ("sm_100a", "10.3", False),
        ("sm_100", "10.3", True),
        ("sm_121", "12.1", True),
        ("gfx942", "9.0", False),
    ],
)
def test_device_code_runs_on_the_capabilities_that_nvidia_documents(
    architecture: str, capability: str, is_served: bool
) -> None:
    assert serves(architecture, capability) is is_served


def on_mi300x(tmp_path: Path, **changes: Any) -> Situation:
    """The two MI300X that the probes' own example shows."""
    gpu = gpu_amd.probe(write_amd(tmp_path / "root"))
    assert isinstance(gpu, dict)
    found = situation(hardware="mi300x", layout={"gpus_per_node": 2}, **changes)
    sections = {**found.manifest.sections, "gpu": {**gpu, **changes.get("gpu", {})}}
    return Situation(
        manifest=Manifest(node="node-0", sections=sections),
        hardware=found.hardware,
        layout=found.layout,
        limits=found.limits,
    )


def test_mi300x_memory_that_waits_to_be_retired_blocks(tools: Path, tmp_path: Path) -> None:
    expected = Finding(Level.BLOCKING, "gpu.devices.retired_pages", "no page retirement pending", "GPU 0, 1")
    assert judged(on_mi300x(tmp_path)) == [expected]


@pytest.mark.parametrize(
    ("changes", "where", "expected", "found"),
    [
        (
            {"gpu": {"topology_links": {"gpu_gpu": {"PCIE": 1}}}},
            "gpu.topology_links.gpu_gpu.XGMI", "1 pairs", "0",
        ),
        (
            {"environment": {"HIP_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "4,5"}},
            "environment.HIP_VISIBLE_DEVICES", "the same list of devices in all these variables",
            "HIP_VISIBLE_DEVICES=0,1, ROCR_VISIBLE_DEVICES=4,5",
        ),
    ],
)  # fmt: skip
def test_mi300x_links_and_lists_of_devices_are_checked(
    tools: Path, tmp_path: Path, changes: dict[str, Any], where: str, expected: str, found: str
) -> None:
    assert Finding(Level.BLOCKING, where, expected, found) in judged(on_mi300x(tmp_path, **changes))


@pytest.mark.parametrize(
    ("listed", "size", "expected"),
    [
        ("1", 1, None), ("3,1", 1, None), ("0,1,2,3", 4, None), ("0,1,4,5", 2, None), ("0,2", 0, None),
        ("0,2", 2, "2 consecutive GPU numbers for each inference server"),
        ("1,2,3,5", 4, "4 consecutive GPU numbers for each inference server"),
        ("GPU-13dc5e2c", 1, "numbers"), ("", 1, "numbers"), ("²", 1, "numbers"),
    ],
)  # fmt: skip
def test_an_inference_server_counts_its_gpus_up(listed: str, size: int, expected: str | None) -> None:
    given = situation(environment={"CUDA_VISIBLE_DEVICES": listed})
    found = judged(dataclasses.replace(given, gpus_per_engine=size))
    where = "environment.CUDA_VISIBLE_DEVICES"
    assert found == ([] if expected is None else [Finding(Level.BLOCKING, where, expected, listed)])


def test_mi300x_in_another_mode_is_another_product(tools: Path, tmp_path: Path) -> None:
    split = {"index": 0, "compute_partition": "CPX", "memory_partition": "NPS4"}
    assert judged(on_mi300x(tmp_path, gpu={"devices": [split], "topology_links": {}})) == [
        Finding(Level.BLOCKING, "gpu.devices.compute_partition", "SPX", "CPX"),
        Finding(Level.BLOCKING, "gpu.devices.memory_partition", "NPS1", "NPS4"),
    ]


def test_the_recorded_h200_is_judged_by_nvml_facts(tools: Path, tmp_path: Path) -> None:
    write_tool(tools, "nvidia-smi", SMI_ANSWERS)
    root = write_tree(tmp_path / "root", HOST | NETWORK | NVIDIA)
    gpu = gpu_nvidia.probe(root, FakeNvml())
    assert isinstance(gpu, dict)
    sections = {"host": host.probe(root), "network": network.probe(root), "gpu": gpu}
    found = situation(layout={"num_nodes": 2, "gpus_per_node": 2})
    found = Situation(
        manifest=Manifest(node="n", sections=sections),
        hardware=found.hardware,
        layout=found.layout,
        limits=found.limits,
    )
    gpu_findings = [str(finding) for finding in judged(found) if finding.where.startswith("gpu.")]
    assert gpu_findings == [
        "blocking: gpu.devices.remapped_rows: expected no row remapping pending, found GPU 1",
        "warning: gpu.devices.1.throttle_reasons: expected no slowdown, found hw_thermal_slowdown",
    ]


def node(name: str, **changes: Any) -> Manifest:
    return Manifest(node=name, sections=situation(**changes).manifest.sections)


def test_nodes_that_are_alike_have_no_findings() -> None:
    assert compare_nodes([node("a"), node("b")], Preflight()) == []
    assert compare_nodes([node("a")], Preflight()) == []


def test_nodes_must_share_the_facts_of_the_experiment() -> None:
    other = node("b", gpu={"count": 7}, code={"vime": {"commit": "2" * 40}})
    found = compare_nodes([node("a", gpu={"count": 8}, code={"vime": {"commit": "1" * 40}}), other], Preflight())
    assert found == [
        Finding(Level.BLOCKING, "nodes.b.code.vime.commit", f"the same as on a: {'1' * 40}", "2" * 40),
        Finding(Level.BLOCKING, "nodes.b.gpu.count", "the same as on a: 8", "7"),
    ]
    lenient = Preflight(policy={"nodes_alike": "warn"})
    found = compare_nodes([node("a", gpu={"count": 8}), node("b", gpu={"count": 7})], lenient)
    assert [item.level for item in found] == [Level.WARNING]


def test_nodes_of_two_nvlink_domains_and_two_clocks_are_found() -> None:
    fabric = {"state": "Completed", "status": "Success", "cluster_uuid": CLUSTER, "clique_id": 8}
    other = node("b", gpu={"fabric": fabric}, run_directory={"clock_skew_s": -4.9})
    assert compare_nodes([node("a"), other], Preflight()) == [
        Finding(Level.WARNING, "nodes.b.gpu.fabric", f"{CLUSTER}.7", f"{CLUSTER}.8"),
        Finding(Level.WARNING, "nodes.b.clock", "the same time as on a", "a difference of +5.0 s"),
    ]


def test_nodes_of_one_nvlink_domain_must_have_imex_channels() -> None:
    missing = {"imex_channels": Unknown("no channel")}
    expected = ("an IMEX channel for this job", "unknown (no channel)")
    assert compare_nodes([node("a"), node("b", gpu=missing)], Preflight()) == [
        Finding(Level.BLOCKING, "nodes.b.gpu.imex_channels", *expected)
    ]


@pytest.mark.parametrize("cluster", ["00000000-0000-0000-0000-000000000000", "one of its own"])
def test_nodes_with_their_own_switch_need_no_imex_channel(cluster: str) -> None:
    def alone(name: str) -> Manifest:
        uuid = cluster if cluster.startswith("0") else f"{cluster} {name}"
        fabric = {"state": "Completed", "status": "Success", "cluster_uuid": uuid, "clique_id": 0}
        return node(name, gpu={"fabric": fabric, "imex_channels": Unknown("no channel")})

    assert compare_nodes([alone("a"), alone("b")], Preflight()) == []
