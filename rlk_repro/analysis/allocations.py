"""Check that one agent ran both trials of a pair in turn, in one allocation, and alone on its GPUs.

The check detects records of different runs in one folder, but not fabricated records.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.escapes import printable
from rlk_repro.base.files import load_json, read_start
from rlk_repro.base.findings import Finding, Level
from rlk_repro.base.units import count, format_utc, group, name_some, parse_utc
from rlk_repro.plan import Plan, Trial
from rlk_repro.rundir.exits import ExitRecord, read_exit
from rlk_repro.rundir.manifest import OTHER_RUNS, Manifest
from rlk_repro.rundir.paths import NodeDir, RunDir
from rlk_repro.rundir.results import TrialStatus

MAX_LOG_BYTES: Final = 1 << 23
MAX_SHOWN: Final = 40
# A node may adjust its clock a little during a run, and records are rounded to milliseconds.
SLACK_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Window:
    """A span of time; ``begin_s`` and ``end_s`` are Unix times."""

    begin_s: float
    end_s: float

    def __str__(self) -> str:
        return f"from {format_utc(self.begin_s)} to {format_utc(self.end_s)}"

    def holds(self, other: Window) -> bool:
        return self.begin_s - SLACK_S <= other.begin_s and other.end_s <= self.end_s + SLACK_S


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One allocation of a run: the pairs or sessions that ran in it, its nodes, and the ids of their GPUs and boots."""

    name: str
    pairs: tuple[str, ...]
    nodes: tuple[str, ...]
    gpus: tuple[str, ...]
    boots: tuple[str, ...] = ()


def find_misfits(plan: Plan, run_dir: RunDir) -> dict[str, str]:
    """Return the pairs that one agent cannot have run in one allocation, each with the reason."""
    agents = _read_agents(run_dir)
    exits = {trial.name: read_exit(run_dir.trial(trial.name)) for trial in plan.trials}
    started = [trial for trial in plan.trials if exits[trial.name].status is not TrialStatus.MISSING]
    wrong = dict(_find_wrong_windows(started, exits, agents))
    misfits: dict[str, str] = {}
    for name, trials in plan.groups().items():
        allocations = sorted({exits[trial.name].allocation for trial in trials})
        if found := next((wrong[trial.name] for trial in trials if trial.name in wrong), ""):
            misfits[name] = found
        elif len(allocations) > 1:
            misfits[name] = f"its trials ran in two allocations, {' and '.join(map(_show, allocations))}"
    return misfits


def find_unknown_nodes(plan: Plan, run_dir: RunDir, pairs: Sequence[str]) -> Iterator[Finding]:
    """Yield a finding for each allocation of these pairs in which a node has no manifest or no preflight record."""
    by_pair = plan.groups()
    allocations = {read_exit(run_dir.trial(trial.name)).allocation for name in pairs for trial in by_pair[name]}
    described = [_read_agent(agent)[0] for _, agent in _list_agents(run_dir)]
    wanted = plan.layout.num_nodes
    for allocation in sorted(allocations):
        found = described.count(allocation)
        if found < wanted:
            where = f"{run_dir.nodes.name}: allocation {_show(allocation)}"
            yield Finding(Level.WARNING, where, f"manifest and preflight record of {count(wanted, 'node')}", str(found))


def list_allocations(plan: Plan, run_dir: RunDir, pairs: Sequence[str], *, least: int = 2) -> list[Allocation]:
    """Return the allocations in which these pairs ran, in the order of the pairs; none if fewer than ``least``.

    With the default, no manifest is read for one allocation, which is the usual case.
    """
    by_pair = plan.groups()
    found = group((read_exit(run_dir.trial(by_pair[name][0].name)).allocation, name) for name in pairs)
    if len(found) < least:
        return []
    agents = [(node, *_read_agent(agent)) for node, agent in _list_agents(run_dir)]
    allocations = []
    for allocation, names in found.items():
        here = [(node, gpus, boot) for node, name, gpus, boot in agents if name == allocation]
        gpus = tuple(gpu for _, of_node, _ in here for gpu in of_node)
        nodes = tuple(sorted({node for node, _, _ in here}))
        boots = tuple(sorted({boot for _, _, boot in here if boot}))
        allocations.append(Allocation(name=allocation, pairs=tuple(names), nodes=nodes, gpus=gpus, boots=boots))
    return allocations


def find_disturbed(plan: Plan, run_dir: RunDir) -> dict[str, str]:
    """Return the pairs during which another run could use the same GPUs, as the agents of a local run noted it."""
    noted: dict[str, set[Any]] = {}
    for _, agent in _list_agents(run_dir):
        try:
            record = load_json(agent.preflight)
            for item in record["findings"]:
                noted.setdefault(item["where"], set()).add(record["allocation"])
        except (BundleUnreadable, KeyError, TypeError):
            continue
    disturbed: dict[str, list[str]] = {}
    for trial in plan.trials:
        allocations = noted.get(f"{trial.name}: {OTHER_RUNS}")
        if allocations and read_exit(run_dir.trial(trial.name)).allocation in allocations:
            disturbed.setdefault(trial.pair, []).append(trial.name)
    told = "another run could use the same GPUs during"
    return {pair: f"{told} {name_some(names)}" for pair, names in disturbed.items()}


