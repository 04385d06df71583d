"""What authors write: run, stack, hardware and profile as strict, frozen models.  Loading them is specfile's business.

Every model refuses unknown keys and converts nothing.
"""

from rlk_repro.spec.assets import ArithmeticData, Checkpoint, HubData, HubSource, RandomWeights, StoredRollouts
from rlk_repro.spec.files import (
    FromEnv,
    Hardware,
    Image,
    Layout,
    Margins,
    Measure,
    Pin,
    Profile,
    RlKernel,
    Run,
    Stack,
    Workload,
    run_problems,
)
from rlk_repro.spec.kubernetes import KubernetesSettings
from rlk_repro.spec.preflight import CheckName, Policy, Preflight
from rlk_repro.spec.ray import RaySettings
from rlk_repro.spec.site import ContainerSettings, Mount, SlurmSettings
from rlk_repro.spec.values import SCHEMA, Lane, Model, PathProblem, Variant
from rlk_repro.spec.vime import Placement, VimeData, VimeGrpo, VimeModel, VimeWorkload
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
)

__all__ = [
    "SCHEMA",
    "ArithmeticData",
    "CheckName",
    "Checkpoint",
    "ContainerSettings",
    "FromEnv",
    "Grid",
    "Grpo",
    "Hardware",
    "HubData",
    "HubSource",
    "Image",
    "Lane",
    "Layout",
    "Margins",
    "Measure",
    "Model",
    "ModuleBatch",
    "ModuleLoss",
    "ModuleWorkload",
    "Mount",
    "OperatorsWorkload",
    "PathProblem",
    "Pin",
    "Placement",
    "Policy",
    "Preflight",
    "Profile",
    "RandomWeights",
    "RaySettings",
    "ReferenceModel",
    "ReferenceTask",
    "ReferenceWorkload",
    "RlKernel",
    "Run",
    "SlurmSettings",
    "Stack",
    "StoredRollouts",
    "Variant",
    "VimeData",
    "VimeGrpo",
    "VimeModel",
    "VimeWorkload",
    "Workload",
    "run_problems",
]
