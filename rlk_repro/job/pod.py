"""Run the agent of one pod of a Kubernetes Job: ``python -m rlk_repro.job.pod RUN_DIR``.

The pods of a Job do not know each other's nodes, and an evicted pod comes back on another node.  So the leading pod
(index 0) calls for an allocation in a file of the shared run directory, each other pod answers in a file of its own,
and the leader then lists the nodes.  An allocation that loses nodes is followed by the next one, until the Job has
replaced as many pods as it may.
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
from dataclasses import replace
from pathlib import Path
from typing import Final

from rlk_repro.agent.agent import run_agent
from rlk_repro.agent.parts import make_place
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


def lead(run_dir: RunDir, node: str, num_nodes: int, stop: Stop) -> int:
    """Run the leading agent, again after each loss of nodes; return the exit code that the Job sees.

    Allocations are numbered: of two agents that want a run's lock, it goes to the one with the higher number.
    """
    number = int(str(load_record(run_dir.roster).get("allocation", "")).rpartition(".")[2] or 0)
    while stop.signal is None:
        number += 1
        allocation = f"{run_dir.run_id.replace('.', '-')}.{number}"
        nodes = _gather(run_dir, allocation, node, num_nodes, stop)
        if len(nodes) == num_nodes:
            run_dir.lost.unlink(missing_ok=True)
            code = run_agent(run_dir, make_place(node, nodes, allocation))
            if not run_dir.lost.is_file():
                return code
    return code_after(stop.signal)


def _gather(run_dir: RunDir, allocation: str, node: str, num_nodes: int, stop: Stop) -> tuple[str, ...]:
    """Call for an allocation, wait for the other pods' answers, and list all nodes; fewer after a signal.

    Raises:
        EnvironmentMissing: pods are missing for too long.
    """
    # without a step, agents that still follow a leading pod that is gone end, and their pods can answer
    run_dir.step.unlink(missing_ok=True)
    roster = {"schema": SCHEMA, "allocation": allocation, "nodes": []}
    write_json(run_dir.roster, roster, is_durable=False)
    until, nodes = time.monotonic() + GATHER_S, [node]
    while len(nodes) < num_nodes and not stop.wait(LOOK_S):
        answers = [load_record(run_dir.pod_answer(index)) for index in range(1, num_nodes)]
        nodes = [node, *(str(item["node"]) for item in answers if item.get("allocation") == allocation)]
        if len(nodes) < num_nodes and time.monotonic() >= until:
            found = f"{len(nodes)} of {num_nodes}"
            raise EnvironmentMissing(Problem("pods", f"did not all start within {GATHER_S:g} s", got=found))
    if len(nodes) == num_nodes:
        write_json(run_dir.roster, {**roster, "nodes": nodes}, is_durable=False)
    return tuple(nodes)


def follow(run_dir: RunDir, node: str, index: int, stop: Stop) -> int:
    """Answer each call, and take part in the allocation if the list of its nodes follows; end with the run.

    A list without this pod's answer is an earlier pod's.  The leader will notice that pod's loss, and call again.
    """
    answered = ""
    while not run_dir.is_sealed and not stop.signal:
        roster = load_record(run_dir.roster)
        allocation, nodes = str(roster.get("allocation", "")), tuple(roster.get("nodes", ()))
        if allocation and not nodes and allocation != answered:
            answered = allocation
            answer = {"schema": SCHEMA, "allocation": allocation, "node": node}
            write_json(run_dir.pod_answer(index), answer, is_durable=False)
        elif nodes and allocation == answered:
            answered = ""
            try:
                code = run_agent(run_dir, make_place(node, nodes, allocation))
            except EnvironmentMissing as error:  # the leading pod is gone, and a new one will call
                sys.stderr.write(f"{error}\n")
                continue
            if code:
                return code
        stop.wait(LOOK_S)
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rlk_repro.job.pod", description=__doc__, allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--num-nodes", type=int, default=1, metavar="N")
    parser.add_argument("--inputs", type=Path, default=Path("/etc/rlk-repro"), metavar="DIR")
    parser.add_argument("--last-word", type=Path, default=Path("/dev/termination-log"), metavar="FILE",
                        help="where the leading pod writes its last progress report, for the pod's status")  # fmt: skip
    args = parser.parse_args(argv)
    index, run_dir = int(os.environ.get(INDEX_VARIABLE, "0")), RunDir(args.run_dir.absolute())
    return finish(lambda: _run(args, run_dir, index, os.environ.get(NODE_VARIABLE) or platform.node()))


def _run(args: argparse.Namespace, run_dir: RunDir, index: int, node: str) -> int:
    stop = Stop()
    with stop.installed():
        if index > 0:
            return follow(run_dir, node, index, stop)
        if not run_dir.is_sealed:
            bring_in(run_dir, args.inputs)
        with _printing_logs(run_dir):
            code = lead(run_dir, node, args.num_nodes, stop)
    last = read_last_word(run_dir)
    with suppress(OSError):
        args.last_word.write_bytes(dump_json(replace(last, message=last.message[:MAX_MESSAGE]).to_json()))
    return code


if __name__ == "__main__":
    sys.exit(main())