def describe_allocations(plan: Plan, run_dir: RunDir, pairs: Sequence[str]) -> Iterator[Finding]:
    """Yield a finding if these pairs ran in more than one allocation, whose nodes may differ in speed."""
    rows = [
        f"{', '.join(item.pairs)} in {_show(item.name)} on {', '.join(item.nodes) or 'unknown nodes'}"
        for item in list_allocations(plan, run_dir, pairs)
    ]
    if rows:
        yield Finding(Level.WARNING, "allocations", "1", f"{len(rows)}: {'; '.join(rows)}")


def number_hosts(machines: Sequence[frozenset[str]]) -> list[int]:
    """Number the hosts: machines that share a boot or a GPU are on one host."""
    hosts: list[frozenset[str]] = []
    for known in machines:
        joined = known.union(*(host for host in hosts if host & known))  # a later machine may join hosts into one
        hosts = [*(host for host in hosts if not host & known), joined]
    found = [next(host for host in hosts if known <= host) for known in machines]
    order = list(dict.fromkeys(found))
    return [order.index(host) for host in found]


def _find_wrong_windows(
    trials: Sequence[Trial], exits: Mapping[str, ExitRecord], agents: Mapping[str, Window]
) -> Iterator[tuple[str, str]]:
    last: dict[str, tuple[str, Window]] = {}
    for trial in trials:
        record = exits[trial.name]
        window = _find_window(record)
        if window is None:
            yield trial.name, f"{trial.name}: its exit record has no consistent allocation and times"
            continue
        agent = agents.get(record.allocation)
        before = last.get(record.allocation)
        last[record.allocation] = trial.name, window
        if agent is None:
            yield trial.name, f"{trial.name}: the agent's log has no allocation {_show(record.allocation)}"
        elif not agent.holds(window):
            yield trial.name, f"{trial.name}: ran {window}, but its agent ran {agent}"
        elif before is not None and window.begin_s < before[1].end_s - SLACK_S:
            yield trial.name, f"{trial.name}: began before {before[0]} had ended"


def _find_window(record: ExitRecord) -> Window | None:
    if not record.allocation or record.begin_s is None or record.end_s is None or record.duration_s is None:
        return None
    if abs(record.end_s - record.begin_s - record.duration_s) > SLACK_S:
        return None
    return Window(begin_s=record.begin_s, end_s=record.end_s)


def _read_agents(run_dir: RunDir) -> dict[str, Window]:
    found: dict[str, Window] = {}
    last = ""
    for allocation, time_s in _read_events(run_dir):
        # A killed agent's log may stop before its last trial ends, so its window lasts until the next agent begins.
        if last and allocation not in found:
            found[last] = replace(found[last], end_s=max(time_s, found[last].end_s))
        begin_s = found[allocation].begin_s if allocation in found else time_s
        found[allocation] = Window(begin_s=begin_s, end_s=time_s)
        last = allocation
    return found


def _read_events(run_dir: RunDir) -> Iterator[tuple[str, float]]:
    try:
        data = read_start(run_dir.agent_log, MAX_LOG_BYTES)
    except BundleUnreadable:
        return
    for line in data.split(b"\n"):
        if b'"allocation"' in line:
            try:
                value: Any = json.loads(line)
                allocation, time = value["allocation"], value["t"]
                if isinstance(allocation, str) and isinstance(time, str):
                    yield allocation, parse_utc(time)
            except (ValueError, KeyError, TypeError, RecursionError):
                continue


def _list_agents(run_dir: RunDir) -> Iterator[tuple[str, NodeDir]]:
    for node in run_dir.node_dirs():
        for agent in (node, *node.earlier_dirs()):
            yield node.path.name, agent


def _read_agent(node: NodeDir) -> tuple[str | None, list[str], str]:
    """Return the allocation in which an agent ran, the ids of its node's GPUs, and the id of the node's boot."""
    try:
        facts = dict(Manifest.load(node.manifest).facts())
        found = load_json(node.preflight)["allocation"]
    except (BundleUnreadable, KeyError, TypeError):
        return None, [], ""
    gpus = [str(fact) for path, fact in facts.items() if path.startswith("gpu.devices.") and path.endswith(".uuid")]
    boot = printable(str(facts.get("host.boot_id", ""))[:MAX_SHOWN])
    return (found if isinstance(found, str) else None), [printable(gpu[:MAX_SHOWN]) for gpu in gpus], boot


def _show(allocation: str) -> str:
    return printable(allocation[:MAX_SHOWN]) or "without a name"
