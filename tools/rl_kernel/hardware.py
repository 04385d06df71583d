"""Print the hardware name that describes this machine, for ``--hardware``: ``python -m tools.rl_kernel.hardware``."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rlk_repro.base.errors import EnvironmentMissing, Problem, finish
from rlk_repro.base.resources import hardware_folders, list_names
from rlk_repro.spec import Hardware
from rlk_repro.spec.load import load_hardware
from tools.rl_kernel.proof import ask


def find_hardware(known: Iterable[Hardware], platform: str, device: str) -> Hardware | None:
    """Return the first hardware whose platform and name match torch's report."""
    for hardware in known:
        is_refused = any(part in device for part in hardware.refused_name_parts)
        if hardware.platform == platform and hardware.name_part in device and not is_refused:
            return hardware
    return None


def print_hardware() -> None:
    machine = ask("machine")
    names = list_names(hardware_folders())
    known = [load_hardware(name).model for name in names]
    found = find_hardware(known, machine["platform"], machine["device"])
    if found is None:
        hint = "name a hardware: HARDWARE=…; or set CUDA_VISIBLE_DEVICES= to use the CPU"
        raise EnvironmentMissing(Problem(machine["device"], "no hardware file describes it",
                                         expected=f"one of {', '.join(names)}", hint=hint))  # fmt: skip
    print(found.hardware)


if __name__ == "__main__":
    sys.exit(finish(print_hardware, has_title=False))
