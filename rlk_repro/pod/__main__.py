"""``python -m rlk_repro.pod VERB RUN_DIR``: the command of every container of a job."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rlk_repro.errors import RlkReproError
from rlk_repro.pod.supervise import Duty, follow, lead, serve, wait_for_end
from rlk_repro.rundir import RunDir


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse_args(argv)
    run_dir = RunDir(args.run_dir.absolute())
    try:
        if args.verb == "wait":
            return wait_for_end(run_dir)
        if args.verb == "serve":
            return serve(run_dir, os.environ)
        duty = Duty(
            run_dir=run_dir,
            inputs=args.inputs,
            num_nodes=args.num_nodes,
            is_kuberay=args.kuberay,
            hold_s=args.hold_min * 60,
        )
        return (lead if args.verb == "lead" else follow)(duty, os.environ)
    except RlkReproError as error:
        sys.stderr.write(f"{error.title}: {error}\n")
        return error.exit_code


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rlk_repro.pod", description=__doc__, allow_abbrev=False)
    parser.add_argument("verb", choices=("lead", "follow", "serve", "wait"))
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--num-nodes", type=int, default=1, metavar="N")
    parser.add_argument("--inputs", type=Path, default=Path("/etc/rlk-repro"), metavar="DIR")
    parser.add_argument("--kuberay", action="store_true", help="KubeRay made this pod: start the Ray it asks for")
    parser.add_argument("--hold-min", type=float, default=0.0, metavar="MIN", help="stay for so long after the end")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
