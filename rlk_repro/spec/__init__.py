"""Define what authors write: run, stack, hardware and profile as strict, frozen models.  ``load`` reads them.

Every model refuses unknown keys and converts no value.
"""

from rlk_repro.spec.assets import (
    ArithmeticData,
    Checkpoint,
    HubData,
    HubSource,
    PackageSource,
    RandomWeights,
    StoredRollouts,
)
from rlk_repro.spec.compared import RlKernel
from rlk_repro.spec.files import (
    FromEnv,
    Layout,
    Measure,
    Profile,
    Run,
    Workload,
    run_problems,
)
from rlk_repro.spec.hardware import Hardware
from rlk_repro.spec.kubernetes import KubernetesSettings, kubernetes_problems
from rlk_repro.spec.margins import Margins
from rlk_repro.spec.preflight import CheckName, Policy, Preflight
from rlk_repro.spec.ray import RaySettings
from rlk_repro.spec.site import ContainerSettings, Mount, SlurmSettings
from rlk_repro.spec.stack import BaseImage, Component, Image, ImagePlatform, Pin, Stack, Unpublished, stack_problems
from rlk_repro.spec.values import OCI_ARCHITECTURES, SCHEMA, Lane, Model, PathProblem, PinName, Variant
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
    "OCI_ARCHITECTURES",
    "SCHEMA",
    "ArithmeticData",
    "BaseImage",
    "CheckName",
    "Checkpoint",
    "Component",
    "ContainerSettings",
    "FromEnv",
    "Grid",
    "Grpo",
    "Hardware",
    "HubData",
    "HubSource",
    "Image",
    "ImagePlatform",
    "KubernetesSettings",
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
    "PackageSource",
    "PathProblem",
    "Pin",
    "PinName",
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
    "Unpublished",
    "Variant",
    "VimeData",
    "VimeGrpo",
    "VimeModel",
    "VimeWorkload",
    "Workload",
    "kubernetes_problems",
    "run_problems",
    "stack_problems",
]
