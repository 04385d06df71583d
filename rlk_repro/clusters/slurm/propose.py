"""Propose a first profile for Slurm from what the nodes say, with remarks about what the user should check."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rlk_repro.clusters.asking import NOT_WHOLE
from rlk_repro.clusters.profiles import NONE, Ask, Proposal, is_slice, make_name, name_hardware
from rlk_repro.clusters.slurm.client import probe_config, read_client, require_slurm
from rlk_repro.images.importing import is_imported
from rlk_repro.spec import Hardware

FIELDS: Final = "%P|%a|%l|%D|%T|%G|%f"
# the words of usable states; * is a node that does not answer, $ one in a maintenance reservation
USABLE: Final = re.compile(r"(?:idle|mixed|allocated|completing|reserved|planned)[^*$]?")
_TIME: Final = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The equal GPUs that nodes of one partition have; ``hardware`` is None unless the nodes' own words name one."""

    partition: str
    is_default: bool
    max_time_min: float | None
    gres: str
    gpus_per_node: int
    hardware: str | None
    num_nodes: int

    def __str__(self) -> str:
        return f"{self.gres} ({self.num_nodes} usable nodes with {self.gpus_per_node} GPUs)"


def propose_slurm(hardware: Mapping[str, Hardware], images: Path, ask: Ask) -> tuple[Proposal, str]:
    """Propose a profile; ``images`` is a folder shared by nodes and this machine, for imported images.

    Raises:
        EnvironmentMissing: no Slurm answers.
    """
    require_slurm()
    config = probe_config()
    cluster = config.get("ClusterName", "")
    version = config.get("SLURM_VERSION") or read_client("sinfo", "--version").rpartition(" ")[2].strip()
    remarks: list[str] = []
    offers = parse_offers(read_client("sinfo", "--noheader", f"--format={FIELDS}", must_answer=True), hardware)
    offer = _choose_offer(offers, ask, remarks)
    runtime, container = _choose_container(images, ask, remarks)
    block_size = parse_block_size(read_client("scontrol", "show", "topology"))
    if block_size and () < tuple(map(int, re.findall(r"\d+", version)[:2])) < (24, 5):
        what = f"sbatch --segment needs Slurm 24.05, and this is {version}"
        remarks.append(f"block_size: left out, because {what}")
        block_size = None
    values: dict[str, Any] = {
        "schema": 1,
        "profile": make_name(cluster),
        "cluster": "slurm",
        "purpose": f"Partition {offer.partition} of cluster {cluster or 'without a name'}.",
        "hardware": _choose_hardware(offer, hardware, ask, remarks),
        "slurm": {
            "partition": offer.partition or None,
            "gres": offer.gres,
            "block_size": block_size,
            "max_time_min": None if offer.max_time_min is None else int(offer.max_time_min),
        },
        "container": {"runtime": runtime, **container},
    }
    values["slurm"] = {key: value for key, value in values["slurm"].items() if value is not None}
    origin = f"cluster {cluster or 'without a name'}, Slurm {version}"
    return Proposal(values={key: value for key, value in values.items() if value is not None}, remarks=remarks), origin


def parse_offers(text: str, hardware: Mapping[str, Hardware]) -> list[Offer]:
    """Read rows of ``sinfo`` with the columns FIELDS; equal offers of several rows become one.

    Each row stands alone: its GRES type names the hardware or, without a telling type, its own features do.
    """
    found: dict[Offer, int] = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != FIELDS.count("|") + 1 or not fields[3].isdigit():
            continue
        name, is_up, limit, num_nodes, state, gres, words = fields
        is_usable = is_up == "up" and USABLE.fullmatch(state) is not None
        features = [word for word in re.split(r"[,&|]", words) if word != "(null)"]
        for kind, count in parse_gres(gres) or [("none", 0)]:
            offer = Offer(
                partition=name.removesuffix("*"), is_default=name.endswith("*"), max_time_min=parse_time_min(limit),
                gres=kind, gpus_per_node=count, num_nodes=0, hardware=name_hardware([kind], features, hardware),
            )  # fmt: skip
            found[offer] = found.get(offer, 0) + (int(num_nodes) if is_usable else 0)
    return [replace(offer, num_nodes=number) for offer, number in found.items()]


