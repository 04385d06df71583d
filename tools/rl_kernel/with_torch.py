"""Do what needs torch in a process of its own, because torch may occupy a GPU.

``python with_torch.py`` prints torch's facts of this machine as JSON; RL-Kernel's setup and its registry ask torch
for the platform too.  ``python with_torch.py WHEEL_FOLDER PLATFORM``, in the folder of the sources, builds a wheel of
RL-Kernel on a machine without a GPU, where its setup would compile no kernels, or refuse to build.  For ``cuda``,
torch is made to report a GPU, so that the setup compiles kernels; nvcc.py chooses the GPUs for which each file is
compiled.  For ``rocm``, torch is made to report no ROCm, because newer commits would compile an extension.
Newer commits also declare a command ``rlk-repro``, which would replace this tool's, so the wheel does not have it.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch


def describe_machine() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "platform": "cpu",
        "torch": torch.__version__,
        "toolkit": torch.version.hip or torch.version.cuda,
    }
    if torch.cuda.is_available():
        facts["platform"] = "rocm" if torch.version.hip else "cuda"
        facts["device"] = torch.cuda.get_device_name()
        facts["device_capability"] = "{}.{}".format(*torch.cuda.get_device_capability())
    return facts


def build(folder: str, platform: str) -> None:
    if platform == "cuda":
        torch.cuda.is_available = lambda: True
        torch.cuda.get_device_capability = lambda *_: (9, 0)
    else:
        torch.version.hip = None
    backend = importlib.import_module("setuptools.build_meta")
    sys.argv = ["setup.py"]
    wheel = Path(folder, backend.build_wheel(folder))
    drop_command(wheel)
    print(wheel.name)


def drop_command(wheel: Path) -> None:
    made = wheel.rename(wheel.with_suffix(".made"))
    with ZipFile(made) as source, ZipFile(wheel, "w") as target:
        for item in source.infolist():
            data = source.read(item)
            if item.filename.endswith(".dist-info/entry_points.txt"):
                kept = [line for line in data.splitlines(keepends=True) if not line.startswith(b"rlk-repro ")]
                data = b"".join(kept)
            target.writestr(item, data)


if __name__ == "__main__":
    if sys.argv[1:]:
        build(*sys.argv[1:])
    else:
        print(json.dumps(describe_machine()))
