"""Install RL-Kernel, check it, and print what was installed: ``python -m tools.rl_kernel``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

from rlk_repro.base.errors import CheckFailed, finish
from rlk_repro.operators import Platform
from rlk_repro.probes.extension import build_variables
from rlk_repro.rundir.manifest import Unknown
from rlk_repro.sources import RL_KERNEL
from rlk_repro.spec.load import load_stack
from tools.rl_kernel import build, proof, record
from tools.rl_kernel.repair import apply_repairs
from tools.rl_kernel.source import Sources, get_sources


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.rl_kernel", description=__doc__)
    parser.add_argument("--stack", default="rl-kernel-host", help="the stack whose pin rl_kernel is installed")
    parser.add_argument("--source", type=Path, help="use this git checkout or unpacked archive; download nothing")
    parser.add_argument("--sm90", action="store_true", help="also build the Hopper operators, repaired for CUDA 13")
    options = parser.parse_args()
    return finish(lambda: install(options.stack, options.source, is_sm90=options.sm90), has_title=False)


def install(stack: str, origin: Path | None, *, is_sm90: bool = False) -> None:
    """Get the sources, build them unless this build is already installed, and check the installation.

    Raises:
        RlkReproError: names the problem and the next step.
    """
    pin = load_stack(stack).model.pins.get("rl_kernel")
    machine = build.describe_machine(proof.ask("machine"), os.environ)
    build.check_compiler(machine, is_sm90=is_sm90)
    environ = build.make_environment(os.environ, platform=machine.platform, is_sm90=is_sm90)
    with tempfile.TemporaryDirectory(prefix="rlk-repro-build-") as parent:
        sources = get_sources(pin, origin, Path(parent) / "RL-Kernel")
        repairs = apply_repairs(machine.toolkit, sources.folder) if is_sm90 else ()
        variables = build_variables(environ)
        given = {} if isinstance(variables, Unknown) else {name: str(variables[name]) for name in variables}
        wanted = record.make_record(sources, repairs, given, machine)
        if record.is_installed(wanted):
            print(f"{_name(sources)} is already installed")
        else:
            print(f"building {_name(sources)} …", flush=True)
            needs_ninja = wanted.platform != Platform.CPU
            for path in record.install(
                wanted, partial(build.pip_install, sources.folder, environ, needs_ninja=needs_ninja)
            ):
                print(f"kept this tool's command {path.name}; RL-Kernel's command of the same name is not installed")
    prove(machine, is_sm90=is_sm90)


def prove(machine: build.Machine, *, is_sm90: bool) -> None:
    """Print the class and the kernels that every operator uses.

    Raises:
        CheckFailed: the class or the kernels are not those that this machine should have.
    """
    found = proof.find_rl_kernel()
    distribution = record.find_distribution()
    assert distribution is not None
    installed = Path(str(distribution.locate_file(RL_KERNEL.module)))
    problems = list(proof.find_problems(found, platform=machine.platform, installed=installed, is_sm90=is_sm90))
    if problems:
        raise CheckFailed(*problems)
    print(f"RL-Kernel {distribution.version} on {machine.device or 'the CPU'}:")
    for line in proof.describe(found, machine.platform):
        print(f"  {line}")


def _name(sources: Sources) -> str:
    what = sources.commit[:12] if sources.commit else f"tree {sources.tree[:12]}"
    return f"RL-Kernel {what}{' with changed files' if sources.is_dirty else ''}"


if __name__ == "__main__":
    sys.exit(main())