def parse_gres(text: str) -> list[tuple[str, int]]:
    """Read GPUs and their number from ``gpu:nvidia_h200:8(S:0-1),gpu:4090``."""
    found = []
    for item in re.sub(r"\(.*?\)", "", text).split(","):
        words, number = item.split(":"), 1  # without a number it is one
        # a type may be a number as well, such as 4090; no node has a hundred GPUs
        if words[-1].isdecimal() and (len(words) == 3 or len(words[-1]) < 3):
            number = int(words.pop())
        if words and words[0] == "gpu":
            found.append((":".join(words), number))
    return found


def parse_time_min(text: str) -> float | None:
    """Read minutes from ``1-00:00:00`` or ``10:00``; None for ``infinite`` and similar words."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return (days * 24 + hours) * 60 + minutes + seconds / 60


def parse_block_size(text: str) -> int | None:
    """Return how many nodes the smallest block has; None if the topology has no blocks."""
    return min((int(size) for size in re.findall(r"^BlockName=.*\bBlockSize=(\d+)", text, re.MULTILINE)), default=None)


def _choose_offer(offers: Sequence[Offer], ask: Ask, remarks: list[str]) -> Offer:
    """Prefer known hardware, then GPUs, then whole nodes of it, then the most usable nodes."""
    whole = [offer for offer in offers if not is_slice(offer.gres)]
    if slices := sorted({offer.gres for offer in offers if is_slice(offer.gres)}):
        remarks.append(f"gres: {', '.join(slices)} left out: {NOT_WHOLE}")
    ordered = sorted(whole, key=_rank, reverse=True)
    if not ordered:
        return Offer(partition="", is_default=False, max_time_min=None, gres="none", gpus_per_node=0, hardware=None,
                      num_nodes=0)  # fmt: skip
    partitions = list(dict.fromkeys(offer.partition for offer in ordered))
    partition = partitions[0] if len(partitions) == 1 else ask("Which partition?", partitions, partitions[0])
    own = {str(offer): offer for offer in ordered if offer.partition == partition}
    likeliest = next(iter(own))
    if len(own) > 1:
        remarks.append(f"gres: the partition has nodes of several kinds: {', '.join(own)}")
        first, second, *_ = own.values()
        is_open = _rank(first) == _rank(second) and first.hardware != second.hardware
        answer = ask("Which nodes?", [*own, NONE], NONE if is_open else likeliest)
        return own[answer] if answer != NONE else replace(own[likeliest], gres="gpu", hardware=None)
    return own[likeliest]


def _rank(offer: Offer) -> tuple[bool, bool, int, int, bool]:
    has_gpus = offer.gpus_per_node > 0
    return offer.hardware is not None, has_gpus, offer.gpus_per_node, offer.num_nodes, offer.is_default


def _choose_hardware(offer: Offer, hardware: Mapping[str, Hardware], ask: Ask, remarks: list[str]) -> str | None:
    if offer.hardware is not None:
        return offer.hardware
    answer = ask("Which hardware do the nodes have?", [*hardware, NONE], NONE)
    if answer != NONE:
        return answer
    remarks.append("hardware: GRES and features name no known GPU; set this key, or submit with --hardware")
    return None


def _choose_container(images: Path, ask: Ask, remarks: list[str]) -> tuple[str, dict[str, str]]:
    runtimes = ["host"]
    if shutil.which("apptainer") or shutil.which("singularity"):
        runtimes.insert(0, "apptainer")
    if "--container-image" in read_client("srun", "--help"):
        runtimes.insert(0, "pyxis")
    runtime = ask("How is an image started on the nodes?", runtimes, runtimes[0])
    values = {}
    if is_imported(runtime):
        values["image_dir"] = str(images)
        remarks.append(f"images are imported once into {images}, which must be on a file system that the nodes share")
    values["python" if runtime == "host" else "host_python"] = sys.executable
    remarks.append(f"without a container the nodes run {sys.executable}, which must exist on the nodes too")
    return runtime, values
