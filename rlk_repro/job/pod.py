"""Run the agent of one pod of a Kubernetes Job: ``python -m rlk_repro.job.pod RUN_DIR``.

The pods of a Job do not know each other's nodes, and an evicted pod comes back on another node.  So the leading pod
(index 0) calls for an allocation in a file of the shared run directory, each other pod answers in a file of its own,
and the leader then lists the nodes.  An allocation that loses nodes is followed by the next one.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rlk_repro.agent.agent import run_agent
from rlk_repro.agent.parts import NodePlace, make_place
from rlk_repro.base.disk import writing
from rlk_repro.base.errors import EnvironmentMissing, Problem, code_after, finish
from rlk_repro.base.files import dump_json, load_record, write_bytes, write_json
from rlk_repro.base.stop import Stop
from rlk_repro.clusters.triallogs import TRIAL_MARK, read_logs
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.state import read_last_word

SCHEMA: Final = 1
LOOK_S: Final = 1.0
GATHER_S: Final = 1800.0
INDEX_VARIABLE: Final = "JOB_COMPLETION_INDEX"
NODE_VARIABLE: Final = "RLK_REPRO_NODE"
# the kubelet keeps 4096 bytes of a termination log
MAX_MESSAGE: Final = 1000


@dataclass(frozen=True, kw_only=True)
class PodSeat:
    """The place of one pod in its Job; the pod with index 0 leads."""

    index: int
    node: str
    num_nodes: int

    @property
    def leads(self) -> bool:
        return self.index == 0


def run_pod(run_dir: RunDir, seat: PodSeat, inputs: Path, num_restarts: int, last_word: Path) -> int:
    """Run this pod's agent, again after each loss of nodes; return the exit code that the Job sees.

    The leading pod writes its last progress report to ``last_word``, from where the pod's status gets it.
    """
    stop = Stop()
    with stop.installed():
        if not seat.leads:
            return _follow(run_dir, seat, stop)
        if not run_dir.is_sealed:
            bring_in(run_dir, inputs)
        with _printing_logs(run_dir):
            code = _lead(run_dir, seat, stop, num_restarts)
    last = read_last_word(run_dir)
    with suppress(OSError):
        last_word.write_bytes(dump_json(replace(last, message=last.message[:MAX_MESSAGE]).to_json()))
    return code


def _lead(run_dir: RunDir, seat: PodSeat, stop: Stop, num_restarts: int) -> int:
    code = 0
    for _ in range(num_restarts + 1):
        place = call(run_dir, seat, stop)
        if place is None:
            return code_after(stop.signal)
        run_dir.lost.unlink(missing_ok=True)
        code = run_agent(run_dir, place, is_resuming=True)
        if not run_dir.lost.is_file():
            break
    return code


def _follow(run_dir: RunDir, seat: PodSeat, stop: Stop) -> int:
    """Take part in one allocation after the other; the Job ends this pod if the leading pod fails."""
    earlier = ""
    while (place := answer(run_dir, seat, stop, earlier)) is not None:
        earlier = place.allocation
        try:
            code = run_agent(run_dir, place, is_resuming=True)
        except EnvironmentMissing as error:  # the leading pod is gone, and a new one will call
            sys.stderr.write(f"{error}\n")
            continue
        if code:
            return code
    return code_after(stop.signal)


def bring_in(run_dir: RunDir, inputs: Path) -> None:
    """Copy the staged files, and remove the bundle and the state of an earlier pod or submission."""
    with writing(run_dir.root, hint="can the pod's user write to the volume claim?"):
        run_dir.root.mkdir(parents=True, exist_ok=True)
        for source in sorted(inputs.rglob("*")):
            name = source.relative_to(inputs)
            # names of the kubelet's own folders in a ConfigMap's mount begin with two dots
            if source.is_file() and not any(part.startswith("..") for part in name.parts):
                write_bytes(run_dir.root / name, source.read_bytes())
        for earlier in (run_dir.state, run_dir.bundle):
            earlier.unlink(missing_ok=True)
    if not run_dir.plan.is_file():
        raise EnvironmentMissing(Problem(str(inputs), "holds no plan", expected="the ConfigMap of this run"))


def call(run_dir: RunDir, seat: PodSeat, stop: Stop) -> NodePlace | None:
    """Call for a new allocation and wait for all pods; return None after a signal.

    Allocations are numbered: of two agents that want a run's lock, it goes to the one with the higher number.

    Raises:
        EnvironmentMissing: pods are missing for too long.
    """
    number = int(str(_read(run_dir.roster).get("allocation", "")).rpartition(".")[2] or 0) + 1
    allocation, until = f"{run_dir.run_id.replace('.', '-')}.{number}", time.monotonic() + GATHER_S
    _write(run_dir.roster, allocation=allocation, nodes=[])
    while stop.signal is None:
        answers = [_read(run_dir.pod_answer(index)) for index in range(1, seat.num_nodes)]
        nodes = [str(item["node"]) for item in answers if item.get("allocation") == allocation]
        if len(nodes) == len(answers):
            _write(run_dir.roster, allocation=allocation, nodes=[seat.node, *nodes])
            return make_place(seat.node, (seat.node, *nodes), allocation)
        if time.monotonic() >= until:
            found = f"{len(nodes) + 1} of {seat.num_nodes}"
            raise EnvironmentMissing(Problem("pods", f"did not all start within {GATHER_S:g} s", got=found))
        stop.wait(LOOK_S)
    return None


def answer(run_dir: RunDir, seat: PodSeat, stop: Stop, earlier: str) -> NodePlace | None:
    """Answer each call, and wait for the list of nodes; return None once the run is complete, or after a signal.

    A list without this pod's answer is an earlier pod's.  The leader will notice that pod's loss, and call again.
    """
    answered = earlier
    while not run_dir.is_sealed and not stop.signal:
        roster = _read(run_dir.roster)
        allocation, nodes = str(roster.get("allocation", "")), tuple(roster.get("nodes", ()))
        if nodes and allocation == answered != earlier:
            return make_place(seat.node, nodes, allocation)
        if allocation and not nodes and allocation != answered:
            answered = allocation
            _write(run_dir.pod_answer(seat.index), allocation=allocation, node=seat.node)
        stop.wait(LOOK_S)
    return None


@contextmanager
def _printing_logs(run_dir: RunDir) -> Iterator[None]:
    """Print every line of every trial's log, so that ``kubectl logs`` shows them."""
    is_over = threading.Event()

    def show() -> None:
        for line in read_logs(run_dir, is_over.is_set):
            sys.stdout.write(f"{line.trial}{TRIAL_MARK}{line.text}\n")
            sys.stdout.flush()

    thread = threading.Thread(target=show, name="logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _read(path: Path) -> dict[str, Any]:
    return load_record(path, schema=SCHEMA)


def _write(path: Path, **values: object) -> None:
    write_json(path, {"schema": SCHEMA, **values}, is_durable=False)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rlk_repro.job.pod", description=__doc__, allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--num-nodes", type=int, default=1, metavar="N")
    parser.add_argument("--restarts", type=int, default=0, metavar="N", help="how often lost nodes are waited for")
    parser.add_argument("--inputs", type=Path, default=Path("/etc/rlk-repro"), metavar="DIR")
    parser.add_argument("--last-word", type=Path, default=Path("/dev/null"), metavar="FILE")
    args = parser.parse_args(argv)
    seat = PodSeat(
        index=int(os.environ.get(INDEX_VARIABLE, "0")),
        node=os.environ.get(NODE_VARIABLE) or platform.node(),
        num_nodes=args.num_nodes,
    )
    run_dir = RunDir(args.run_dir.absolute())
    return finish(lambda: run_pod(run_dir, seat, args.inputs, args.restarts, args.last_word))


if __name__ == "__main__":
    sys.exit(main())
