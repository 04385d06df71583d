"""A trainer that is a Ray driver: ``python trainer.py NUM_NODES SECONDS [FOLDER]``.

It runs a task on every node, says where each ran and what it inherited, then idles.  With a folder, each task leaves a
process in a session of its own behind and its pid there, as inference servers do.
"""

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ray: Any = importlib.import_module("ray")

STEP = "[2026-11-20 13:45:12] train_metric_utils.py:50 - perf {}: {{'perf/train_time': 0.1, 'perf/step_time': 0.1}}"


@ray.remote
def look(folder: str) -> str:
    if folder:
        sleeper = subprocess.Popen(["sleep", "300"], start_new_session=True)
        (Path(folder) / str(sleeper.pid)).touch()
    node = ray.get_runtime_context().get_node_id()
    name = next(item["NodeName"] for item in ray.nodes() if item["NodeID"] == node)
    kernel = os.environ.get("VIME_RL_KERNEL", "0")
    proxy = os.environ.get("http_proxy", "none")
    return f"{name} host={os.environ['VIME_HOST_IP']} switch={kernel} proxy={proxy}"


def main() -> None:
    num_nodes, seconds, folder = int(sys.argv[1]), float(sys.argv[2]), "".join(sys.argv[3:])
    ray.init(log_to_driver=False)
    nodes = [item for item in ray.nodes() if item["Alive"]]
    assert len(nodes) == num_nodes, nodes
    places = [
        ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(item["NodeID"], soft=False) for item in nodes
    ]
    for line in sorted(ray.get([look.options(scheduling_strategy=place).remote(folder) for place in places])):
        sys.stdout.write(f"task on {line}\n")
    for number in range(3):
        sys.stdout.write(STEP.format(number) + "\n")
    sys.stdout.flush()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ray.get([look.options(scheduling_strategy=place).remote("") for place in places], timeout=30)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
