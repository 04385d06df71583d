"""Run one step of an image's build: ``python -m tools.image_build STEP``; see the Dockerfiles."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from rlk_repro.base.errors import finish
from rlk_repro.probes.container import LOCK
from tools.image_build import inputs as arguments
from tools.image_build.inputs import Inputs

VIME_FOLDER: Final = Path("/root/vime")


def is_locked() -> bool:
    """Whether a lock lists the packages of this Python."""
    return (Path(sys.prefix) / LOCK).is_file()


def check_inputs(inputs: Inputs) -> None:
    """Check the arguments; where the stack has a lock, check also that the packages fit the lock and each other."""
    if is_locked():
        from rlk_repro.images.stacks import get_stack
        from tools.image_build.locked import check_packages, check_requirements

        check_packages(get_stack(inputs.stack), inputs.image_platform)  # type: ignore[arg-type]
        check_requirements()


def install_package(_inputs: Inputs) -> None:
    from tools.image_build.package import install_package as install

    arguments.keep_base_packages()
    added = install()
    arguments.BASE_PACKAGES.with_name("added-packages.json").write_text(json.dumps(added) + "\n")


def check_gfx(_inputs: Inputs) -> None:
    from tools.image_build.gfx import check_gfx as check

    check()


def install_vime(inputs: Inputs) -> None:
    from tools.image_build.checkout import install_vime as install

    install(VIME_FOLDER, inputs.vime_repository, inputs.vime_commit)


def install_rl_kernel(inputs: Inputs) -> None:
    from rlk_repro.spec import Pin
    from tools.image_build import kernels

    pin = Pin(repository=inputs.rl_kernel_repository, commit=inputs.rl_kernel_commit)
    if is_locked():
        from tools.image_build.locked import get_pin

        pin = get_pin(inputs)
    if inputs.gpu_platform == "rocm":
        kernels.install_without_kernels(pin)
    else:
        kernels.install_rl_kernel(pin, inputs.architectures)


def write_record(inputs: Inputs) -> None:
    from tools.image_build.write_record import write_record as write

    write(inputs)


def run_locked(step: str, inputs: Inputs) -> None:
    from tools.image_build.locked import STEPS

    STEPS[step](inputs)


STEPS: Final[Mapping[str, Callable[[Inputs], None]]] = {
    "inputs": check_inputs,
    **{step: partial(run_locked, step) for step in ("transformer-engine", "sources", "imports", "sbom")},
    "gfx": check_gfx,
    "package": install_package,
    "vime": install_vime,
    "rl-kernel": install_rl_kernel,
    "record": write_record,
}


def run_step(step: str) -> None:
    if is_locked():
        from tools.image_build.toolkit import use_toolkit

        os.environ.update(use_toolkit(os.environ))
    STEPS[step](arguments.read_inputs())


if __name__ == "__main__":
    sys.exit(finish(lambda: run_step(sys.argv[1]), has_title=False))
