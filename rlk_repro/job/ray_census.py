"""``python -m rlk_repro.job.ray_census ADDRESS``: the names of the living nodes, as Ray's own records have them.

A process of its own, so that no agent ever imports ray.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def main() -> None:
    ray: Any = importlib.import_module("ray")
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
    names = sorted(node["NodeName"] for node in ray.nodes() if node["Alive"])
    sys.stdout.write(json.dumps(names) + "\n")


if __name__ == "__main__":
    main()
