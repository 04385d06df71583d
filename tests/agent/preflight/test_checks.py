"""Preflight checks: nothing on a good node, the right complaint for each thing that is wrong, the level by policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.agent.preflight import gpu as gpu_checks
from rlk_repro.agent.preflight.checks import BETWEEN_NODES, CHECKS, IN_RUN, IN_TRIAL, default_policies, judge
from rlk_repro.agent.preflight.facts import Facts
from rlk_repro.agent.preflight.gpu import find_toolkit
from rlk_repro.base.findings import Finding, Level
from rlk_repro.probes import gpu_amd, gpu_nvidia, host, network
from rlk_repro.probes.gpu_use import GpuUse
from rlk_repro.probes.installed import serves
from rlk_repro.rundir.manifest import Manifest, Unknown
from rlk_repro.spec import Layout, Preflight
from rlk_repro.spec.load import load_hardware
from tests import ROOT
from tests.support.job_examples import make_staged_facts
from tests.support.k8s.examples import num_nodes as num_nodes_of
from tests.support.k8s.examples import plan_for
from tests.support.probe_examples import (
    HOST,
    NETWORK,
    NVIDIA,
    NVML_ANSWERS,
    SMI_ANSWERS,
    FakeNvml,
    tools,
    write_amd,
    write_tool,
    write_tree,
)

__all__ = ["tools"]
DEVICE = {
    "name": "NVIDIA H200",
    "memory_total_mib": 143771,
    "compute_capability": "9.0",
    "nvlinks_up": 18,
    "ecc_uncorrected": 0,
    "remapped_rows": {"is_pending": False, "is_failed": False},
    "mig_mode": "disabled",
    "throttle_reasons": ["gpu_idle"],
}
PORT = {"state": "ACTIVE", "rate": "400 Gb/sec (4X NDR)"}
GOOD: Mapping[str, Mapping[str, Any]] = {
    "host": {"machine": "x86_64", "dev_shm_gib": 1007.8, "limits": {"nofile": {"soft": 1024, "hard": 1048576}}},
    "gpu": {
        "vendor": "nvidia",
        "count": 8,
        "driver": "580.159.04",
        "devices": [{"index": index, **DEVICE} for index in range(8)],
    },
    "network": {
        "rdma_devices": {"mlx5_0": {"ports": {"1": PORT}}, "mlx5_1": {"ports": {"1": PORT}}},
        "rdma_verbs": {"mlx5_0": "opens", "mlx5_1": "no verbs device"},
    },
    "code": {"packages": {"torch": "2.9.0+cu130"}, "rl_kernel": {"extension_architectures": ["sm_90"]}},
    "environment": {},
}


def situation(
    *, hardware: str = "h200", layout: Any = None, policy: Any = None, busy: Any = (), **changes: Any
) -> Facts:
    """The good node with some facts changed: ``host={"dev_shm_gib": …}``."""
    sections = {name: {**body, **changes.get(name, {})} for name, body in GOOD.items()}
    return Facts(
        manifest=Manifest(node="node-0", sections=sections),
        hardware=load_hardware(hardware).model,
        layout=Layout(**(layout or {"num_nodes": 2, "gpus_per_node": 8})),
        limits=Preflight(policy=policy or {}),
        busy=list(busy),
    )


def devices(**changes: object) -> dict[str, Any]:
    """All GPUs but the fourth are good."""
    return {"devices": [{"index": index, **DEVICE, **(changes if index == 3 else {})} for index in range(8)]}


judged = judge


BAD: dict[str, tuple[dict[str, Any], Level, tuple[str, str, str]]] = {
    "hardware": (
        {"gpu": {"devices": devices()["devices"][:4]}}, Level.BLOCKING,
        ("gpu.devices", "at least 8 GPUs in the manifest", "4"),
    ),
    "gpu_idle": (
        {"busy": [GpuUse(index=3, memory_used_mib=70_000)]},
        Level.BLOCKING,
        ("gpu", "idle", "GPU 3: 70000 MiB in use, processes: none visible"),
    ),
    "driver_toolkit": (
        {"gpu": {"driver": "570.86.15", "compat_libcuda": Unknown("absent")}},
        Level.BLOCKING,
        ("gpu.driver", "580 or newer for CUDA 13.0", "570.86.15"),
    ),
    "gpu_errors": (
        {"gpu": devices(ecc_uncorrected=2)}, Level.BLOCKING, ("gpu.devices.ecc_uncorrected", "0", "GPU 3"),
    ),
    "gpu_links": (
        {"gpu": devices(nvlinks_up=17)}, Level.BLOCKING, ("gpu.devices.3.nvlinks_up", "18", "17"),
    ),
    "gpu_partition": (
        {"gpu": devices(mig_mode="enabled")},
        Level.BLOCKING,
        ("gpu.devices.mig_mode", "disabled on all GPUs", "enabled on GPU 3"),
    ),
    "gpu_slowdown": (
        {"gpu": devices(throttle_reasons=["gpu_idle", "hw_thermal_slowdown"])},
        Level.WARNING,
        ("gpu.devices.3.throttle_reasons", "no slowdown", "hw_thermal_slowdown"),
    ),
    "rl_kernel_architecture": (
        {"code": {"rl_kernel": {"extension_architectures": ["sm_80", "sm_100a"]}}},
        Level.BLOCKING,
        ("code.rl_kernel.extension_architectures", "code for compute capability 9.0", "sm_80, sm_100a"),
    ),
    "other_runs": (
        {"host": {"other_runs": ["20261120T120000Z-0123abcd-4567"]}},
        Level.BLOCKING,
        ("host.other_runs", "no other run", "other runs: 20261120T120000Z-0123abcd-4567"),
    ),
    "shared_memory": ({"host": {"dev_shm_gib": 0.06}}, Level.WARNING, ("host.dev_shm_gib", "at least 1", "0.06")),
    "open_files": (
        {"host": {"limits": {"nofile": {"soft": 1024, "hard": 4096}}}},
        Level.WARNING,
        ("host.limits.nofile.hard", "at least 8192", "4096"),
    ),
    "rdma_opens": (
        {"network": {"rdma_verbs": {"mlx5_0": "no verbs device", "mlx5_1": "/dev/infiniband/uverbs1: Not found"}}},
        Level.BLOCKING,
        ("network.rdma_verbs", "a device with an active port that this process can open",
         "/dev/infiniband/uverbs1: Not found; no verbs device"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_each_problem_is_found_by_its_own_check_only(name: str) -> None:
    changes, level, finding = BAD[name]
    assert judged(situation(**changes)) == [Finding(level, *finding)]
    if name in default_policies():
        assert judged(situation(policy={name: "fail"}, **changes)) == [Finding(Level.BLOCKING, *finding)]
        assert judged(situation(policy={name: "pass"}, **changes)) == [Finding(Level.INFO, *finding)]


MNNVL, CUMEM, IPC = ["P2P/MNNVL"], ["P2P/CUMEM/read"], ["P2P/IPC"]
GDR, TCP, SHM = ["NET/IB/GDRDMA", "P2P/CUMEM"], ["NET/Socket", "P2P/IPC"], ["SHM/direct/direct"]


def fabric(clique: int = 1) -> dict[str, Any]:
    return {"gpu": {"fabric": {"cluster_uuid": "u", "clique_id": clique}}, "network": GOOD["network"]}


# what NCCL told on a kind of hardware with so many nodes: network, paths, mnnvl; and what was expected instead
@pytest.mark.parametrize(
    ("hardware", "num_nodes", "network", "paths", "mnnvl", "expected"),
    [
        ("gb200", 2, "IB", MNNVL, True, ""),
        ("gb200", 2, "IB", GDR, False, "NVLink between the nodes (MNNVL)"),
        ("gb200", 2, "IB", IPC, False, "NVLink between the nodes (MNNVL)"),
        ("gb200", 2, "IB", [*MNNVL, "NET/IB/0"], True, "NVLink between the nodes (MNNVL)"),
        ("gb200", 1, "none", CUMEM, False, ""),
        ("gb200", 1, "none", IPC, False, ""),
        ("h200", 1, "none", IPC, False, ""),
        ("h200", 1, "none", SHM, False, "NVLink or xGMI inside a node (P2P)"),
        ("h200", 1, "IB", ["NET/IB/0/Shared"], False, "NVLink or xGMI inside a node (P2P)"),
        ("h200", 2, "IB", GDR, False, ""),
        ("h200", 2, "Socket", TCP, False, "RDMA between the nodes"),
        ("h200", 2, "IB", ["NET/IB", "SHM/direct"], False, "NVLink or xGMI inside a node (P2P)"),
        ("mi300x", 1, "none", ["P2P/direct", "P2P/IPC"], False, ""),
        ("mi300x", 1, "none", SHM, False, "NVLink or xGMI inside a node (P2P)"),
        ("h200", 1, "none", [], False, ""),
    ],
)
def test_what_nccl_uses_is_judged_by_what_the_hardware_has(
    hardware: str, num_nodes: int, network: str, paths: list[str], mnnvl: bool, expected: str
) -> None:
    plan = plan_for("smoke", hardware, settings=num_nodes_of(hardware, num_nodes))
    nodes = [Manifest(node=f"n{number}", sections=fabric()) for number in range(num_nodes)]
    told = {"0": {"network": network, "paths": paths, "nvls": False, "mnnvl": mnnvl}, "1": {"unknown": "no log"}}
    facts = dataclasses.replace(make_staged_facts(plan), nodes=nodes, transports=told)
    found = judge(facts)
    assert [(item.level, item.expected) for item in found] == ([(Level.BLOCKING, expected)] if expected else [])
    if hardware == "gb200":  # racks of their own are connected by the network only
        apart = [Manifest(node=f"n{number}", sections=fabric(number)) for number in range(num_nodes)]
        assert num_nodes == 1 or judge(dataclasses.replace(facts, nodes=apart)) == []
    lenient = Preflight(policy={"nccl_transport": "warn"})
    assert {item.level for item in judge(dataclasses.replace(facts, limits=lenient))} <= {Level.WARNING}


def test_every_row_has_its_own_name_an_example_and_a_line_in_the_page() -> None:
    names = [check.name for check in CHECKS]
    elsewhere = {check.name for check in (*IN_RUN, *BETWEEN_NODES, *IN_TRIAL)}
    page = (ROOT / "docs" / "preflight.md").read_text()
    assert len(set(names)) == len(names)
    assert set(BAD) | elsewhere | {"gpu_visibility"} == set(names)
    assert [check.name for check in CHECKS if f"| `{check.name}` | {check.policy or 'always'} |" not in page] == []


def test_a_run_without_gpus_skips_checks_of_disturbed_times() -> None:
    changes: dict[str, Any] = {}
    for facts, _, _ in BAD.values():
        for section, body in facts.items():
            changes[section] = {**changes.get(section, {}), **body} if isinstance(body, dict) else body
    found = judged(situation(hardware="cpu", layout={"num_nodes": 1}, **changes))
    assert found == []


DOWN = {"rdma_devices": {"a": {"ports": {"1": {"state": "DOWN"}}}}}
UNKNOWN = Unknown("nvidia-smi reports [Unknown Error]")
NO_ANSWER = Unknown("nvidia-smi reports [N/A]")
NOT_SUPPORTED = {"state": "Not Supported", "status": UNKNOWN}
DEVICES = devices()["devices"]
LINKS = "\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\n" + "".join(f"GPU{row}\t{{}}\tPIX\n" for row in range(4))


def matrix(lame: str = "NODE", gpus: tuple[int, ...] = (2,), others: str = "NV18") -> Any:
    """``nvidia-smi topo -m`` of four GPUs.

    ``lame`` is the link of the named GPU to all others, or of the one pair that two GPUs form.
    """
    rows = []
    for row in range(4):
        ends = [{row, column} for column in range(4)]
        bad = [pair == set(gpus) for pair in ends]
        if len(gpus) == 1:
            bad = [gpus[0] in pair for pair in ends]
        cells = [lame if is_bad else others for is_bad in bad]
        rows.append("\t".join([*cells[:row], " X ", *cells[row + 1 :]]))
    return {"topology_text": LINKS.format(*rows)}


@pytest.mark.parametrize(
    "facts",
    [
        situation(),
        situation(layout={"gpus_per_node": 8}, network=DOWN),  # one node needs no network
        situation(layout={"gpus_per_node": 1}, gpu=devices(nvlinks_up=0)),  # one GPU needs no links
        situation(gpu=devices(fabric=NOT_SUPPORTED)),
        situation(gpu={"devices": [{**device, "temperature_c": NO_ANSWER} for device in DEVICES]}),
        situation(gpu=matrix(lame="NV18")),
    ],
)
def test_what_is_good_or_not_used_or_never_answered_has_no_finding(facts: Facts) -> None:
    assert judged(facts) == []


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
def test_the_toolkit_is_that_of_torch_or_of_the_runtime_beside_it(
    packages: dict[str, Any], toolkit: str | None
) -> None:
    of_image = packages.get("CUDA_VERSION", Unknown("not set"))
    assert find_toolkit(packages, of_image) == toolkit


@pytest.mark.parametrize(
    ("driver", "compat", "is_fine"), [("570.86.15", "580.95.05", True), ("550.54.15", "570.86.15", False)]
)
def test_forward_compatibility_counts_as_a_driver(driver: str, compat: Any, is_fine: bool) -> None:
    found = judged(situation(gpu={"driver": driver, "compat_libcuda": compat}))
    assert (found == []) is is_fine


@pytest.mark.parametrize(
    ("architecture", "capability", "is_served"),
    [
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


def on_mi300x(tmp_path: Path, **changes: Any) -> Facts:
    """The two MI300X that the probes' own example shows."""
    gpu = gpu_amd.probe(write_amd(tmp_path / "root"))
    assert isinstance(gpu, dict)
    found = situation(hardware="mi300x", layout={"gpus_per_node": 2}, **changes)
    sections = {**found.manifest.sections, "gpu": {**gpu, **changes.get("gpu", {})}}
    return dataclasses.replace(found, manifest=Manifest(node="node-0", sections=sections))


