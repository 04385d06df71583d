"""Every shipped run on every hardware that it has a layout for."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from rlk_repro.base.resources import list_names, profile_folders, run_folders
from rlk_repro.plan import Plan, make_plan
from rlk_repro.spec import Profile
from rlk_repro.spec.load import load_bytes, load_hardware, load_profile, load_run, load_stack, parse_overrides
from tests import ROOT
from tests.support.job_examples import PROFILE
from tests.support.probe_examples import write_tool
from tests.support.slurm.examples import plan_for

CPU = "cpu"


@cache
def list_all_plans() -> tuple[tuple[str, Plan], ...]:
    """``run.hardware`` and its plan, in the lane that the run names."""
    return tuple(
        (f"{run}.{hardware}", make_run_plan(run, hardware))
        for run in list_names(run_folders())
        for hardware in layouts(run)
    )


def layouts(run: str) -> Iterator[str]:
    """The hardware of a run, as its file orders them."""
    yield from load_run(run).model.layouts


@cache
def make_run_plan(run: str, hardware: str, *settings: str) -> Plan:
    """On a GPU with its site profile, on a CPU with the local one."""
    if hardware != CPU:
        return plan_for(run, hardware, settings=settings)
    overrides = parse_overrides(settings)
    loaded = load_run(run, overrides)
    return make_plan(
        run=loaded,
        stack=load_stack(loaded.model.find_stack(hardware)),
        hardware=load_hardware(hardware),
        profile=load_profile("local", profile_folders("local")),
        overrides=overrides,
    )


# Plans of the module and operator tiers, from the shipped run files.


def make_tier_plan(
    run: str, *settings: str, hardware: str = "cpu", stack: str = "host", profile: bytes = PROFILE
) -> Plan:
    overrides = parse_overrides(settings)
    return make_plan(
        run=load_run(run, overrides),
        stack=load_stack(stack),
        hardware=load_hardware(hardware),
        profile=load_bytes(Profile, "profile.yaml", profile),
        overrides=overrides,
        is_exploratory=True,
    )


# Clusters as Slurm's clients describe them: GRES with and without types, block topology, old and new.


CONFIG = (
    "Configuration data as of 2026-11-20T10:00:00\n"
    "ClusterName             = {name}\nSLURM_VERSION           = {version}\n"
    "AccountingStorageType   = accounting_storage/{storage}\nAccountingStorageEnforce = {enforce}\n"
)
H200_POOLS = (
    "debug*|up|30:00|2|idle|(null)|(null)\n"
    "batch|up|4-00:00:00|30|allocated|gpu:nvidia_h200:8(S:0-1)|h200,ib\n"
    "batch|up|4-00:00:00|2|down*|gpu:nvidia_h200:8(S:0-1)|h200,ib\n"
    "long|up|infinite|2|mixed|gpu:nvidia_h200:8(S:0-1)|h200,ib\n"
)
GB200_POOLS = "gb*|up|12:00:00|36|idle|gpu:4|gb200,arm\n"
MI300X_POOLS = "amd*|up|infinite|4|idle|(null)|mi300x\n"
BLOCKS = (
    "BlockName=b1 BlockIndex=0 Nodes=gb[01-18] BlockSize=18\nBlockName=b2 BlockIndex=1 Nodes=gb[19-36] BlockSize=18\n"
)


def write_slurm(
    folder: Path,
    *,
    pools: str = H200_POOLS,
    config: Mapping[str, str] | None = None,
    topology: str = "",
    srun: str = "      --container-image=[USER@][REGISTRY#]IMAGE\n",
    refusal: str = "",
) -> None:
    """Clients of one cluster; ``refusal`` is what sbatch says no with."""
    values = {"name": "dgx", "version": "24.11.5", "storage": "none", "enforce": "none", **(config or {})}
    write_tool(
        folder,
        "sinfo",
        {
            "--version": f"slurm {values['version']}",
            "--noheader --all": _list_limits(pools),
            "--noheader --states": "",
            "--noheader --format=": pools,
        },
    )
    show = {"ping": "Slurmctld(primary) at head is UP", "show config": CONFIG.format(**values)}
    show |= {"show topology": topology} if topology else {}
    write_tool(folder, "scontrol", show)
    write_tool(folder, "srun", {"--help": srun, "--version": "slurm"})
    for name in ("squeue", "scancel"):
        write_tool(folder, name, {"--version": "slurm"})
    answers = {"--version": "slurm", **({} if refusal else {"--test-only": "\n"})}
    write_tool(folder, "sbatch", answers, refusal=refusal or "no such question")


def _list_limits(pools: str) -> str:
    rows = [line.split("|") for line in pools.splitlines()]
    return "".join(f"{fields[0]}|{fields[2]}\n" for fields in rows)


# Sections of pages, and the commands that they tell the reader to type.


BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)


def read_section(page: str, title: str) -> str:
    """The text of the section ``title`` of a page in docs/, with its own subsections."""
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", (ROOT / "docs" / page).read_text(), re.M | re.S)
    assert match is not None, title
    return match[1]


def read_commands(page: str, title: str) -> list[list[str]]:
    """The words after ``rlk-repro`` of each line in the section's ``sh`` blocks."""
    lines = "".join(BLOCK.findall(read_section(page, title))).splitlines()
    return [shlex.split(line.strip().removeprefix("rlk-repro ")) for line in lines if line.strip()]
