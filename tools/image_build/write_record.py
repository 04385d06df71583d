"""Write the record of the build into the image: the facts of this container, as the probes of a job find them."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from rlk_repro.base.errors import CheckFailed, Problem
from rlk_repro.base.files import write_json
from rlk_repro.images.match import check_kernels, check_sources, match_operators
from rlk_repro.images.record import Base, ImageRecord
from rlk_repro.images.resolve import ask_registry
from rlk_repro.probes import code
from rlk_repro.probes.container import find_record
from rlk_repro.probes.installed import load_build_record
from rlk_repro.rundir.manifest import Unknown
from tools.image_build.inputs import ADDED_PACKAGES, BASE_PACKAGES, Inputs
from tools.image_build.kernels import refuse, stub_environment
from tools.image_build.package import check_untouched
from tools.rl_kernel.record import find_distribution


def write_record(inputs: Inputs) -> None:
    """Check the image, and write its record if nothing is wrong.

    Raises:
        CheckFailed: the base's packages were changed, or sources, kernels or operators are wrong.
    """
    added = json.loads(ADDED_PACKAGES.read_text())
    check_untouched(json.loads(BASE_PACKAGES.read_text()), added)
    made = make_record(inputs, tuple(added))
    with tempfile.TemporaryDirectory(prefix="rlk-repro-stub-") as folder:
        answer = ask_registry(stub_environment(os.environ, Path(folder)))
    if isinstance(answer, Unknown):
        raise CheckFailed(Problem("rl_engine", f"cannot be imported ({answer.reason})"))
    refuse([*check_sources(made), *check_kernels(made), *match_operators(made, answer)])
    write_json(Path(find_record()), made.to_json())


def make_record(inputs: Inputs, added: tuple[str, ...]) -> ImageRecord:
    """Make the record from the build arguments and the facts of this container."""
    section = code.probe(environ={})
    megatron = section.get("megatron")
    commit = megatron.get("commit") if isinstance(megatron, dict) else None
    built = load_build_record(find_distribution())
    if built is None:
        raise CheckFailed(Problem("RL-Kernel", "was not installed by this build"))
    return ImageRecord(
        stack=inputs.stack,
        platform=inputs.image_platform,
        base=Base(reference=inputs.base_name, digest=inputs.base_digest),
        commits={
            "rlk_repro": inputs.revision,
            "vime": inputs.vime_commit,
            "rl_kernel": inputs.rl_kernel_commit,
            **({"megatron_lm": commit} if isinstance(commit, str) else {}),
        },
        code={name: fact for name, fact in section.items() if name != "python_kind"},
        build={
            "source_date_epoch": int(inputs.source_date_epoch),
            "asked_architectures": list(inputs.architectures),
            "rl_kernel": json.loads(json.dumps(asdict(built))),
            "pip": metadata.version("pip"),
        },
        added_packages=added,
    )
