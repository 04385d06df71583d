"""Profiles for Slurm: what the nodes say is read, one is proposed, and Slurm itself judges the job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.base.errors import EnvironmentMissing, SpecError
from rlk_repro.base.findings import Level
from rlk_repro.base.resources import profile_folders
from rlk_repro.clusters.profiles import load_all_hardware, make_name, name_hardware, render_profile, take_likeliest
from rlk_repro.clusters.slurm import propose as slurm
from rlk_repro.clusters.slurm.check import check_profile
from rlk_repro.clusters.slurm.propose import propose_slurm
from rlk_repro.clusters.slurm.script import render_sbatch
from rlk_repro.spec import Profile
from rlk_repro.spec.load import load_bytes, load_profile
from tests.support.probe_examples import tools
from tests.support.run_plans import ASSOCIATIONS, BLOCKS, GB200_POOLS, H200_POOLS, MI300X_POOLS, write_slurm
from tests.support.slurm.examples import plan_for, run_dir_of, with_site

__all__ = ["tools"]
HARDWARE = load_all_hardware()


def propose(tools: Path, pools: str, ask: Any = take_likeliest, **site: Any) -> Any:
    write_slurm(tools, pools=pools, **site)
    return propose_slurm(HARDWARE, Path("/shared/images"), ask)[0]


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("(null)", []),
        ("gpu:8", [("gpu", 8)]),
        ("gpu", [("gpu", 1)]),
        ("gpu:a100:2(S:0,3),gpu:h100:6(S:1),shard:4,nic:2", [("gpu:a100", 2), ("gpu:h100", 6)]),
        ("gpu:nvidia_a100-sxm4-80gb:8(S:0-1)", [("gpu:nvidia_a100-sxm4-80gb", 8)]),
        ("gpu:1g.10gb:7(S:0),gpu:3g.40gb:2", [("gpu:1g.10gb", 7), ("gpu:3g.40gb", 2)]),
        ("gpu:4090:8(S:0-1)", [("gpu:4090", 8)]),
        ("gpu:4090", [("gpu:4090", 1)]),
    ],
)
def test_gpus_are_read_from_gres(text: str, gpus: list[tuple[str, int]]) -> None:
    assert slurm.parse_gres(text) == gpus


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("10:00", 10.0), ("1:00:30", 60.5), ("2-00:00:00", 2880.0), ("infinite", None), ("n/a", None), ("", None)],
)
def test_time_limits_are_read_in_minutes(text: str, minutes: float | None) -> None:
    assert slurm.parse_time_min(text) == minutes


@given(st.text())
def test_no_answer_crashes_a_parser(text: str) -> None:
    slurm.parse_offers(text, HARDWARE)
    slurm.parse_gres(text)
    slurm.parse_time_min(text)
    slurm.parse_block_size(text)


def test_without_a_controller_there_is_no_cluster(tools: Path) -> None:
    with pytest.raises(EnvironmentMissing, match="slurm: sinfo: is not on PATH"):
        propose_slurm(HARDWARE, Path("/i"), take_likeliest)


def test_the_partition_with_most_gpu_nodes_is_proposed(tools: Path) -> None:
    proposal = propose(tools, H200_POOLS)
    assert proposal.values == {
        "schema": 1,
        "profile": "dgx",
        "cluster": "slurm",
        "purpose": "Partition batch of cluster dgx.",
        "hardware": "h200",
        "slurm": {"partition": "batch", "gres": "gpu:nvidia_h200", "max_time_min": 5760},
        "container": {"runtime": "pyxis", "image_dir": "/shared/images", "host_python": sys.executable},
    }
    text = render_profile(proposal, "cluster dgx")
    assert load_bytes(Profile, "dgx.yaml", text.encode()).model.profile == "dgx"
    assert all(f"# - {remark}\n" in text for remark in proposal.remarks)


# rows of sinfo, and what is proposed of them: hardware, gres, a remark
ROWS = {
    "features name it": (GB200_POOLS, "gb200", "gpu", ""),
    "no GRES": (MI300X_POOLS, "mi300x", "none", ""),
    "no words": ("x*|up|infinite|1|idle|gpu:8|(null)", None, "gpu", "hardware: GRES and features name no known GPU"),
    "a type that begins with a digit": ("p|up|1-00:00:00|4|idle|gpu:4090:8(S:0-1)|(null)", None, "gpu:4090", ""),
    "slices alone": ("t*|up|1-00:00:00|1|idle|gpu:h200_3g.71gb:8(S:0-1)|(null)", None, "none",
                     "gres: gpu:h200_3g.71gb left out: a partition or a share of a GPU is not comparable"),
    "NVL": ("s*|up|12:00:00|1|mixed|gpu:nvidia_h100_nvl:8(S:2),VramPerGpu:no_consume:94G|h100", None,
            "gpu:nvidia_h100_nvl", "hardware: "),
    "PCIe": ("s*|up|12:00:00|1|mixed|gpu:nvidia_a100-pcie-40gb:8|(null)", None, "gpu:nvidia_a100-pcie-40gb", ""),
    "three kinds of nodes": ("g*|up|6:00:00|49|mixed|gpu:l40s:4(S:0-1)|(null)\ng*|up|6:00:00|8|mixed|gpu:h200:8|(null)"
                             "\ng*|up|6:00:00|1|mixed|gpu:h100:4(S:0-1)|(null)", "h200", "gpu:h200", "several kinds"),
    "two kinds of nodes": ("g*|up|2-00:00:00|10|mixed|gpu:h200:8(S:0-1)|(null)\ng*|up|2-00:00:00|20|mixed|"
                           "gpu:a100:4(S:0-1)|(null)", "h200", "gpu:h200", "several kinds"),
    "features of two": ("g*|up|infinite|2|idle|gpu:8|h100,h200", None, "gpu", "hardware: "),
    "nothing": ("", None, "none", "hardware: "),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_gres_and_hardware_come_from_one_nodes_own_words(tools: Path, name: str) -> None:
    rows, hardware, gres, remark = ROWS[name]
    proposal = propose(tools, rows)
    assert (proposal.values.get("hardware"), proposal.values["slurm"]["gres"]) == (hardware, gres)
    assert remark in "\n".join(proposal.remarks)


def test_segments_and_the_runtime_come_from_the_cluster(tools: Path) -> None:
    values = propose(tools, GB200_POOLS, topology=BLOCKS, srun="no option for containers\n").values
    assert values["slurm"] == {"partition": "gb", "gres": "gpu", "block_size": 18, "max_time_min": 720}
    assert values["container"] == {"runtime": "host", "python": sys.executable}


def test_facts_that_a_cluster_does_not_give_are_asked(tools: Path) -> None:
    asked: list[tuple[str, list[str]]] = []

    def answer_last(question: str, choices: Sequence[str], likeliest: str) -> str:
        asked.append((question, list(choices)))
        assert likeliest in choices
        return choices[-1]

    values = propose(tools, H200_POOLS, answer_last, associations=ASSOCIATIONS).values
    assert asked == [
        ("Which partition?", ["batch", "long", "debug"]),
        ("How is an image started on the nodes?", ["pyxis", "host"]),
        ("Which hardware do the nodes have?", [*HARDWARE, "none of these"]),
    ]
    assert (values["slurm"]["partition"], values["slurm"]["account"]) == ("debug", "alpha")


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("nvidia_h200", "h200"),
        ("nvidia_gh200_480gb", None),
        ("gb200", "gb200"),
        ("b200", None),
        ("nvidia_a100-sxm4-80gb", "a100"),
        ("amd_instinct_mi300x_oam", "mi300x"),
        ("mi300xhf", None),
        ("NVIDIA H200 NVL", None),
    ],
)
def test_hardware_is_known_by_the_word_for_its_gpu(word: str, name: str | None) -> None:
    assert name_hardware([word], [], HARDWARE) == name


@given(st.text())
def test_every_cluster_gives_a_valid_name(text: str) -> None:
    name = make_name(text)
    assert load_bytes(Profile, "x", f"profile: {name!r}\ncluster: slurm\n".encode()).model.profile == name


def check(settings: str) -> list[tuple[Level, str, str]]:
    text = f"profile: x\ncluster: slurm\nhardware: h200\nslurm: {{{settings}}}\n"
    found = check_profile(load_bytes(Profile, "x.yaml", text.encode()).model, None)
    return [(item.level, item.where, item.found) for item in found if item.level is not Level.INFO]


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ("partition: batch, max_time_min: 5760", []),
        ("partition: batch, max_time_min: 9999", [(Level.BLOCKING, "slurm.max_time_min", "9999 min")]),
        ("partition: long, max_time_min: 9999", []),
        ("max_time_min: 31", [(Level.BLOCKING, "slurm.max_time_min", "31 min")]),  # the default partition, debug
    ],
)
def test_a_job_longer_than_the_partition_allows_is_found(tools: Path, settings: str, found: list[Any]) -> None:
    write_slurm(tools)
    assert check(settings) == found


def test_slices_are_refused_in_every_job() -> None:
    plan = with_site(plan_for(), slurm={"gres": "gpu:h200_3g.71gb"})
    with pytest.raises(SpecError, match=r"slurm\.gres: a partition or a share of a GPU is not comparable"):
        render_sbatch(plan, run_dir_of(plan))


def test_both_clusters_let_nccl_use_the_memory_that_nodes_of_gb200_share() -> None:
    for cluster in ("slurm", "k8s"):
        assert load_profile("generic-gb200", profile_folders(cluster)).model.env == {"NCCL_MNNVL_ENABLE": "1"}
