"""Run a pod's work, or answer a ``kubectl exec`` of a client: ``python -m rlk_repro.pod VERB RUN_DIR``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rlk_repro.base.errors import finish
from rlk_repro.base.files import dump_json
from rlk_repro.clusters.k8s.pod import answers
from rlk_repro.rundir.paths import RunDir

# with "take-part", the pod with index 0 of the Job leads, and every other pod follows
_AGENTS: Final = ("lead", "follow", "take-part")
_ANSWERS: Final = ("show", "block", "stop")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse_args(argv)
    run_dir = RunDir(args.run_dir.absolute())
    return finish(lambda: _answer(run_dir, args) if args.verb in _ANSWERS else _work(run_dir, args))


def _answer(run_dir: RunDir, args: argparse.Namespace) -> int:
    if args.verb == "stop":
        return 0 if answers.ask_to_stop(run_dir, os.environ) else 1
    if args.verb == "show":
        data = dump_json(answers.read_facts(run_dir, os.environ).to_json())
    else:
        data = answers.read_block(run_dir, args.what, args.offset, args.size)
    sys.stdout.buffer.write(data)
    return 0


def _work(run_dir: RunDir, args: argparse.Namespace) -> int:
    # imported here, because the commands in _ANSWERS must not wait for imports that they do not need
    from rlk_repro.clusters.k8s.naming import INDEX_VARIABLE
    from rlk_repro.clusters.k8s.pod import supervise

    if args.verb == "wait":
        return supervise.wait_for_end(run_dir, os.environ)
    if args.verb == "serve":
        return supervise.serve(run_dir, os.environ)
    duty = supervise.Duty(
        run_dir=run_dir,
        inputs=args.inputs,
        num_nodes=args.num_nodes,
        is_kuberay=args.kuberay,
        hold_s=args.hold_min * 60,
        num_restarts=args.restarts,
    )
    leads = args.verb == "lead" or (args.verb == "take-part" and os.environ.get(INDEX_VARIABLE, "0") == "0")
    return (supervise.lead if leads else supervise.follow)(duty, os.environ)


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rlk_repro.pod", description=__doc__, allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name in (*_AGENTS, "serve", "wait", *_ANSWERS):
        verb = verbs.add_parser(name, allow_abbrev=False)
        verb.add_argument("run_dir", type=Path, metavar="RUN_DIR")
        if name in _AGENTS:
            verb.add_argument("--num-nodes", type=int, default=1, metavar="N")
            verb.add_argument("--inputs", type=Path, default=Path("/etc/rlk-repro"), metavar="DIR")
            verb.add_argument("--kuberay", action="store_true", help="start Ray in this pod, which KubeRay made")
            verb.add_argument(
                "--hold-min", type=float, default=0.0, metavar="MIN", help="minutes the pod may outlive its agent"
            )
            verb.add_argument(
                "--restarts", type=int, default=0, metavar="N", help="how many times the agents may restart"
            )
        if name == "block":
            verb.add_argument("what", metavar="FILE", help="the bundle, or trials/NAME")
            verb.add_argument("offset", type=int, metavar="OFFSET")
            verb.add_argument("size", type=int, metavar="SIZE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
