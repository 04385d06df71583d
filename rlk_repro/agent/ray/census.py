"""Print the names of the nodes that Ray reports as alive.

An agent never imports ray; it runs ``python -m rlk_repro.agent.ray.census ADDRESS`` instead.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any, Final

_MARK: Final = "rlk-repro nodes: "


def main() -> None:
    ray: Any = importlib.import_module("ray")
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
    names = sorted(node["NodeName"] for node in ray.nodes() if node["Alive"])
    sys.stdout.write(f"\n{_MARK}{json.dumps(names)}\n")


def parse_names(output: str) -> tuple[str, ...]:
    """Return the node names that ``main`` printed among Ray's output; the result is empty if ``main`` failed."""
    answers = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
    return tuple(json.loads(answers[-1])) if answers else ()


if __name__ == "__main__":
    main()
