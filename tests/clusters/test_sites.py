"""Profiles for a cluster: what it says is read, one is proposed, and what would fail with one is found."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.base.disk import can_make
from rlk_repro.base.errors import EnvironmentMissing
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.resources import profile_folders
from rlk_repro.clusters.profiles import find_hardware, load_all_hardware, make_name, render_profile, take_likeliest
from rlk_repro.clusters.slurm import site as slurm
from rlk_repro.clusters.slurm.check import Needs, UserHere, judge_profile, list_paths
from rlk_repro.clusters.slurm.propose import propose_slurm
from rlk_repro.clusters.slurm.site import Association, Gpus, Pool, SlurmSite, probe_site
from rlk_repro.spec import Profile
from rlk_repro.spec.load import load_bytes, load_profile
from tests.support.probe_examples import tools, write_tool
from tests.support.site_examples import (
    ASSOCIATIONS,
    BLOCKS,
    GB200_POOLS,
    H200_POOLS,
    MI300X_POOLS,
    RESERVATION,
    write_slurm,
)

__all__ = ["tools"]
HARDWARE = load_all_hardware()
HERE = UserHere(
    variables=frozenset({"HF_TOKEN"}), existing={}, runs_root=Path("/shared/runs"), is_runs_root_shared=True
)


def make_site(pools: str = H200_POOLS, **changes: Any) -> SlurmSite:
    site = SlurmSite(
        cluster="dgx",
        version="24.11.5",
        pools=tuple(slurm.parse_pools(pools)),
        visible=frozenset(pool.partition for pool in slurm.parse_pools(pools)),
        block_size=None,
        enforces_associations=False,
        associations=(),
        reservations=frozenset(),
        runtimes=frozenset({"pyxis"}),
    )
    return dataclasses.replace(site, **changes)


def propose(site: SlurmSite, ask: Any = take_likeliest) -> dict[str, Any]:
    return propose_slurm(site, HARDWARE, Path("/shared/images"), ask).values


def test_partitions_are_read_with_their_limits_and_gpus() -> None:
    debug, batch, away, long = slurm.parse_pools(H200_POOLS)
    assert batch == Pool(
        partition="batch",
        is_default=False,
        is_up=True,
        max_time_min=4 * 24 * 60.0,
        num_nodes=30,
        state="allocated",
        gpus=(Gpus(kind="nvidia_h200", count=8),),
        features=frozenset({"h200", "ib"}),
    )
    assert (debug.is_default, debug.max_time_min, debug.gpus) == (True, 30.0, ())
    assert (away.state, away.is_usable, batch.is_usable) == ("down", False, True)
    assert long.max_time_min is None


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("(null)", []),
        ("gpu:8", [("", 8)]),
        ("gpu", [("", 1)]),
        ("gpu:a100:2(S:0,3),gpu:h100:6(S:1),shard:4,nic:2", [("a100", 2), ("h100", 6)]),
        ("gpu:nvidia_a100-sxm4-80gb:8(S:0-1)", [("nvidia_a100-sxm4-80gb", 8)]),
    ],
)
def test_gpus_are_read_from_gres(text: str, gpus: list[tuple[str, int]]) -> None:
    assert [(item.kind, item.count) for item in slurm.parse_gres(text)] == gpus


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("10:00", 10.0), ("1:00:30", 60.5), ("2-00:00:00", 2880.0), ("infinite", None), ("n/a", None), ("", None)],
)
def test_time_limits_are_read_in_minutes(text: str, minutes: float | None) -> None:
    assert slurm.parse_time_min(text) == minutes


@given(st.text())
def test_no_answer_crashes_a_parser(text: str) -> None:
    for parse in (slurm.parse_pools, slurm.parse_gres, slurm.parse_associations):
        list(parse(text))
    slurm.parse_time_min(text)
    slurm.parse_block_size(text)


def test_a_cluster_is_asked_for_all_that_a_profile_needs(tools: Path) -> None:
    config = {"storage": "slurmdbd", "enforce": "associations,limits"}
    write_slurm(tools, config=config, topology=BLOCKS, associations=ASSOCIATIONS, reservations=RESERVATION)
    write_tool(tools, "singularity", {})
    site = probe_site()
    assert (site.cluster, site.version, site.release) == ("dgx", "24.11.5", (24, 11))
    assert site.partitions == ["debug", "batch", "long"]
    assert site.visible == {"debug", "batch"}
    assert (site.block_size, site.enforces_associations, site.reservations) == (18, True, frozenset({"paper"}))
    assert site.associations == (
        Association(account="alpha", partition="", qos=frozenset({"normal", "long"})),
        Association(account="beta", partition="batch", qos=frozenset({"normal"})),
    )
    assert site.runtimes == {"pyxis", "apptainer"}


def test_without_accounting_and_topology_a_cluster_is_described_as_well(tools: Path) -> None:
    write_slurm(tools, srun="      --container  Path to OCI container bundle\n")
    site = probe_site()
    assert (site.block_size, site.associations) == (None, ())
    assert (site.reservations, site.runtimes) == (frozenset(), frozenset())


def test_without_a_controller_there_is_no_cluster(tools: Path) -> None:
    with pytest.raises(EnvironmentMissing) as caught:
        probe_site()
    assert str(caught.value).startswith("slurm: sinfo: is not on PATH")


def test_the_partition_with_most_gpu_nodes_is_proposed() -> None:
    assert propose(make_site()) == {
        "schema": 1,
        "profile": "dgx",
        "cluster": "slurm",
        "purpose": "Partition batch of cluster dgx.",
        "hardware": "h200",
        "slurm": {"partition": "batch", "gres": "gpu:nvidia_h200", "max_time_min": 5760},
        "container": {"runtime": "pyxis", "image_dir": "/shared/images", "host_python": sys.executable},
    }


def test_a_partition_that_is_hidden_from_us_is_not_proposed() -> None:
    site = make_site(visible=frozenset({"debug", "long"}))
    assert propose(site)["slurm"]["partition"] == "long"
    assert judged(site=site) == warning("slurm.partition", "a partition that sinfo shows you: debug, long", "batch")


def test_a_rack_without_gres_types_is_known_by_its_features() -> None:
    values = propose(make_site(GB200_POOLS, block_size=18, runtimes=frozenset({"docker", "apptainer"})))
    assert values["hardware"] == "gb200"
    assert values["slurm"] == {"partition": "gb", "gres": "gpu", "block_size": 18, "max_time_min": 720}
    assert values["container"] == {
        "runtime": "apptainer",
        "image_dir": "/shared/images",
        "host_python": sys.executable,
    }


def test_a_site_without_gres_requests_no_gres() -> None:
    values = propose(make_site(MI300X_POOLS, runtimes=frozenset({"docker"})))
    assert (values["hardware"], values["slurm"]) == ("mi300x", {"partition": "amd", "gres": "none"})


def test_unnamed_gpus_leave_the_hardware_open() -> None:
    proposal = propose_slurm(make_site("x*|up|infinite|1|idle|gpu:8|(null)\n"), HARDWARE, Path("/i"), take_likeliest)
    assert "hardware" not in proposal.values
    assert "hardware: GRES and features name no known GPU" in proposal.remarks[0]


def test_facts_that_a_cluster_does_not_give_are_asked() -> None:
    asked: list[tuple[str, list[str]]] = []

    def answer_last(question: str, choices: Sequence[str], likeliest: str) -> str:
        asked.append((question, list(choices)))
        assert likeliest in choices
        return choices[-1]

    site = make_site(associations=tuple(slurm.parse_associations(ASSOCIATIONS)))
    values = propose(site, answer_last)
    assert asked == [
        ("Which partition?", ["batch", "long", "debug"]),
        ("Which hardware do the nodes have?", [*HARDWARE, "none of these"]),
        ("How is an image started on the nodes?", ["pyxis", "host"]),
    ]
    assert (values["slurm"]["partition"], values["slurm"]["account"]) == ("debug", "alpha")
    assert values["container"]["runtime"] == "host"


@pytest.mark.parametrize("pools", [H200_POOLS, GB200_POOLS, MI300X_POOLS, ""])
def test_the_proposal_is_a_valid_profile_with_remarks(pools: str) -> None:
    proposal = propose_slurm(make_site(pools), HARDWARE, Path("/shared/images"), take_likeliest)
    text = render_profile(proposal, "cluster dgx")
    profile = load_bytes(Profile, "dgx.yaml", text.encode()).model
    assert (profile.profile, profile.cluster) == ("dgx", "slurm")
    assert all(f"# - {remark}\n" in text for remark in proposal.remarks)


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("nvidia_h200", ["h200"]),
        ("nvidia_gh200_480gb", []),
        ("gb200", ["gb200"]),
        ("b200", []),
        ("nvidia_a100-sxm4-80gb", ["a100"]),
        ("amd_instinct_mi300x_oam", ["mi300x"]),
        ("mi300xhf", []),
    ],
)
def test_hardware_is_known_by_the_word_for_its_gpu(word: str, names: list[str]) -> None:
    assert find_hardware([word], HARDWARE) == names


@given(st.text())
def test_every_cluster_gives_a_valid_name(text: str) -> None:
    name = make_name(text)
    assert load_bytes(Profile, "x", f"profile: {name!r}\ncluster: slurm\n".encode()).model.profile == name


GOOD = """
profile: dgx
cluster: slurm
hardware: h200
slurm: {partition: batch, gres: "gpu:nvidia_h200", max_time_min: 5760}
container: {runtime: pyxis, image_dir: /shared/images}
"""
NEEDS = Needs(num_nodes=2, gpus_per_node=8, time_limit_min=600)


def judged(
    *changes: tuple[str, str], site: SlurmSite | None = None, here: UserHere = HERE, needs: Needs = NEEDS
) -> Any:
    """The good profile with some texts replaced."""
    text = GOOD
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    profile = load_bytes(Profile, "dgx.yaml", text.encode()).model
    return judge_profile(profile, site or make_site(), here, needs, HARDWARE)


def blocking(where: str, expected: str, found: str) -> list[Finding]:
    return [Finding(Level.BLOCKING, where, expected, found)]


def warning(where: str, expected: str, found: str) -> list[Finding]:
    return [Finding(Level.WARNING, where, expected, found)]


def test_a_profile_that_fits_has_no_findings() -> None:
    assert judged() == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("batch", "gpus"), blocking("slurm.partition", "one of debug, batch, long", "gpus")),
        (("5760", "9999"), blocking("slurm.max_time_min", "at most 5760", "9999")),
        (("gpu:nvidia_h200", "gpu:h2"), blocking("slurm.gres", "a GRES of partition batch: gpu:nvidia_h200", "gpu:h2")),
        (
            ('gres: "gpu:nvidia_h200"', "gres: none"),
            warning("slurm.gres", "gpu:nvidia_h200", "none: Slurm may hide GPUs that were not requested"),
        ),
        (("hardware: h200", "hardware: a100"), warning("hardware", "h200 (named by GRES or features)", "a100")),
        (
            ("slurm: {", "slurm: {reservation: mine, "),
            blocking("slurm.reservation", "no reservation: the cluster has none", "mine"),
        ),
        (
            ("slurm: {", "slurm: {block_size: 18, "),
            warning("slurm.block_size", "a cluster with block topology", "no block topology: block_size has no effect"),
        ),
        (("runtime: pyxis", "runtime: apptainer"), warning("container.runtime", "apptainer on the nodes",
                                                           "no apptainer on this machine")),
        ((", image_dir: /shared/images", ""), blocking("container.image_dir", "a shared folder for imported images",
                                                       "not set")),
        (
            ("cluster: slurm", "cluster: slurm\nenv: {A: {from_env: HF_TOKEN}, B: {from_env: WANDB}}"),
            blocking("env.B", "the variable WANDB in this shell", "not set"),
        ),
    ],
)  # fmt: skip
def test_each_problem_of_a_profile_is_found(change: tuple[str, str], expected: list[Finding]) -> None:
    assert judged(change) == expected


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        (Needs(num_nodes=33), blocking("slurm.partition", "33 nodes", "batch has 32")),
        (
            Needs(num_nodes=31),
            warning("slurm.partition", "31 nodes that are neither down nor drained", "30 usable nodes of 32 in batch"),
        ),
        (Needs(time_limit_min=6000), blocking("slurm.partition", "6000 min for this run", "batch allows 5760")),
        (Needs(gpus_per_node=16), blocking("slurm.gres", "16 GPUs per node", "8")),
    ],
)
def test_a_runs_needs_are_compared_with_the_partition(needs: Needs, expected: list[Finding]) -> None:
    assert judged(needs=needs) == expected


IN_RACK = (("h200", "gb200"), ("gpu:nvidia_gb200", "gpu"), ("batch", "gb"), ("5760", "720"))


@pytest.mark.parametrize(
    ("block_size", "site", "expected"),
    [
        ("18", {}, []),
        ("36", {}, blocking("slurm.block_size", "at most 18", "36")),
        ("18", {"version": "22.05.8"}, blocking("slurm.block_size", "Slurm 23.11 or newer", "22.05.8")),
        (
            "null",
            {},
            warning("slurm.block_size", "18, the size of this cluster's blocks",
                    "not set: nodes may lie in several NVLink domains"),
        ),
    ],
)  # fmt: skip
def test_segments_fit_the_blocks_of_the_cluster(block_size: str, site: Any, expected: list[Finding]) -> None:
    needs = Needs(num_nodes=4, gpus_per_node=4)
    rack = make_site(GB200_POOLS, **{"block_size": 18, **site})
    assert judged(*IN_RACK, ("slurm: {", f"slurm: {{block_size: {block_size}, "), site=rack, needs=needs) == expected


@pytest.mark.parametrize(("enforces", "level"), [(True, Level.BLOCKING), (False, Level.WARNING)])
def test_an_account_that_is_not_yours_is_refused_where_accounts_count(enforces: bool, level: Level) -> None:
    associations = tuple(slurm.parse_associations(ASSOCIATIONS))
    site = make_site(associations=associations, enforces_associations=enforces)
    assert judged(("slurm: {", "slurm: {account: gamma, qos: high, "), site=site) == [
        Finding(level, "slurm.account", "one of yours: alpha, beta", "gamma"),
        Finding(level, "slurm.qos", "one of yours: long, normal", "high"),
    ]
    assert judged(("slurm: {", "slurm: {account: alpha, qos: long, "), site=site) == []


def test_pyxis_must_be_known_to_srun_itself() -> None:
    expected = blocking(
        "container.runtime", "an srun that supports --container-image", "an srun without it: pyxis is not installed"
    )
    assert judged(site=make_site(runtimes=frozenset())) == expected


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"is_runs_root_shared": False}, "a file system of this machine only"),
        ({"runs_root": Path("/tmp/runs")}, "a folder for temporary files"),
    ],
)
def test_run_directories_must_lie_where_the_nodes_see_them(change: Any, found: str) -> None:
    expected = warning("run directories", "a file system that the nodes share (set RLK_REPRO_RUNS)", found)
    assert judged(here=dataclasses.replace(HERE, **change)) == expected


def test_a_folder_for_images_must_be_one_that_we_can_make(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert can_make(tmp_path / "a" / "b")
    assert not can_make(tmp_path / "file" / "b")
    here = dataclasses.replace(HERE, can_make_images=False)
    assert judged(here=here) == warning(
        "container.image_dir", "a folder that you can write to", "/shared/images, which you cannot write to"
    )  # fmt: skip


def test_devices_are_not_expected_on_a_login_node() -> None:
    text = b"profile: x\ncluster: slurm\ncontainer: {mounts: [{source: /dev/x}, {source: /data}], package_dir: /p}\n"
    assert list_paths(load_bytes(Profile, "x", text).model) == ["/p", "/data"]


def test_folders_that_the_nodes_need_are_checked_here() -> None:
    here = dataclasses.replace(HERE, existing={"/data": False, "/home": True})
    assert judged(here=here) == warning("container", "/data on the nodes", "no such path on this machine")


def test_both_clusters_let_nccl_use_the_memory_that_nodes_of_gb200_share() -> None:
    for cluster in ("slurm", "k8s"):
        assert load_profile("generic-gb200", profile_folders(cluster)).model.env == {"NCCL_MNNVL_ENABLE": "1"}
