"""Install RL-Kernel for this machine, check it, and print what was installed: ``python -m tools.rl_kernel``."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from rlk_repro.base.errors import finish
from rlk_repro.operators import OPERATORS, Platform
from rlk_repro.spec.load import load_stack
from tools.rl_kernel import build
from tools.rl_kernel.source import Sources, get_sources


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.rl_kernel", description=__doc__)
    parser.add_argument("--stack", default="rl-kernel-host", help="the stack whose pin rl_kernel is installed")
    parser.add_argument("--source", type=Path, help="use this git checkout or unpacked archive; download nothing")
    options = parser.parse_args()
    return finish(lambda: install(options.stack, options.source), has_title=False)


def install(stack: str, origin: Path | None) -> None:
    """Get the sources, build them unless this build is already installed, and check the installation.

    Raises:
        RlkReproError: names the problem and the next step.
    """
    pin = load_stack(stack).model.pins.get("rl_kernel")
    machine = build.describe_machine(os.environ)
    build.check_compiler(machine, os.environ)
    architectures = [machine.device_capability.replace(".", "")] if machine.device_capability else []
    environ = build.make_environment(os.environ, machine, architectures)
    with tempfile.TemporaryDirectory(prefix="rlk-repro-build-") as parent:
        sources = get_sources(pin, origin, Path(parent) / "RL-Kernel")
        made = build.repair(sources, machine, environ)
        if build.is_installed(made):
            print(f"{_name(sources)} is already installed")
        else:
            print(f"building {_name(sources)} …", flush=True)
            build.install(made, sources.folder, environ)
    chosen = build.check(made, architectures, os.environ)
    print(f"RL-Kernel for {machine.device or 'the CPU'}:")
    for name, class_name in sorted(chosen.items()):
        implementation = OPERATORS[name].find_implementation(machine.platform, class_name)
        is_kernel = implementation is not None and not implementation.is_native
        print(f"  {name:<11} {class_name:<26} {'kernel' if is_kernel else 'native: plain PyTorch'}")
    if machine.platform == Platform.CPU:
        print("  torch sees no GPU here, so RL-Kernel builds no kernels; no speed can be claimed")


def _name(sources: Sources) -> str:
    what = sources.commit[:12] if sources.commit else f"tree {sources.tree[:12]}"
    return f"RL-Kernel {what}{' with changed files' if sources.is_dirty else ''}"


if __name__ == "__main__":
    sys.exit(main())