def test_mi300x_memory_that_waits_to_be_retired_blocks(tools: Path, tmp_path: Path) -> None:
    expected = Finding(Level.BLOCKING, "gpu.devices.retired_pages", "no page retirement pending", "GPU 0, 1")
    assert judged(on_mi300x(tmp_path)) == [expected]


def test_mi300x_links_and_lists_of_devices_are_checked(tools: Path, tmp_path: Path) -> None:
    facts = on_mi300x(
        tmp_path,
        gpu={"topology_links": {"gpu_gpu": {"PCIE": 1}}},
        environment={"HIP_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "4,5"},
    )
    found = {item.where: (item.level, item.expected, item.found) for item in judged(facts)}
    where = "gpu.topology_links.gpu_gpu.XGMI"
    assert found[where] == (Level.BLOCKING, "1 pairs", "0")
    assert found["environment.HIP_VISIBLE_DEVICES"] == (
        Level.BLOCKING,
        "the same list of devices in all these variables",
        "HIP_VISIBLE_DEVICES=0,1, ROCR_VISIBLE_DEVICES=4,5",
    )


@pytest.mark.parametrize(
    ("listed", "size", "expected"),
    [
        ("1", 1, None), ("3,1", 1, None), ("0,1,2,3", 4, None), ("0,1,4,5", 2, None),
        ("0,2", 0, None),
        ("0,2", 2, "2 consecutive GPU numbers for each inference server"),
        ("1,2,3,5", 4, "4 consecutive GPU numbers for each inference server"),
        ("GPU-13dc5e2c", 1, "numbers"), ("", 1, "numbers"), ("²", 1, "numbers"),
    ],
)  # fmt: skip
def test_an_inference_server_counts_its_gpus_up(
    monkeypatch: pytest.MonkeyPatch, listed: str, size: int, expected: str | None
) -> None:
    monkeypatch.setattr(gpu_checks, "find_engine_size", lambda _: size)
    found = judged(situation(environment={"CUDA_VISIBLE_DEVICES": listed}))
    where = "environment.CUDA_VISIBLE_DEVICES"
    assert found == ([] if expected is None else [Finding(Level.BLOCKING, where, expected, listed)])


def test_mi300x_in_another_mode_is_another_product(tools: Path, tmp_path: Path) -> None:
    split = {"index": 0, "compute_partition": "CPX", "memory_partition": "NPS4"}
    found = judged(on_mi300x(tmp_path, gpu={"devices": [split], "topology_links": {}}))
    assert [item for item in found if "partition" in item.where] == [
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
    found = dataclasses.replace(found, manifest=Manifest(node="n", sections=sections))
    assert "GPU0" in str(gpu["topology_text"])  # what check_links reads
    gpu_findings = [str(finding) for finding in judged(found) if finding.where.startswith("gpu.")]
    assert gpu_findings == [
        "blocking: gpu.devices.remapped_rows: expected no row remapping pending, found GPU 1",
        "warning: gpu.devices.1.throttle_reasons: expected no slowdown, found hw_thermal_slowdown",
    ]


def node(name: str, **changes: Any) -> Manifest:
    return Manifest(node=name, sections=situation(**changes).manifest.sections)


def compared(*nodes: Manifest, **policy: str) -> list[Finding]:
    return judged(dataclasses.replace(situation(policy=policy), nodes=nodes))


def test_nodes_must_share_the_facts_of_the_experiment() -> None:
    assert compared(node("a"), node("b")) == []
    other = node("b", gpu={"count": 7}, code={"vime": {"commit": "2" * 40}})
    found = compared(node("a", gpu={"count": 8}, code={"vime": {"commit": "1" * 40}}), other)
    assert found == [
        Finding(Level.BLOCKING, "nodes.b.code.vime.commit", f"the same as on a: {'1' * 40}", "2" * 40),
        Finding(Level.BLOCKING, "nodes.b.gpu.count", "the same as on a: 8", "7"),
    ]
    lenient = compared(node("a", gpu={"count": 8}), node("b", gpu={"count": 7}), nodes_alike="warn")
    assert [item.level for item in lenient] == [Level.WARNING]


@pytest.mark.parametrize(
    ("facts", "level", "where", "found"),
    [
        (devices(ecc_mode=Unknown("NVML: GPU requires reset")), "blocking", "gpu.devices.ecc_mode", "GPU 3: "),
        (devices(temperature_c=Unknown("nvidia-smi reports [GPU is lost]")), "blocking", "gpu.devices.temp", "GPU 3: "),
        (devices(ecc_uncorrected=UNKNOWN), "blocking", "gpu.devices.ecc_uncorrected",
         "GPU 3: unknown (nvidia-smi"),
        (devices(mig_mode=Unknown("nvidia-smi: 'ERR!' is not")), "blocking",
         "gpu.devices.mig_mode", "GPU 3: "),
        (devices(name="NVIDIA H200", mig_mode=NO_ANSWER), "warning", "gpu.devices.mig_mode",
         "GPU 3: "),
        (matrix(), "blocking", "gpu.topology_text",
         "GPU0-GPU2 NODE, GPU1-GPU2 NODE, GPU2-GPU3 NODE"),
        (matrix(lame="SYS", gpus=(0,)), "blocking", "gpu.topology_text",
         "GPU0-GPU1 SYS, GPU0-GPU2 SYS"),
        (matrix(lame="NV16"), "blocking", "gpu.topology_text", "GPU0-GPU2 NV16"),
        (matrix(lame="PHB", gpus=(1, 3)), "blocking", "gpu.topology_text", "GPU1-GPU3 PHB"),
        (matrix(lame="SYS", others="SYS"), "blocking", "gpu.topology_text", "GPU0-GPU1 SYS"),
        (devices(nvlinks_up=Unknown("NVML: Not Supported")), "blocking", "gpu.devices.3.nvlinks_up", "unknown"),
        (devices(fabric={"state": "In Progress"}), "blocking", "gpu.devices.3.fabric.state", "In Progress"),
        (devices(fabric={"state": "Completed", "status": "Insufficient Resources"}), "blocking",
         "gpu.devices.3.fabric.status", "Insufficient"),
        (devices(fabric={"health": "bandwidth: degraded"}), "blocking", "gpu.devices.3.fabric.health", "bandwidth"),
    ],
)  # fmt: skip
def test_a_gpu_that_does_not_answer_or_has_no_links_is_named(
    facts: dict[str, Any], level: str, where: str, found: str
) -> None:
    findings = [item for item in judged(situation(gpu=facts)) if item.where.startswith(where)]
    assert [(item.level, item.found[: len(found)]) for item in findings] == [(level, found)]


@pytest.mark.parametrize(
    ("mask", "health"),
    [
        (0x1AA, "healthy"),
        (0x1A9, "bandwidth: degraded"),
        (0x19A, "route unhealthy"),
        (0x16A, "access timeout recovery"),
        (0x2AA, "incorrect configuration"),
        (0x1A6, "route recovery in progress"),
    ],
)
def test_nvml_s_health_mask_is_read(mask: int, health: str) -> None:
    def fill(_: int, info: Any) -> None:
        info._obj.state, info._obj.healthMask = 3, mask

    answers = {**NVML_ANSWERS, "nvmlDeviceGetGpuFabricInfoV": fill}
    fabrics: list[Any] = [device["fabric"] for device in gpu_nvidia.read_devices(FakeNvml(answers=answers))]
    assert {fabric["health"] for fabric in fabrics} == {health}


@pytest.mark.parametrize(
    ("paths", "version"),
    [
        (("cuda/compat/lib.real/libcuda.so.580.82.07", "cuda/compat/lib.real/libcuda.so.1"), "580.82.07"),
        (("cuda/compat/lib/libcuda.so.575.57.08",), "575.57.08"),
        (("cuda-13.1/compat/libcuda.so.590.44.01",), "590.44.01"),
        (("cuda-13.2/compat/lib.real/libcuda.so.595.45.04",), "595.45.04"),
        (("cuda/compat/libcuda.so.99.1", "cuda/compat/libcuda.so.580.65.06"), "580.65.06"),
    ],
)
def test_forward_compatibility_is_found_where_images_keep_it(
    tools: Path, tmp_path: Path, paths: tuple[str, ...], version: str
) -> None:
    write_tool(tools, "nvidia-smi", SMI_ANSWERS)
    root = write_tree(tmp_path / "root", {f"/usr/local/{path}": "" for path in paths})
    facts = gpu_nvidia.probe(root, FakeNvml())
    assert isinstance(facts, dict)
    assert facts["compat_libcuda"] == version


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("S: 132Mhz *\n0: 500Mhz\n1: 2100Mhz", {"current": 132, "max": 2100}),
        ("0: 500Mhz\n1: 1725Mhz *\n2: 2100Mhz", {"current": 1725, "max": 2100}),
        ("s: 95 MHz *\n0: 900MHz", {"current": 95, "max": 900}),
        ("0: 500Mhz\n1: 2100Mhz", {"max": 2100}),
        ("", {}),
    ],
)
def test_amd_s_levels_are_read_in_deep_sleep_too(text: str, levels: dict[str, int]) -> None:
    assert gpu_amd.parse_levels(text) == levels
