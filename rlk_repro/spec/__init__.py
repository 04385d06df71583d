"""What authors write: run, stack, hardware and profile as strict, frozen models.  Loading them is specfile's business.

Every model refuses unknown keys and converts nothing.
"""

from rlk_repro.spec.files import (
    FromEnv,
    Hardware,
    Image,
    Layout,
    Margins,
    Measure,
    Pin,
    Preflight,
    Profile,
    RlKernel,
    Run,
    Stack,
    run_problems,
)
from rlk_repro.spec.values import SCHEMA, Lane, Model, PathProblem, Variant
from rlk_repro.spec.workloads import (
    Grid,
    Grpo,
    ModuleBatch,
    ModuleLoss,
    ModuleWorkload,
    OperatorsWorkload,
    ReferenceModel,
    ReferenceTask,
    ReferenceWorkload,
    Workload,
)

__all__ = [
    "SCHEMA",
    "FromEnv",
    "Grid",
    "Grpo",
    "Hardware",
    "Image",
    "Lane",
    "Layout",
    "Margins",
    "Measure",
    "Model",
    "ModuleBatch",
    "ModuleLoss",
    "ModuleWorkload",
    "OperatorsWorkload",
    "PathProblem",
    "Pin",
    "Preflight",
    "Profile",
    "ReferenceModel",
    "ReferenceTask",
    "ReferenceWorkload",
    "RlKernel",
    "Run",
    "Stack",
    "Variant",
    "Workload",
    "run_problems",
]
