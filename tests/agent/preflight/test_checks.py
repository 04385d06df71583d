"""Preflight checks: nothing on a good node, the right complaint for each thing that is wrong, the level by policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.agent.preflight import gpu as gpu_checks
from rlk_repro.agent.preflight.checks import CHECKS, between_nodes, default_policies, find_unused, in_run, judge
from rlk_repro.agent.preflight.facts import Facts
from rlk_repro.agent.preflight.gpu import find_toolkit
from rlk_repro.base.findings import Finding, Level
from rlk_repro.probes import gpu_amd, gpu_nvidia, host, network
from rlk_repro.probes.extension import serves
from rlk_repro.probes.gpu_use import GpuUse
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
    "host": {
        "machine": "x86_64",
        "dev_shm_gib": 1007.8,
        "limits": {"nofile": {"soft": 1024, "hard": 1048576}},
    },
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


def test_a_good_node_has_no_findings() -> None:
    assert judged(situation()) == []


def test_of_an_unknown_node_only_its_gpus_are_missed() -> None:
    nothing = dataclasses.replace(situation(), manifest=Manifest(node="n"))
    assert [item.where for item in judged(nothing)] == ["gpu.count", "gpu.devices"]


BAD: dict[str, tuple[dict[str, Any], Level, tuple[str, str, str]]] = {
    "hardware": ({"gpu": {"count": 4}}, Level.BLOCKING, ("gpu.count", "at least 8", "4")),
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
def test_each_problem_is_found_by_its_own_check_only(name: CheckName) -> None:
    changes, level, finding = BAD[name]
    assert judged(situation(**changes)) == [Finding(level, *finding)]
    if name in default_policies():
        assert judged(situation(policy={name: "fail"}, **changes)) == [Finding(Level.BLOCKING, *finding)]
        assert judged(situation(policy={name: "pass"}, **changes)) == [Finding(Level.INFO, *finding)]


def test_every_row_has_its_own_name_an_example_and_a_line_in_the_page() -> None:
    names = [check.name for check in CHECKS]
    elsewhere = {check.name for check in CHECKS if check.applies in {in_run, between_nodes}}
    page = (ROOT / "docs" / "preflight.md").read_text()
    assert len(set(names)) == len(names)
    assert set(BAD) | elsewhere | {"gpu_visibility"} == set(names)
    assert [check.name for check in CHECKS if f"| `{check.name}` | {check.policy or 'always'} |" not in page] == []


def test_a_profile_may_still_name_a_check_that_went() -> None:
    kept = Preflight(policy={"gpu_idle": "warn"})
    assert list(find_unused(kept)) == []
    found = list(find_unused(Preflight(policy={"governor": "fail", "imex": "pass"}, max_file_latency_ms=5.0)))
    assert [item.level for item in found] == [Level.WARNING]
    assert found[0].found.startswith("governor, imex, max_file_latency_ms: no longer checked")


def test_a_run_without_gpus_skips_checks_of_disturbed_times() -> None:
    changes: dict[str, Any] = {}
    for facts, _, _ in BAD.values():
        for section, body in facts.items():
            changes[section] = {**changes.get(section, {}), **body} if isinstance(body, dict) else body
    found = judged(situation(hardware="cpu", layout={"num_nodes": 1}, **changes))
    assert found == []


def test_one_node_is_not_asked_about_the_network() -> None:
    changes: dict[str, Any] = {"network": {"rdma_devices": {"a": {"ports": {"1": {"state": "DOWN"}}}}}}
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
