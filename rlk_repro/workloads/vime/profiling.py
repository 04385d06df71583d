"""Start Ray's workers under a profiler other than torch's: nsys or rocprofv3.

A worker in which ``integration`` never starts the profiler writes no trace.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rlk_repro.plan import Plan
from rlk_repro.switches import PROFILED_STEPS
from rlk_repro.workloads.environment import JOB_CONFIG, OVERRIDE_JOB_CONFIG
from rlk_repro.workloads.vime.arguments import NUM_PROFILED_STEPS
from rlk_repro.workloads.vime.layout import vime_of

_COMMANDS: Final[Mapping[str, tuple[str, ...]]] = {
    "nsys": (
        *("nsys", "profile", "--trace=cuda,nvtx,cublas,cudnn", "--sample=none", "--cpuctxsw=none"),
        *("--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--force-overwrite=true"),
        "--output={traces}/%h-%p",
    ),
    "rocprofv3": (
        *("rocprofv3", "--kernel-trace", "--memory-copy-trace", "--marker-trace", "--selected-regions"),
        *("--output-format", "pftrace", "--output-directory", "{traces}", "--output-file", "%hostname%-%pid%", "--"),
    ),
}


def profiler_env(plan: Plan, traces: Path) -> dict[str, str]:
    """Return the variables by which Ray starts workers under the run's profiler; empty if the profiler is torch's."""
    programs = vime_of(plan).programs
    if not programs:
        return {}
    words = [word.replace("{traces}", str(traces.absolute())) for word in _COMMANDS[programs[0]]]
    config = {"runtime_env": {"py_executable": shlex.join([*words, sys.executable])}, "metadata": {}}
    first = max(plan.run.measure.warmup_steps, 1)
    return {
        JOB_CONFIG: json.dumps(config, sort_keys=True),
        OVERRIDE_JOB_CONFIG: "1",
        PROFILED_STEPS: f"{first}:{first + NUM_PROFILED_STEPS}",
    }
