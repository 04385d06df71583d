"""Build a wheel of RL-Kernel with kernels on a machine without a GPU: torch is made to report a GPU.

Without a GPU, RL-Kernel's setup compiles no kernels.  This is a script for a separate process: ``python cross_build.py
WHEEL_FOLDER``, in the folder of the sources.  The reported GPU only makes RL-Kernel's setup
compile kernels; nvcc.py chooses the GPUs for which each file is compiled.
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
