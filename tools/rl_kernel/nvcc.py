#!/usr/bin/env python3
"""Replace nvcc while RL-Kernel is built, and compile every source file for exactly its GPUs.

RL-Kernel gives all its files one list of GPUs; with its Hopper switch on, that list names only Hopper. torch
runs the program that ``PYTORCH_NVCC`` names.  This script uses the standard library only and changes nothing but the
architectures.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Final

NVCC: Final = "RLK_REPRO_NVCC"
ARCHITECTURES: Final = "RLK_REPRO_ARCHITECTURES"
HOPPER_FILES: Final = "_sm90.cu"
HOPPER: Final = ("90a",)
_SELECTORS: Final = ("-gencode", "--generate-code", "-arch", "--gpu-architecture", "-code", "--gpu-code")


def rewrite(arguments: Sequence[str], generic: Sequence[str]) -> list[str]:
    """Replace the GPUs in nvcc's arguments by those of the source file among the arguments.

    A file with Hopper's own instructions is compiled for Hopper alone.
    """
    sources = [item for item in arguments if item.endswith(".cu")]
    if not sources:
        return list(arguments)
    if all(item.endswith(HOPPER_FILES) for item in sources):
        generic = HOPPER
    return [*_without_selectors(arguments), *(f"-gencode=arch=compute_{name},code=sm_{name}" for name in generic)]


def _without_selectors(arguments: Sequence[str]) -> Iterator[str]:
    takes_value = False
    for item in arguments:
        if takes_value:
            takes_value = False
        elif item in _SELECTORS:
            takes_value = True
        elif not item.startswith(tuple(f"{name}=" for name in _SELECTORS)):
            yield item


if __name__ == "__main__":
    nvcc = os.environ[NVCC]
    os.execv(nvcc, [nvcc, *rewrite(sys.argv[1:], os.environ[ARCHITECTURES].split())])  # noqa: S606
