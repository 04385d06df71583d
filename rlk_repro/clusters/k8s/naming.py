"""Name, label, find and delete the objects of a run; all of them have one common label."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any, Final

from rlk_repro.base import proc
from rlk_repro.base.resources import data_dir
from rlk_repro.clusters.api import Submission
from rlk_repro.clusters.k8s.kubectl import SEND_TIMEOUT_S, Target
from rlk_repro.clusters.k8s.states import TELLING, Object
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import KubernetesSettings

IN_AGENT: Final = "--container=agent"
OBJECTS: Final = "objects.yaml"
ID: Final = "rlk-repro/id"
ROLE: Final = "app.kubernetes.io/component"
AGENT: Final = "agent"
COLLECTOR: Final = "collector"
COMPUTE_DOMAINS: Final = "computedomains.resource.nvidia.com"
_KINDS: Final = "jobs.batch,pods,configmaps"
_JOB_ID: Final = re.compile(r"([a-z0-9-]{1,63})/job/([a-z][a-z0-9-]{0,62})")
_RUN_ID: Final = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{8}-[0-9a-f]{4}")


def kubernetes_settings(plan: Plan) -> KubernetesSettings:
    return plan.profile.kubernetes or KubernetesSettings()


def uses_compute_domain(plan: Plan) -> bool:
    """Whether the job needs a ComputeDomain: within one node, NVLink works without a domain."""
    return kubernetes_settings(plan).compute_domain and plan.layout.num_nodes > 1


def load_base(name: str) -> dict[str, Any]:
    """Load a manifest of ``k8s/base``, which has no templates and so can be checked by any linter."""
    import yaml

    value: dict[str, Any] = yaml.safe_load((data_dir("k8s") / "base" / f"{name}.yaml").read_text())
    return value


def make_name(run_dir: RunDir) -> str:
    """Make the DNS-1035 name of a run's objects from its id; a renamed folder has a hash."""
    if _RUN_ID.fullmatch(run_dir.run_id):
        return f"rlk-{run_dir.run_id.lower()}"
    digest = hashlib.sha256(run_dir.run_id.encode(errors="surrogateescape")).hexdigest()
    return f"rlk-{digest[:16]}"


def make_labels(plan: Plan, name: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "rlk-repro",
        "app.kubernetes.io/managed-by": "rlk-repro",
        ID: name,
        "rlk-repro/run": plan.run.run,
    }


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A job in a namespace; it owns all its objects, of these ``kinds``, but its collector pod."""

    place: Target
    name: str
    kinds: str = _KINDS

    @property
    def selector(self) -> str:
        return f"--selector={ID}={self.name}"

    @classmethod
    def of_plan(cls, plan: Plan, run_dir: RunDir) -> Sent:
        settings, kinds = kubernetes_settings(plan), _KINDS
        if settings.network_policy:
            kinds += ",networkpolicies.networking.k8s.io"
        if uses_compute_domain(plan):
            kinds += f",{COMPUTE_DOMAINS}"
        return cls(place=Target.of(settings), name=make_name(run_dir), kinds=kinds)

    @classmethod
    def of(cls, submission: Submission) -> Sent | None:
        """Read a job's namespace and name from its job id; None if the id has another form."""
        found = _JOB_ID.fullmatch(submission.job_id)
        if found is None:
            return None
        context = submission.details.get("context", "")
        return cls(place=Target(namespace=found[1], context=context), name=found[2])

    def delete(self, *options: str) -> proc.Completed:
        words = ("delete", self.kinds, self.selector, "--ignore-not-found", *options)
        return self.place.run(*words, timeout_s=SEND_TIMEOUT_S)

    def find_objects(self) -> tuple[Object | None, list[Object]]:
        """Return the job, if it exists, and the pods of its agents."""
        items: list[Object] = [*self.place.get("jobs.batch,pods", self.selector)]
        jobs = [item for item in items if item["kind"] == "Job"]
        pods = [item for item in items if item["metadata"]["labels"].get(ROLE) == AGENT]
        return next(iter(jobs), None), pods

    def find_warnings(self) -> list[dict[str, Any]]:
        """Find the telling events of the job, its pods, and Kueue's workload of the job."""
        found = []
        for item in self.place.get("events"):
            is_telling = item.get("type") == "Warning" or item.get("reason") in TELLING
            if is_telling and self.name in item["involvedObject"].get("name", ""):
                found.append(item)
        return found
