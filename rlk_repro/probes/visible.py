"""Select the GPUs that ``CUDA_VISIBLE_DEVICES`` gives to a job.  NVML and nvidia-smi show all GPUs of the machine.

https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#env-vars
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

NAME: Final = "CUDA_VISIBLE_DEVICES"
_NUMBER: Final = re.compile(r"\d{1,4}")
_UUID: Final = re.compile(r"GPU-[0-9a-f-]{1,36}", re.IGNORECASE)

Gpu = TypeVar("Gpu")


def select_given(gpus: Sequence[Gpu], identify: Callable[[Gpu], tuple[object, object]]) -> list[Gpu]:
    """Return the ``gpus`` of this job; ``identify`` returns the number and the uuid of a GPU.

    As in CUDA, an entry that is neither number nor uuid ends the list, and a uuid may be shortened.  If the list names
    none of the machine's GPUs, all GPUs are selected.  GPUs and their numbers follow the driver's order, which is
    CUDA's order if all GPUs of a node are the same model.
    """
    listed = os.environ.get(NAME)
    if listed is None:
        return list(gpus)
    given = [gpu for gpu in gpus if _is_listed(listed, *identify(gpu))]
    return given or list(gpus)


def _is_listed(listed: str, index: object, uuid: object) -> bool:
    for entry in map(str.strip, listed.split(",")):
        if _NUMBER.fullmatch(entry):
            if int(entry) == index:
                return True
        elif not _UUID.fullmatch(entry):
            return False
        elif str(uuid).lower().startswith(entry.lower()):
            return True
    return False
