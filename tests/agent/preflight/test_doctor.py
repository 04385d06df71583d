from dataclasses import replace
from typing import Any

import pytest

from rlk_repro.agent.preflight.checks import CHECKS
from rlk_repro.agent.preflight.doctor import (
    ADVICE,
    JUDGES,
    Diagnosis,
    Health,
    Surroundings,
    diagnose,
    look_around,
)
from rlk_repro.probes.gpu_use import GpuUse
from rlk_repro.probes.node import probe_node
from rlk_repro.rundir.manifest import Manifest, Unknown
from rlk_repro.spec.load import load_hardware

DEVICE = {
    "index": 0,
    "name": "NVIDIA H200",
    "mig_mode": "disabled",
    "ecc_mode": "enabled",
    "ecc_uncorrected": 0,
    "remapped_rows": {"is_pending": False, "is_failed": False},
    "throttle_reasons": ["gpu_idle"],
}
GOOD: dict[str, dict[str, Any]] = {
    "host": {
        "memory_available_gib": 1900.5,
        "cgroup_memory_max_gib": "unlimited",
        "num_cpus": 224,
        "num_cpus_usable": 224,
        "cgroup_cpu_max": 16.0,
        "governor": "performance",
        "dev_shm_gib": 1007.8,
        "limits": {"nofile": {"soft": 1048576, "hard": 1048576}},
        "clock_source": "tsc",
        "numa_balancing": 0,
    },
    "gpu": {
        "vendor": "nvidia",
        "count": 2,
        "driver": "580.159.04",
        "devices": [DEVICE, DEVICE | {"index": 1}],
        "fabric": {"state": "Completed", "status": "Success"},
    },
    "code": {
        "python": "3.11.9",
        "packages": {"torch": "2.11.0"},
        "rl_kernel": {"is_compiled": True, "extension_symbols": ["fused_logp"]},
    },
}
AROUND = Surroundings(
    disk_free_bytes=500 << 30,
    can_make_runs=True,
    tools=frozenset({"git", "enroot"}),
    clients={"sbatch": True, "kubectl": False},
    modules=frozenset({"torch"}),
    busy=[],
    now_s=2000.0,
    installed_s=1000.0,
)


def manifest(**changes: Any) -> Manifest:
    """The good node with some facts changed: ``host={"governor": …}``."""
    return Manifest(node="n", sections={name: body | changes.get(name, {}) for name, body in GOOD.items()})


H200 = load_hardware("h200").model


def judged(name: str, *, around: Surroundings = AROUND, **changes: Any) -> Diagnosis:
    return next(check for check in diagnose(manifest(**changes), around, H200) if check.name == name)


def test_a_good_node_has_nothing_to_advise():
    checks = diagnose(manifest(), AROUND, H200)
    assert [check for check in checks if check.status is not Health.OK or check.advice] == []
    assert [check.name for check in checks][-1] == "preflight"
    assert checks[-1].found == f"{len(CHECKS)} of {len(CHECKS)} checks passed"
    assert len({check.name for check in checks}) == len(JUDGES) + 1


@pytest.mark.parametrize(
    ("name", "changes", "status", "found", "advice"),
    [
        ("memory", {"host": {"cgroup_memory_max_gib": 1.5}}, "fail", "1.5 GiB usable", "raise the memory limit"),
        (
            "processors",
            {"host": {"cgroup_cpu_max": 1.0}},
            "warn",
            "usable CPUs: 1, in the machine: 224",
            "at least 2 CPUs",
        ),
        ("governor", {"host": {"governor": "powersave"}}, "warn", "powersave, expected performance", "cpupower"),
        ("shared_memory", {"host": {"dev_shm_gib": 0.06}}, "warn", "0.06, expected at least 1", "--ipc=host"),
        (
            "open_files",
            {"host": {"limits": {"nofile": {"soft": 1024, "hard": 1024}}}},
            "warn",
            "hard 1024",
            "ulimit -Hn",
        ),
        ("clock_source", {"host": {"clock_source": "hpet"}}, "warn", "hpet", "clocksource=tsc"),
        ("numa_balancing", {"host": {"numa_balancing": 1}}, "warn", "1, expected 0", "sysctl"),
        ("gpus", {"gpu": {"vendor": "none", "count": 0}}, "warn", "none", "--hardware cpu"),
        ("gpus", {"gpu": {"count": Unknown("no driver")}}, "fail", "nvidia: no driver", "install the driver"),
        ("gpu_fabric", {"gpu": {"fabric": {"state": "Not Started", "status": "x"}}}, "fail", "Not Started", "restart"),
        ("rl-kernel", {"code": {"rl_kernel": {"is_compiled": False}}}, "warn", "without its", "GPU is visible"),
        ("rl-kernel", {"code": {"rl_kernel": {"is_compiled": Unknown("no")}}}, "warn", "no", "install RL-Kernel for"),
    ],
)
def test_each_fault_is_named_with_one_next_step(name, changes, status, found, advice):
    check = judged(name, **changes)
    assert check.status == status
    assert found in check.found
    assert advice in check.advice


