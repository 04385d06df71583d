"""Select the environment variables that influence a run, by an allow-list."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rlk_repro.base.places import hide_places
from rlk_repro.base.secrets import REDACTED, looks_secret, scrub
from rlk_repro.rundir.manifest import Fact
from rlk_repro.sources import PINNED

SECTION: Final = "environment"

PREFIXES: Final = (
    *("NCCL_", "RCCL_", "GLOO_", "UCX_", "NVSHMEM_"),
    *("CUDA_", "CUBLAS", "CUDNN_", "NVIDIA_", "HSA_", "HIP_", "ROCR_", "GPU_", "MIOPEN_"),
    *("TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "NVTE_", "VLLM_", "RAY_", "OMP_", "MKL_"),
    *("RLK_REPRO_", "SLURM_"),
    *(prefix for source in PINNED for prefix in source.prefixes),
)
NAMES: Final = ("PYTHONHASHSEED", *(source.variable for source in PINNED))
# These variables hold identities, addresses or paths.  Job scripts use this pattern too, so it must be valid in bash.
PRIVATE: Final = re.compile(
    r"SLURM_.*(_USER|_UID|_GID|_GROUP|_ACCOUNT|_HOST|_IPADDR|_ADDR|_DIR|_PORT|_CONF|SUBMIT_.*)|RAY_ADDRESS|.*_HOST_IP"
    r"|.*_SERVICE_(HOST|PORT)(_.*)?|.*_PORT(_[0-9]+_(TCP|UDP)(_.*)?)?|RLK_REPRO_RUNS"
)


def probe(_root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> dict[str, Fact]:
    return dict(select(environ))


def select(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to record, sorted; a value that looks like a secret becomes ``<redacted>``."""
    names = sorted(name for name in environ if _is_wanted(name))
    return {
        name: REDACTED if looks_secret(name, environ[name]) else hide_places(scrub(environ[name])) for name in names
    }


def _is_wanted(name: str) -> bool:
    return (name in NAMES or name.startswith(PREFIXES)) and PRIVATE.fullmatch(name) is None
