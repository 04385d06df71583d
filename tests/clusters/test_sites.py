"""Profiles for Slurm: what the nodes say is read, one is proposed, and Slurm itself judges the job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.base.errors import EnvironmentMissing, SpecError
from rlk_repro.base.findings import Level
from rlk_repro.base.resources import list_names, profile_folders, run_folders
from rlk_repro.clusters.profiles import load_all_hardware, make_name, name_hardware, render_profile, take_likeliest
from rlk_repro.clusters.slurm import propose as slurm
from rlk_repro.clusters.slurm.check import check_profile, require_time
from rlk_repro.clusters.slurm.propose import propose_slurm
from rlk_repro.clusters.slurm.script import render_sbatch
from rlk_repro.division import vime_of
from rlk_repro.probes.address import find_address
from rlk_repro.spec import Profile, VimeWorkload
from rlk_repro.spec.load import load_bytes, load_profile, load_run
from rlk_repro.workloads import WORKLOADS
from rlk_repro.workloads.environment import find_env_problems
from rlk_repro.workloads.vime.arguments import render_env
from tests.support.probe_examples import tools
from tests.support.run_plans import BLOCKS, GB200_POOLS, H200_POOLS, MI300X_POOLS, write_slurm
from tests.support.slurm.examples import plan_for, run_dir_of, with_site

__all__ = ["tools"]
HARDWARE = load_all_hardware()


def propose(tools: Path, pools: str, ask: Any = take_likeliest, **site: Any) -> Any:
    write_slurm(tools, pools=pools, **site)
    return propose_slurm(HARDWARE, Path("/shared/images"), ask)[0]


def test_gpus_and_minutes_are_read_as_slurm_writes_them() -> None:
    for text, gpus in {
        "(null)": [],
        "gpu:8": [("gpu", 8)],
        "gpu:a100:2(S:0,3),gpu:h100:6(S:1),shard:4,nic:2": [("gpu:a100", 2), ("gpu:h100", 6)],
        "gpu:1g.10gb:7(S:0),gpu:3g.40gb:2": [("gpu:1g.10gb", 7), ("gpu:3g.40gb", 2)],
        "gpu:4090:8(S:0-1)": [("gpu:4090", 8)],
        "gpu,gpu:h200(S:0),gpu:4090": [("gpu", 1), ("gpu:h200", 1), ("gpu:4090", 1)],
    }.items():
        assert slurm.parse_gres(text) == gpus
    minutes = {"10:00": 10.0, "1:00:30": 60.5, "2-00:00:00": 2880.0, "infinite": None, "n/a": None, "": None}
    assert {text: slurm.parse_time_min(text) for text in minutes} == minutes


@given(st.text())
def test_no_answer_crashes_a_parser(text: str) -> None:
    slurm.parse_offers(text, HARDWARE)
    slurm.parse_gres(text)
    slurm.parse_time_min(text)
    slurm.parse_block_size(text)


def test_without_a_controller_there_is_no_cluster(tools: Path) -> None:
    with pytest.raises(EnvironmentMissing, match="slurm: scontrol: is not on PATH"):
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
NVL = "gpu:nvidia_h100_nvl"
ROWS = {
    "features name it": (GB200_POOLS, "gb200", "gpu", ""),
    "no GRES": (MI300X_POOLS, "mi300x", "none", ""),
    "no words": ("x*|up|infinite|1|idle|gpu:8|(null)", None, "gpu", "hardware: GRES and features name no known GPU"),
    "a type that begins with a digit": ("p|up|1-00:00:00|4|idle|gpu:4090:8(S:0-1)|(null)", None, "gpu:4090", ""),
    "another model beside a feature": ("p|up|infinite|4|idle|gpu:l40s:4|h100,ib", None, "gpu:l40s", "hardware: "),
    **{f"slices {kind}": (f"t*|up|1-00:00:00|1|idle|gpu:{kind}:8(S:0-1)|h200", None, "none",
                          f"gres: gpu:{kind} left out: a partition or a share of a GPU is not comparable")
       for kind in ("h200_3g.71gb", "a100-mig", "h100_shared")},
    "NVL": (f"s*|up|12:00:00|1|mixed|{NVL}:8(S:2),VramPerGpu:no_consume:94G|h100", None, NVL, "hardware: "),
    "three kinds of nodes": ("g*|up|6:00:00|49|mixed|gpu:l40s:4(S:0-1)|(null)\ng*|up|6:00:00|8|mixed|gpu:h200:8|(null)"
                             "\ng*|up|6:00:00|1|mixed|gpu:h100:4(S:0-1)|(null)", "h200", "gpu:h200", "several kinds"),
    "two kinds in one node": ("g*|up|infinite|2|idle|gpu:a100:4(S:0),gpu:h100:4(S:1)|(null)", None, "gpu", "several"),
    "nodes that do not answer": ("g*|up|1-0|8|idle*|gpu:h100:8|(null)\ng*|up|1-0|1|idle~|gpu:h200:8|(null)\n"
                                 "g*|up|1-0|9|mixed$|gpu:h100:8|(null)", "h200", "gpu:h200", "several kinds"),
    "features of two": ("g*|up|infinite|2|idle|gpu:8|h100,h200", None, "gpu", "hardware: "),
    "nothing": ("", None, "none", "hardware: "),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_gres_and_hardware_come_from_one_nodes_own_words(tools: Path, name: str) -> None:
    rows, hardware, gres, remark = ROWS[name]
    proposal = propose(tools, rows)
    assert (proposal.values.get("hardware"), proposal.values["slurm"]["gres"]) == (hardware, gres)
    assert remark in "\n".join(proposal.remarks)


@pytest.mark.parametrize(
    ("version", "size", "remark"), [("24.05.0", {"block_size": 18}, ""), ("23.11.1", {}, "needs Slurm 24.05")]
)
def test_segments_and_the_runtime_come_from_the_cluster(
    tools: Path, version: str, size: dict[str, int], remark: str
) -> None:
    site = {"srun": "no option for containers\n", "config": {"version": version}}
    proposal = propose(tools, GB200_POOLS, topology=BLOCKS, **site)
    wanted = {"partition": "gb", "gres": "gpu", "max_time_min": 720, **size}
    assert proposal.values["slurm"] == wanted
    assert proposal.values["container"] == {"runtime": "host", "python": sys.executable}
    assert remark in "".join(proposal.remarks)


def test_facts_that_a_cluster_does_not_give_are_asked(tools: Path) -> None:
    asked: list[tuple[str, list[str]]] = []

    def answer_last(question: str, choices: Sequence[str], likeliest: str) -> str:
        asked.append((question, list(choices)))
        assert likeliest in choices
        return choices[-1]

    values = propose(tools, H200_POOLS, answer_last).values
    assert asked == [
        ("Which partition?", ["batch", "long", "debug"]),
        ("How is an image started on the nodes?", ["pyxis", "host"]),
        ("Which hardware do the nodes have?", [*HARDWARE, "none of these"]),
    ]
    assert values["slurm"]["partition"] == "debug"


@pytest.mark.parametrize(
    ("word", "name"),
    [
        *((word, "h200") for word in ("nvidia_h200", "h200", "NVIDIA-H200", "h200-141g")),
        *((word, "h100") for word in ("nvidia_h100_80gb_hbm3", "H100_NVLINK_80GB", "h100-sxm5-80gb")),
        *((word, "a100") for word in ("nvidia_a100-sxm4-80gb", "a100_80", "a100_80g")),
        *((word, "mi300x") for word in ("amd_instinct_mi300x_oam", "mi300x_vf")),
        *((word, "gb200") for word in ("gb200", "GB200_4x", "nvidia_gb200")),
        *((word, None) for word in ("nvidia_gh200_480gb", "b200", "mi300xhf", "NVIDIA H200 NVL", "h100_pcie")),
        *((word, None) for word in ("A100_40GB", "a100_10g", "h100-96gb", "a100_7g.80gb", "NVIDIA-H200-SHARED")),
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


# a site's GRES, a run's hardware, and what is wrong with them together
@pytest.mark.parametrize(
    ("gres", "hardware", "problem"),
    [
        ("gpu:h200_3g.71gb", "h200", "a partition or a share of a GPU"),
        ("gpu:1g.10gb", "h200", "a partition or a share of a GPU"),
        *((gres, "h100", "names another GPU") for gres in ("gpu:nvidia_h100_nvl", "gpu:l40s", "gpu:h200", "gpu:4090")),
        *((gres, "a100", "names another GPU") for gres in ("gpu:h200", "gpu:nvidia_a100-pcie-40gb", "gpu:a100_40gb")),
        *((gres, "h100", "") for gres in ("gpu", "gpu:h100", "gpu:nvidia_h100_80gb_hbm3", "gpu:hopper", "none")),
    ],
)
def test_a_job_asks_only_for_its_own_hardware_s_whole_gpus(gres: str, hardware: str, problem: str) -> None:
    plan = with_site(plan_for(hardware=hardware), slurm={"gres": gres})
    with pytest.raises(SpecError, match=rf"slurm\.gres: {problem}") if problem else nullcontext():
        render_sbatch(plan, run_dir_of(plan))


@pytest.mark.parametrize(
    ("settings", "limit", "problem"),
    [
        ({}, "infinite", ""),
        ({}, "1:00:00", ""),
        ({}, "30:00", r"--max-job-time 30m: the run then continues in further jobs"),
        ({"requeue": False}, "30:00", "with slurm.requeue: false all trials run in one job"),
        ({}, "10:00", r"choose another partition, or fewer steps: one job needs 15 min"),
        ({"partition": "short,long"}, "30:00", ""),
        ({"max_time_min": 28}, "30:00", ""),
    ],
)
def test_a_job_that_would_wait_for_ever_is_refused_with_what_shortens_or_chains_it(
    tools: Path, settings: dict[str, Any], limit: str, problem: str
) -> None:
    write_slurm(tools, pools=f"short*|up|{limit}|8|idle|gpu:h200:8|(null)\nlong|up|infinite|8|idle|gpu:h200:8|(null)")
    plan = with_site(plan_for(), slurm={"gres": "gpu", **settings})
    with pytest.raises(SpecError, match=problem) if problem else nullcontext():
        require_time(plan)


RUNS = [(run, name) for run in list_names(run_folders()) for name in load_run(run).model.layouts
        if name in {"gb200", "mi300x"} and isinstance(load_run(run).model.workload, VimeWorkload)]  # fmt: skip


@pytest.mark.parametrize(("run", "hardware"), RUNS)
def test_shipped_runs_use_nvlink_between_trays_and_a_kernel_that_takes_their_experts(run: str, hardware: str) -> None:
    plan = plan_for(run, hardware)
    assert load_profile(f"generic-{hardware}", profile_folders("k8s")).model.env == plan.profile.env == {}
    env = render_env(plan)
    assert env.get("NCCL_CUMEM_ENABLE") == ("1" if hardware == "gb200" and plan.layout.num_nodes > 1 else None)
    command = WORKLOADS["vime"].trainer_command(plan, plan.trials[0], run_dir_of(plan))
    assert {**command.env}.items() >= env.items()
    model, argv = vime_of(plan).model, list(command.argv)
    if hardware == "mi300x" and model.num_experts and plan.run.lane == "live":
        columns = model.size("moe-ffn-hidden-size") / vime_of(plan).gpus_per_engine(hardware)
        assert columns % 64 == 0 or argv[argv.index("--vllm-moe-backend") + 1] == "triton"


def test_nccl_is_not_forced_to_look_for_other_nodes_on_one_node() -> None:
    tp2 = plan_for("module-qwen3-4b-tp2", "gb200")
    site = tp2.profile.model_copy(update={"env": {"NCCL_MNNVL_ENABLE": "1"}})
    one, two = (with_site(plan, profile=site) for plan in (tp2, plan_for("qwen3-30b-a3b", "gb200")))
    assert [problem.where for problem in find_env_problems(one)] == ["profile generic-gb200: env.NCCL_MNNVL_ENABLE"]
    assert find_env_problems(two) == []


@pytest.mark.parametrize("node", ["fd00::1", "localhost"])
def test_nodes_with_ipv6_only_are_told_at_once(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlk_repro.probes.address.ELSEWHERE", "fd00::3")
    found = pytest.raises(EnvironmentMissing, match="no IPv4 address reaches the other nodes")
    with found if node == "fd00::1" else nullcontext():
        assert find_address(node, [node], None) == "127.0.0.1"