@pytest.mark.parametrize(
    ("name", "device", "status", "found"),
    [
        (
            "gpu_memory_repair",
            {"remapped_rows": {"is_failed": True}},
            "fail",
            "GPU 1, expected no row remapping failed",
        ),
        ("gpu_memory_repair", {"remapped_rows": {"is_pending": True}}, "fail", "GPU 1, expected no row remapping p"),
        ("gpu_errors", {"ecc_uncorrected": 3}, "fail", "GPU 1, expected 0"),
        ("gpu_ecc_mode", {"ecc_mode": "disabled"}, "warn", "disabled on GPU 1, expected enabled on all GPUs"),
        ("gpu_partition", {"mig_mode": "enabled"}, "fail", "enabled on GPU 1, expected disabled on all GPUs"),
        ("gpu_partition", {"compute_partition": "CPX"}, "fail", "CPX, expected SPX"),
        ("gpu_partition", {"memory_partition": "NPS4"}, "fail", "NPS4, expected NPS1"),
        ("preflight", {"memory_partition": Unknown("absent")}, "ok", "checks passed"),
        ("gpu_slowdown", {"throttle_reasons": ["hw_thermal_slowdown"]}, "warn", "hw_thermal_slowdown, expected no"),
        ("preflight", {"throttle_reasons": ["sw_power_cap"]}, "ok", "checks passed"),
    ],
)
def test_a_fault_of_one_gpu_names_it(name, device, status, found):
    check = judged(name, gpu={"devices": [DEVICE, DEVICE | {"index": 1} | device]})
    assert check.status == status
    assert found in check.found


def test_advice_is_for_checks_that_there_are():
    assert ADVICE.keys() - {check.name for check in CHECKS} == set()


@pytest.mark.parametrize(
    ("name", "around", "status", "found"),
    [
        ("disk", {"disk_free_bytes": 1 << 20}, "fail", "1.0 MiB free for runs"),
        ("disk", {"disk_free_bytes": 10 << 30}, "warn", "10.0 GiB free for runs"),
        ("disk", {"can_make_runs": False}, "fail", "cannot create a run directory here"),
        ("git", {"tools": frozenset()}, "warn", "not found on PATH"),
        (
            "scheduler",
            {"clients": {"sbatch": False, "kubectl": False}},
            "warn",
            "none of sbatch, kubectl found on PATH",
        ),
        ("containers", {"tools": frozenset()}, "warn", "no container runtime found"),
        ("torch", {"modules": frozenset()}, "warn", "not installed"),
        ("clock", {"now_s": 5.0}, "fail", "the clock shows a time before rlk-repro's installation"),
        ("gpu use", {"busy": Unknown("no answer")}, "warn", "no answer"),
    ],
)
def test_facts_outside_the_manifest_are_judged_too(name, around, status, found):
    check = judged(name, around=replace(AROUND, **around))
    assert (check.status, check.found) == (status, found)
    assert check.advice


def test_a_gpu_in_use_names_the_process():
    busy = [GpuUse(index=1, memory_used_mib=9000, pids=(77,))]
    check = judged("gpu use", around=replace(AROUND, busy=busy))
    assert check.found == "GPU 1: 9000 MiB in use, processes: 77"


def test_an_empty_manifest_is_judged_without_an_error():
    checks = diagnose(Manifest(node="n"), AROUND, H200)
    assert len(checks) == len(JUDGES) + 1
    assert Health.FAIL in {check.status for check in checks}


def test_a_place_that_allows_no_folder_differs_from_one_that_does_not_exist_yet(tmp_path, monkeypatch):
    assert look_around(tmp_path / "not" / "made yet", []).can_make_runs
    (tmp_path / "file").write_text("")
    assert not look_around(tmp_path / "file", []).can_make_runs
    assert not look_around(tmp_path / "file" / "runs", []).can_make_runs
    monkeypatch.setattr("os.access", lambda *_: False)
    assert not look_around(tmp_path, []).can_make_runs


def test_this_machine_can_be_diagnosed(tmp_path):
    around = look_around(tmp_path / "not" / "made yet", [])
    checks = diagnose(probe_node("here"), around, H200)
    assert around.disk_free_bytes > 0
    assert all(bool(check.advice) == (check.status is not Health.OK) for check in checks)
    assert checks[0].to_json() == {"name": "python", "status": "ok", "found": checks[0].found, "advice": ""}
