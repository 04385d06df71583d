"""Print the names of the living nodes that Ray knows.

An agent never imports ray; it runs ``python -m rlk_repro.agent.ray.members ADDRESS`` instead.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from typing import Any, Final

from rlk_repro.base import proc

_MARK: Final = "rlk-repro nodes: "
# importing ray takes seconds on a busy machine
_LIMIT_S: Final = 60.0


def main() -> None:
    ray: Any = importlib.import_module("ray")
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
    names = sorted(node["NodeName"] for node in ray.nodes() if node["Alive"])
    sys.stdout.write(f"\n{_MARK}{json.dumps(names)}\n")


def find_members(address: str, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of Ray's living nodes; the result is empty while Ray's head does not answer."""
    argv = [sys.executable, "-m", "rlk_repro.agent.ray.members", address]
    return parse_names(proc.run(argv, timeout_s=_LIMIT_S, env=env).stdout)


def parse_names(output: str) -> tuple[str, ...]:
    """Return the node names that ``main`` printed among Ray's output; an empty tuple if it failed."""
    answers = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
    return tuple(json.loads(answers[-1])) if answers else ()


if __name__ == "__main__":
    main()
