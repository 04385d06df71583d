"""Define the reference trainer's flags, named as in vime and Megatron-LM; all are checked before torch loads.

A run file's settings for this trainer define the flags, with their defaults and limits.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError

from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.refengine.task import PLACEHOLDER
from rlk_repro.spec import ReferenceWorkload
from rlk_repro.spec.workloads import Grpo, ReferenceModel, ReferenceTask

PARTS: Final[dict[str, type[BaseModel]]] = {"model": ReferenceModel, "task": ReferenceTask, "grpo": Grpo}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags, and add the model's sizes together and the samples per optimizer step.

    Raises:
        SpecError: flags contradict each other; the error lists all contradictions.
    """
    parser = argparse.ArgumentParser(
        prog="python -m rlk_repro.refengine",
        description="Reference GRPO trainer, for smoke runs, first tests of machines and automated tests.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for part, settings in PARTS.items():
        add_settings(parser.add_argument_group(part), settings)
    _add_stored_rollouts(parser)
    _add_machine(parser)
    args = parser.parse_args(argv)
    try:
        workload = _make_workload(args)
    except ValidationError as error:
        first = error.errors()[0]
        parser.error(f"argument {_spell(str(first['loc'][-1]))}: {first['msg']}, got {first['input']}")
    problems = [
        Problem(_spell(path[-1]), what, got=got, expected=expected)
        for path, what, got, expected in workload.find_problems()
    ]
    problems += _find_lane_problems(args)
    if problems:
        raise SpecError(*problems)
    args.model = workload.model
    args.debug_train_only = args.load_debug_rollout_data is not None
    args.global_batch_size = workload.grpo.num_samples // args.num_steps_per_rollout
    return args


def add_settings(parser: argparse._ActionsContainer, settings: type[BaseModel]) -> None:
    """Add one flag for each setting; a setting that can be false becomes a flag without a value."""
    for name, field in settings.model_fields.items():
        if name == "kind":
            continue
        kind: Any = field.annotation
        choices = get_args(kind)
        default = None if field.is_required() else field.default
        text = field.description or name.replace("_", " ")
        if kind is bool:
            parser.add_argument(_spell(name), action="store_true", help=text)
        elif choices:
            parser.add_argument(_spell(name), choices=choices, default=default, help=text)
        else:
            parser.add_argument(_spell(name), type=kind, default=default, help=text)


def _spell(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _add_stored_rollouts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("stored rollouts")
    template = f"file template holding {PLACEHOLDER}"
    group.add_argument("--save-debug-rollout-data", metavar="TEMPLATE", help=f"store each rollout: {template}")
    group.add_argument("--load-debug-rollout-data", metavar="TEMPLATE", help=f"train on stored rollouts: {template}")
    group.add_argument("--debug-train-only", action="store_true", help="train only; set if stored rollouts are loaded")


def _add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machine")
    group.add_argument("--num-rollout", type=int, default=400, help="number of rollouts")
    group.add_argument("--seed", type=int, default=1234, help="seed of weights, task and sampling")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="cuda also means AMD GPUs")
    group.add_argument("--num-threads", type=int, help="CPU threads (None: torch's choice)")
    group.add_argument(
        "--custom-megatron-init-path", metavar="MODULE.FUNCTION", help="function called with all flags before training"
    )


def _make_workload(args: argparse.Namespace) -> ReferenceWorkload:
    given = vars(args)
    parts = {}
    for part, settings in PARTS.items():
        names = settings.model_fields.keys() & given.keys()
        parts[part] = settings.model_validate({name: given[name] for name in names})
    return ReferenceWorkload.model_validate(
        {"kind": "reference", "num_threads": 1 if args.num_threads is None else args.num_threads, **parts}
    )


def _find_lane_problems(args: argparse.Namespace) -> Iterator[Problem]:
    for name in ("save_debug_rollout_data", "load_debug_rollout_data"):
        template = getattr(args, name)
        if template is not None and PLACEHOLDER not in template:
            yield Problem(_spell(name), "does not fit", got=template, expected=f"a template with {PLACEHOLDER}")
    is_loading = args.load_debug_rollout_data is not None
    if args.debug_train_only and not is_loading:
        yield Problem("--debug-train-only", "no rollouts to train on", hint="add --load-debug-rollout-data")
    if is_loading and args.save_debug_rollout_data:
        yield Problem("--load-debug-rollout-data", "excludes --save-debug-rollout-data")
