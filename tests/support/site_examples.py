"""Clusters as Slurm's clients describe them: GRES with and without types, block topology, accounts, old and new."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from tests import ROOT
from tests.support.probe_examples import write_tool

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
ASSOCIATIONS = "alpha|\nbeta|batch\n"


def write_slurm(
    folder: Path,
    *,
    pools: str = H200_POOLS,
    config: Mapping[str, str] | None = None,
    topology: str = "",
    associations: str = "",
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
    write_tool(folder, "sacctmgr", {"--noheader --parsable2 show associations": associations})
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
