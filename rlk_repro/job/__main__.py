"""Parse the node agent's command line: ``python -m rlk_repro.job RUN_DIR``."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from rlk_repro.agent.agent import run_agent
from rlk_repro.agent.parts import make_place
from rlk_repro.base.errors import finish
from rlk_repro.rundir.paths import RunDir


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rlk_repro.job", description="Runs the trials of a staged run directory on this node.",
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a directory that `rlk-repro submit` staged")
    parser.add_argument("--node", default=platform.node(), help="name of this node (default: its host name)")
    parser.add_argument("--nodes", metavar="A,B,…", help="names of all nodes, leader first (default: this node)")
    parser.add_argument("--allocation", metavar="ID", help="id that the agents of one allocation share")
    parser.add_argument(
        "--until", type=float, default=0.0, metavar="SECONDS", help="Unix time at which the last pair must have ended"
    )
    args = parser.parse_args(argv)
    nodes = tuple((args.nodes or args.node).split(","))
    run_dir = RunDir(args.run_dir.absolute())
    return finish(lambda: run_agent(run_dir, make_place(args.node, nodes, args.allocation, args.until)))


if __name__ == "__main__":
    sys.exit(main())
