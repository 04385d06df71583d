"""Builds the wheel of the sources in this folder as if a GPU were here: RL-Kernel compiles its kernels only then.

A script for a process of its own: ``python cross_build.py WHEEL_FOLDER``.  What is compiled for which GPU is nvcc.py's
business; the capability told here only opens the door.
"""

from __future__ import annotations

import importlib
import sys


def pretend_gpu() -> None:
    import torch

    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: (9, 0)


def build(folder: str) -> None:
    backend = importlib.import_module("setuptools.build_meta")
    sys.argv = ["setup.py"]
    print(backend.build_wheel(folder))


if __name__ == "__main__":
    target = sys.argv[1]
    pretend_gpu()
    build(target)
