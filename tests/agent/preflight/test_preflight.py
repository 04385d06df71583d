"""Is a node fit?"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from rlk_repro.agent.node import make_facts
from rlk_repro.agent.preflight import host
from rlk_repro.agent.preflight.checks import judge
from rlk_repro.agent.preflight.facts import Facts
from rlk_repro.agent.preflight.gpu import check_hardware, find_busy, wait_until_idle
from rlk_repro.agent.preflight.host import check_modules, check_rl_kernel, check_writable, require_room
from rlk_repro.base.findings import Finding, Level
from rlk_repro.images.running import find_pinned
from rlk_repro.probes.gpu_use import GpuUse
from rlk_repro.probes.host import read_free_memory
from rlk_repro.rundir.manifest import Fact, Manifest, Unknown
from rlk_repro.rundir.paths import RunDir
from rlk_repro.sources import RL_KERNEL
from rlk_repro.spec import Hardware, Layout, Pin, Preflight, Variant
from rlk_repro.spec.load import load_hardware
from tests.support.job_examples import PROFILE, SETTINGS, make_example_plan, make_staged, make_staged_facts

GIB = 1 << 30


def manifest_of(machine: str = "x86_64", **gpu: Fact) -> Manifest:
    return Manifest(node="node-0", sections={"host": {"machine": machine}, "gpu": gpu})


def judged_hardware(model: Hardware, manifest: Manifest) -> list[Finding]:
    layout = Layout(gpus_per_node=8)
    return list(check_hardware(Facts(manifest=manifest, hardware=model, layout=layout, limits=Preflight())))


def test_this_machine_is_fit_for_a_small_cpu_run(tmp_path: Path) -> None:
    plan, run_dir = make_staged(tmp_path / "run")
    facts = make_facts(plan, manifest_of(os.uname().machine))
    found = judge(dataclasses.replace(facts, staged=(plan, run_dir)))
    assert [finding for finding in found if finding.level is not Level.INFO] == []
    assert list(run_dir.trials.iterdir()) == []


def test_a_run_directory_that_cannot_be_written_blocks(tmp_path: Path) -> None:
    (tmp_path / "trials").write_text("in the way")
    found = list(check_writable(make_staged_facts(make_example_plan()[0], RunDir(tmp_path))))
    assert found == [Finding(Level.BLOCKING, "run directory", "writable", "File exists")]


@pytest.mark.parametrize(
    ("free_bytes", "expected"),
    [
        (2 * GIB, []),
        (GIB // 2, [Finding(Level.BLOCKING, "disk", "1 GiB free", "0.5 GiB")]),
        (None, [Finding(Level.WARNING, "disk", "1 GiB free", "an unknown amount of free disk")]),
    ],
)
def test_too_little_room_blocks(free_bytes: int | None, expected: list[Finding]) -> None:
    assert list(require_room("disk", free_bytes, 1.0)) == expected


def test_free_memory_is_read_from_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:   2048 kB\n")
    assert read_free_memory(tmp_path / "meminfo") == 2 << 20
    assert read_free_memory(tmp_path / "absent") is None


def test_a_missing_module_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "is_found", lambda name, _: name != "torch")
    found = list(check_modules(make_staged_facts(make_example_plan()[0])))
    expected = "installed: python -m pip install 'rlk-repro[local]'"
    assert found == [Finding(Level.BLOCKING, "python module torch", expected, "missing")]


NOT_INSTALLED = "missing: the enabled variant uses the trainer's own functions"
FALLBACK = Finding(Level.INFO, "python module no_such_module", "installed", NOT_INSTALLED)
MISSING = Finding(Level.BLOCKING, "python module no_such_module", "installed (rl_kernel.mode is require)", "missing")


@pytest.mark.parametrize(
    ("module", "mode", "variants", "expected"),
    [
        ("json", "require", ("baseline", "enabled"), []),
        ("no_such_module", "auto", ("baseline", "enabled"), [FALLBACK]),
        ("no_such_module", "require", ("baseline", "enabled"), [MISSING]),
        ("no_such_module", "require", ("baseline",), []),
    ],
)
def test_a_missing_rl_kernel_blocks_only_where_it_is_required(
    monkeypatch: pytest.MonkeyPatch, module: str, mode: str, variants: tuple[Variant, ...], expected: list[Finding]
) -> None:
    monkeypatch.setattr(host, "RL_KERNEL", dataclasses.replace(RL_KERNEL, module=module))
    plan = make_example_plan((*SETTINGS, f"rl_kernel.mode={mode}"))[0]
    assert list(check_rl_kernel(make_staged_facts(dataclasses.replace(plan, variants=variants)))) == expected


@pytest.mark.parametrize(("name", "expected"), [("implementation", []), ("baseline_implementation", [MISSING])])
def test_torch_compile_needs_no_rl_kernel(monkeypatch: pytest.MonkeyPatch, name: str, expected: list[Finding]) -> None:
    monkeypatch.setattr(host, "RL_KERNEL", dataclasses.replace(RL_KERNEL, module="no_such_module"))
    settings = (*SETTINGS, "rl_kernel.mode=require", f"rl_kernel.{name}=torch-compile")
    plan = make_example_plan(settings)[0]
    assert list(check_rl_kernel(make_staged_facts(plan))) == expected
    pin = Pin(repository="https://example.org/rl-kernel", commit="1" * 40)
    stack = plan.stack.model_copy(update={"pins": {"rl_kernel": pin}})
    assert bool(find_pinned(dataclasses.replace(plan, stack=stack)).pins) is bool(expected)


def test_an_rl_kernel_on_the_trainers_own_path_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "RL_KERNEL", dataclasses.replace(RL_KERNEL, module="only_there"))
    (tmp_path / "only_there").mkdir()
    (tmp_path / "only_there" / "__init__.py").touch()
    profile = PROFILE + f"env: {{PYTHONPATH: {tmp_path}}}\n".encode()
    assert list(check_rl_kernel(make_staged_facts(make_example_plan(profile=profile)[0]))) == []


def gpus(name: str, memory_mib: object, count: int = 8) -> list[dict[str, object]]:
    return [{"name": name, "memory_total_mib": memory_mib}] * count


H200S = gpus("NVIDIA H200", 143771)


@pytest.mark.parametrize(
    ("machine", "gpu", "expected"),
    [
        ("x86_64", {"count": 8, "driver": "570.86.15", "devices": H200S}, []),
        ("aarch64", {"count": 8, "devices": H200S}, [("host.machine", "x86_64", "aarch64")]),
        (
            "x86_64",
            {"count": Unknown("no driver"), "devices": Unknown("no driver")},
            [("gpu.devices", "at least 8 GPUs in the manifest", "unknown (no driver)")],
        ),
        ("x86_64", {"count": 8}, [("gpu.devices", "at least 8 GPUs in the manifest", "unknown (not recorded)")]),
        ("x86_64", {"count": 8, "driver": "470.1", "devices": H200S}, [("gpu.driver", "525 or newer", "470.1")]),
        (
            "x86_64",
            {"count": 8, "devices": [*gpus("NVIDIA A100-SXM4-80GB", 143771, 4), *gpus("NVIDIA H200 NVL", 143771, 4)]},
            [("gpu.devices.name", "*", "NVIDIA A100-SXM4-80GB"), ("gpu.devices.name", "*", "NVIDIA H200 NVL")],
        ),
    ],
)
def test_another_machine_than_the_plan_names_blocks(
    machine: str, gpu: dict[str, Fact], expected: list[tuple[str, str, str]]
) -> None:
    h200 = load_hardware("h200").model.model_copy(update={"driver_floor": "525"})
    found = judged_hardware(h200, manifest_of(machine, **gpu))
    assert found == [Finding(Level.BLOCKING, where, h200.title if want == "*" else want, got)
                     for where, want, got in expected]  # fmt: skip


@pytest.mark.parametrize(
    ("hardware", "memory_mib", "level", "found"),
    [
        ("a100", 81920, None, ""),
        ("a100", 81251, None, ""),
        ("gb200", 189471, None, ""),
        ("mi300x", 196592, None, ""),
        ("a100", 40960, Level.BLOCKING, "40.0 GiB"),
        ("a100", 96 * 1024, Level.BLOCKING, "96.0 GiB"),
        ("a100", Unknown("no answer"), Level.WARNING, "unknown (no answer)"),
    ],
)
def test_memory_is_that_which_drivers_report_for_the_product(
    hardware: str, memory_mib: object, level: Level | None, found: str
) -> None:
    model = load_hardware(hardware).model
    devices = gpus(model.name_part, memory_mib)
    findings = judged_hardware(model, manifest_of(model.machine, count=8, devices=devices))
    assert [(item.level, item.found) for item in findings] == ([(level, found)] if level else [])


def test_unknown_use_of_gpus_is_a_warning() -> None:
    unknown = list(find_busy(Unknown("no driver"), Level.BLOCKING))
    assert unknown == [Finding(Level.WARNING, "gpu", "idle", "unknown (no driver)")]


def test_waiting_for_idle_gpus_ends_when_they_are_idle_with_the_deadline_or_at_a_stop() -> None:
    busy = [GpuUse(index=0, memory_used_mib=9000)]
    answers = [busy, busy, []]
    assert wait_until_idle(lambda: answers.pop(0), lambda _: False, 10) == []
    assert wait_until_idle(lambda: busy, lambda _: False, 0) == busy
    assert wait_until_idle(lambda: busy, lambda _: True, 1e9) == busy
