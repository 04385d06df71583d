"""Measure a short all-reduce over all ranks before the first trial, to find a slow or broken network."""

from __future__ import annotations

import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Final

from rlk_repro.agent.address import LOOPBACK
from rlk_repro.agent.node import has_ended, load_manifest
from rlk_repro.agent.preflight.checks import LEVELS
from rlk_repro.agent.process import StopTimes, no_trouble
from rlk_repro.agent.ray.marks import Use
from rlk_repro.agent.ray.member import RayMember
from rlk_repro.agent.trial import Outcome, TrialWatch, run_command
from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.files import load_json, write_json
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.units import GIB, MIB
from rlk_repro.plan import Plan
from rlk_repro.probes import network
from rlk_repro.rundir.manifest import Fact, Unknown

SCHEMA: Final = 1
RANK: Final = "rlk_repro.bench.all_reduce"
CHECK: Final = "all_reduce"
WHERE: Final = f"{network.SECTION}.{CHECK}"


def measure_all_reduce(member: RayMember) -> list[Finding]:
    """Measure the all-reduce, record it in every node's manifest, and return a finding if it failed or is too slow."""
    reason = find_obstacle(member)
    fact = Unknown(reason) if reason else _lead(member)
    _record(member, fact)
    return [] if reason else [*_judge(member.plan, fact)]


def find_obstacle(member: RayMember) -> str:
    """Return why the all-reduce is skipped, or an empty text."""
    layout = member.plan.layout
    if layout.num_nodes * max(layout.gpus_per_node, 1) == 1:
        return "skipped: there is only one rank"
    if not layout.gpus_per_node and CHECK not in member.plan.profile.preflight.policy:
        return f"skipped: the run has no GPUs, and preflight.policy of the profile does not name {CHECK}"
    if find_spec("torch") is None:
        return "skipped: torch is not installed"
    return "" if member.parts.deadlines.all_reduce_s else "skipped: the time limit of the all-reduce is 0 s"


def follow_all_reduce(member: RayMember, done: str = "") -> str:
    """Run this node's ranks once, as soon as the leader orders it; pass the previous call's result as ``done``.

    Return the address that the leader's order names, or an empty text while this allocation has no such order.
    """
    if done:
        return done
    try:
        order = load_json(member.run_dir.all_reduce_order, schema=SCHEMA)
        head = str(order["head"]) if order["allocation"] == member.place.allocation else ""
    except (BundleUnreadable, KeyError):
        return ""
    if head:
        _take_part(member, head, partial(_find_end, member))
    return head


def _find_end(member: RayMember) -> str:
    leader, allocation = member.place.nodes[0], member.place.allocation
    is_over = not member.run_dir.all_reduce_order.is_file() or has_ended(member.run_dir, leader, allocation)
    return "the leader has ended the all-reduce" if is_over else ""


def _lead(member: RayMember) -> Fact:
    place, run_dir = member.place, member.run_dir
    run_dir.all_reduce_result.unlink(missing_ok=True)
    address = LOOPBACK
    if place.followers:
        address = member.parts.find_address(place.node, place.followers, member.plan.profile.ray.interface)
    try:
        head = f"{address}:{_find_port(address)}"
    except OSError as error:
        return Unknown(f"failed: no free port at {address}: {error.strerror}")
    write_json(run_dir.all_reduce_order, {"schema": SCHEMA, "allocation": place.allocation, "head": head})
    try:
        outcome = _take_part(member, head)
    finally:
        run_dir.all_reduce_order.unlink(missing_ok=True)
    try:
        result = load_json(run_dir.all_reduce_result, schema=SCHEMA)
        by_bytes = result["bus_gb_s"]
        largest = max(by_bytes, key=int)
    except (BundleUnreadable, KeyError, ValueError):
        return Unknown(f"failed: {outcome.reason or 'no result'}")
    return {
        "backend": result["backend"],
        "num_ranks": result["num_ranks"],
        "network": result["network"],
        "largest_bytes": int(largest),
        "bus_gb_s": by_bytes[largest],
        "bus_gb_s_by_bytes": by_bytes,
    }


def _take_part(member: RayMember, head: str, find_trouble: Callable[[], str] = no_trouble) -> Outcome:
    plan, run_dir, deadlines = member.plan, member.run_dir, member.parts.deadlines
    trainer = member.find_command(Use(trial=plan.trials[0].name))
    limits = StopTimes(time_limit_s=deadlines.all_reduce_s, grace_s=deadlines.grace_s)
    with tempfile.TemporaryDirectory(prefix="rlk-repro-") as folder:
        logging = {"NCCL_DEBUG_FILE": f"{folder}/%h-%p.log"} if plan.num_gpus else {}
        command = replace(trainer, argv=_render(member, head), env={**trainer.env, **logging})
        return run_command(
            command,
            run_dir.node(member.place.node).all_reduce_log,
            run_dir,
            limits=limits,
            stop=member.stop,
            watch=TrialWatch(find_trouble=find_trouble),
        )


def _render(member: RayMember, head: str) -> tuple[str, ...]:
    layout, nodes = member.plan.layout, member.place.nodes
    address, _, port = head.rpartition(":")
    argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(layout.num_nodes)]
    argv += ["--node-rank", str(nodes.index(member.place.node)), "--nproc-per-node", str(layout.gpus_per_node or 1)]
    argv += ["--master-addr", address, "--master-port", port, "-m", RANK]
    backend, max_bytes = ("nccl", GIB) if layout.gpus_per_node else ("gloo", MIB)
    return (*argv, backend, str(max_bytes), str(member.run_dir.all_reduce_result.absolute()))


def _find_port(address: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _record(member: RayMember, fact: Fact) -> None:
    for node in member.place.nodes:
        path = member.run_dir.node(node).manifest
        if (manifest := load_manifest(path)) is not None:
            facts = {**manifest.sections.get(network.SECTION, {}), CHECK: fact}
            write_json(path, replace(manifest, sections={**manifest.sections, network.SECTION: facts}).to_json())


def _judge(plan: Plan, fact: Fact) -> Iterator[Finding]:
    """A failed measurement on one node is a warning, because the trials may still succeed."""
    level = LEVELS[plan.profile.preflight.policy.get(CHECK, "fail")]
    if not isinstance(fact, dict):
        if plan.layout.num_nodes == 1 and level is Level.BLOCKING:
            level = Level.WARNING
        yield Finding(level, WHERE, f"an all-reduce over {plan.layout.num_nodes} nodes", str(fact))
        return
    floor = find_floor(plan)
    if floor and fact["bus_gb_s"] < floor:
        size = f"{fact['largest_bytes'] / MIB:g} MiB"
        yield Finding(level, f"{WHERE}.bus_gb_s", f"at least {floor:g} GB/s", f"{fact['bus_gb_s']:g} GB/s at {size}")


def find_floor(plan: Plan) -> float | None:
    """Return the lowest accepted bandwidth in GB/s; None without a limit, or if the job uses only some of a node's
    GPUs.
    """
    floors, layout = plan.hardware.all_reduce, plan.layout
    if floors is None or layout.gpus_per_node < plan.hardware.gpus_per_node:
        return None
    return floors.one_node_gb_s if layout.num_nodes == 1 else floors.nodes_gb_s
