"""``python -m rlk_repro.pod VERB RUN_DIR``: the command of every container, and those that answer inside it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from rlk_repro.errors import RlkReproError
from rlk_repro.files import dump_json
from rlk_repro.pod import answers
from rlk_repro.rundir import RunDir


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse_args(argv)
    try:
        return _VERBS[args.verb](RunDir(args.run_dir.absolute()), args)
    except RlkReproError as error:
        sys.stderr.write(f"{error.title}: {error}\n")
        return error.exit_code


def _show(run_dir: RunDir, args: argparse.Namespace) -> int:  # noqa: ARG001 (the signature of a verb)
    sys.stdout.buffer.write(dump_json(answers.read_facts(run_dir, os.environ).to_json()))
    return 0


def _block(run_dir: RunDir, args: argparse.Namespace) -> int:
    sys.stdout.buffer.write(answers.read_block(run_dir, args.what, args.offset, args.size))
    return 0


def _stop(run_dir: RunDir, args: argparse.Namespace) -> int:  # noqa: ARG001 (the signature of a verb)
    return 0 if answers.ask_to_stop(run_dir, os.environ) else 1


def _work(run_dir: RunDir, args: argparse.Namespace) -> int:
    # imported here: an answer must not wait for what only the work needs
    from rlk_repro.k8s.naming import INDEX_VARIABLE
    from rlk_repro.pod import supervise

    if args.verb == "wait":
        return supervise.wait_for_end(run_dir)
    if args.verb == "serve":
        return supervise.serve(run_dir, os.environ)
    duty = supervise.Duty(
        run_dir=run_dir,
        inputs=args.inputs,
        num_nodes=args.num_nodes,
        is_kuberay=args.kuberay,
        hold_s=args.hold_min * 60,
    )
    leads = args.verb == "lead" or (args.verb == "take-part" and os.environ.get(INDEX_VARIABLE, "0") == "0")
    return (supervise.lead if leads else supervise.follow)(duty, os.environ)


# the last one leads or follows by the index that a Job gives it
_AGENTS: Final = ("lead", "follow", "take-part")
_VERBS: Final[Mapping[str, Callable[[RunDir, argparse.Namespace], int]]] = {
    **dict.fromkeys((*_AGENTS, "serve", "wait"), _work),
    "show": _show,
    "block": _block,
    "stop": _stop,
}


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rlk_repro.pod", description=__doc__, allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name in _VERBS:
        verb = verbs.add_parser(name, allow_abbrev=False)
        verb.add_argument("run_dir", type=Path, metavar="RUN_DIR")
        if name in _AGENTS:
            verb.add_argument("--num-nodes", type=int, default=1, metavar="N")
            verb.add_argument("--inputs", type=Path, default=Path("/etc/rlk-repro"), metavar="DIR")
            verb.add_argument("--kuberay", action="store_true", help="KubeRay made this pod: start its Ray")
            verb.add_argument("--hold-min", type=float, default=0.0, metavar="MIN", help="stay so long after the end")
        if name == "block":
            verb.add_argument("what", metavar="FILE", help="bundle or trials/NAME")
            verb.add_argument("offset", type=int, metavar="OFFSET")
            verb.add_argument("size", type=int, metavar="SIZE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
