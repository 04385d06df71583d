"""Tell what this machine can run: preflight's findings about it, and what is there for a run or a submission.

The doctor changes nothing and submits nothing.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rlk_repro.agent.preflight.checks import find_checks
from rlk_repro.agent.preflight.facts import Facts
from rlk_repro.agent.preflight.host import find_little_room
from rlk_repro.base.disk import can_make, find_existing
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.units import format_bytes
from rlk_repro.probes.gpu import NO_VENDOR, busy_gpus
from rlk_repro.rundir.manifest import Manifest, Unknown
from rlk_repro.spec import Hardware, Layout, Preflight

ENGINES: Final = ("docker", "podman", "enroot", "apptainer", "singularity")
STATUS: Final = {Level.BLOCKING: "fail", Level.WARNING: "warn", Level.INFO: "ok"}


@dataclass(frozen=True)
class Entry:
    """One line of the doctor's answer; ``status`` is ok, warn or fail, and ``advice`` the next step."""

    name: str
    status: str
    found: str
    advice: str = ""


def examine(manifest: Manifest, hardware: Hardware, runs: Path, clients: Sequence[str]) -> list[Entry]:
    """Return one entry per capability of this machine, then one per finding.

    ``runs`` is the folder of the run directories; ``clients`` are programs that submit jobs, such as ``sbatch``.
    """
    facts = Facts(manifest=manifest, hardware=hardware, layout=Layout(), limits=Preflight(), busy=busy_gpus())
    facts = replace(facts, layout=Layout(gpus_per_node=len(facts.devices)))
    entries = [*_list_capabilities(facts, runs, clients)]
    findings = [("room", "free some space, or set RLK_REPRO_RUNS", found) for found in _check_room(facts, runs)]
    for check in find_checks(facts):
        findings += [(check.name, check.advice, found) for found in check.judge(facts)]
    for name, advice, found in findings:
        words = f"{found.where} {found.found}, expected {found.expected}"
        entries.append(Entry(name, STATUS[found.level], words, advice or "rlk-repro list names the hardware files"))
    return entries


def _check_room(facts: Facts, runs: Path) -> Iterator[Finding]:
    if not can_make(runs):
        yield Finding(Level.BLOCKING, str(runs), "a folder that can be made", "not writable")
    yield from find_little_room(find_existing(runs), facts.limits)


def _list_capabilities(facts: Facts, runs: Path, clients: Sequence[str]) -> Iterator[Entry]:
    yield Entry("python", "ok", _words(facts.fact("code", "python")))
    if importlib.util.find_spec("torch") is not None:
        yield Entry("torch", "ok", _words(facts.mapping("code", "packages").get("torch", "installed")))
    else:
        advice = "the reference trainer needs torch: pip install 'rlk-repro[local]'"
        yield Entry("torch", "warn", "not installed", advice)
    yield _describe_rl_kernel(facts)
    yield _describe_gpus(facts)
    yield Entry("disk", "ok", f"{format_bytes(shutil.disk_usage(find_existing(runs)).free)} free for runs")
    yield _find_programs("git", ("git",), "install git, so that bundles name the commits of the code that ran")
    yield _find_programs("scheduler", clients, "use --cluster local, or log in to the cluster")
    yield _find_programs("containers", ENGINES, "use a stack without images, or install a container runtime")


def _describe_rl_kernel(facts: Facts) -> Entry:
    rl_kernel = facts.mapping("code", "rl_kernel")
    compiled = rl_kernel.get("is_compiled", facts.fact("code", "rl_kernel"))
    symbols = rl_kernel.get("extension_symbols")
    if isinstance(compiled, Unknown):
        advice = "install RL-Kernel for the enabled variant, or measure noise with --variants baseline"
        return Entry("rl-kernel", "warn", _words(compiled), advice)
    if compiled:
        return Entry("rl-kernel", "ok", f"compiled functions: {_words(symbols)}")
    if facts.fact("gpu", "vendor") == "nvidia":
        advice = "build RL-Kernel where a GPU is visible: without its extension it computes logp in PyTorch"
        return Entry("rl-kernel", "warn", "installed without its compiled extension", advice)
    return Entry("rl-kernel", "ok", "installed without a compiled extension (pure Python)")


def _describe_gpus(facts: Facts) -> Entry:
    vendor, count = facts.fact("gpu", "vendor"), facts.fact("gpu", "count")
    if vendor == NO_VENDOR:
        advice = "only --hardware cpu runs here: rlk-repro submit --cluster local --run smoke"
        return Entry("gpus", "warn", "none", advice)
    if isinstance(count, Unknown):
        advice = "install the driver, or pass the GPUs into the container"
        return Entry("gpus", "fail", f"{vendor}: {count.reason}", advice)
    names = ", ".join(sorted({str(device.get("name")) for device in facts.devices}))
    found = f"{count} × {names}, driver {facts.fact('gpu', 'driver')}; runs for --hardware {facts.hardware.hardware}"
    return Entry("gpus", "ok", found)


def _find_programs(name: str, programs: Sequence[str], advice: str) -> Entry:
    present = [program for program in programs if shutil.which(program)]
    if present:
        return Entry(name, "ok", ", ".join(present))
    return Entry(name, "warn", f"none of {', '.join(programs)} found on PATH", advice)


def _words(found: Any) -> str:
    if isinstance(found, Unknown):
        return found.reason
    return ", ".join(map(str, found)) if isinstance(found, list) else str(found)
