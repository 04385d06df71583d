"""Strict and frozen models of the files that authors write: run, stack, hardware and profile."""

from rlk_repro.spec.assets import ArithmeticData, HubData, HubSource, PackageSource, StoredRollouts
from rlk_repro.spec.compared import Margins
from rlk_repro.spec.files import FromEnv, Layout, Measure, Profile, Run, run_problems
from rlk_repro.spec.kubernetes import KubernetesSettings
from rlk_repro.spec.site import ContainerSettings, Policy, Preflight, SlurmSettings
from rlk_repro.spec.stack import Hardware, Image, ImagePlatform, Pin, Stack
from rlk_repro.spec.values import OCI_ARCHITECTURES, Lane, Variant
from rlk_repro.spec.vime import VimeModel, VimeWorkload
from rlk_repro.spec.workloads import ModuleWorkload, OperatorsWorkload, ReferenceWorkload
