"""Build a wheel of RL-Kernel on a machine without a GPU, where its setup would compile no kernels, or refuse to build.

This is a script for a separate process, in the folder of the sources: ``python cross_build.py WHEEL_FOLDER PLATFORM``.
For ``cuda``, torch is made to report a GPU, so that the setup compiles kernels; nvcc.py chooses the GPUs for which each
file is compiled.  For ``rocm``, torch is made to report no ROCm, because newer commits would compile an extension.
"""

from __future__ import annotations

import importlib
import sys

import torch


def build(folder: str, platform: str) -> None:
    if platform == "cuda":
        torch.cuda.is_available = lambda: True
        torch.cuda.get_device_capability = lambda *_: (9, 0)
    else:
        torch.version.hip = None
    backend = importlib.import_module("setuptools.build_meta")
    sys.argv = ["setup.py"]
    print(backend.build_wheel(folder))


if __name__ == "__main__":
    build(*sys.argv[1:])
