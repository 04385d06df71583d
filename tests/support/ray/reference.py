"""The reference trainer as a Ray driver: ``python -m tests.support.ray.reference NUM_NODES ARGUMENT…``.

It trains only in a cluster of that many nodes, of which each has run a task and told its name and its switch.
"""

import importlib
import os
import runpy
import sys
from typing import Any

from rlk_repro.workloads.reference import TRAINER

ray: Any = importlib.import_module("ray")


@ray.remote(num_cpus=0)
def look() -> str:
    node = ray.get_runtime_context().get_node_id()
    name = next(item["NodeName"] for item in ray.nodes() if item["NodeID"] == node)
    kernel = os.environ.get("VIME_RL_KERNEL", "0")
    return f"{name} host={os.environ.get('VIME_HOST_IP', 'unset')} switch={kernel}"


def main() -> None:
    num_nodes = int(sys.argv.pop(1))
    ray.init(log_to_driver=False)
    nodes = [item["NodeID"] for item in ray.nodes() if item["Alive"]]
    assert len(nodes) == num_nodes, nodes
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    tasks = [look.options(scheduling_strategy=affinity(node, soft=False)).remote() for node in nodes]
    for line in sorted(ray.get(tasks, timeout=60)):
        sys.stdout.write(f"task on {line}\n")
    sys.stdout.flush()
    runpy.run_module(TRAINER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
