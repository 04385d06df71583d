"""Find, record and delete the objects of a job in a cluster; all these objects have one common label."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlk_repro.base import proc
from rlk_repro.base.files import write_json
from rlk_repro.clusters.api import Submission
from rlk_repro.clusters.k8s import kubectl
from rlk_repro.clusters.k8s.kubectl import Target
from rlk_repro.clusters.k8s.naming import ID, make_name
from rlk_repro.clusters.k8s.pods import kubernetes_settings
from rlk_repro.clusters.k8s.states import list_images
from rlk_repro.clusters.k8s.tree import as_map
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir

KINDS: Final[Mapping[str, tuple[str, str]]] = {
    "rayjob": ("RayJob", "rayjobs.ray.io"),
    "job": ("Job", "jobs.batch"),
}
SCHEMA: Final = 1
_JOB_ID: Final = re.compile(r"([a-z0-9-]{1,63})/(rayjob|job)/([a-z][a-z0-9-]{0,62})")
COMPUTE_DOMAINS: Final = "computedomains.resource.nvidia.com"
NETWORK_POLICIES: Final = "networkpolicies.networking.k8s.io"


@dataclass(frozen=True, kw_only=True)
class Sent:
    place: Target
    kind: str
    name: str
    has_domain: bool = False
    has_policy: bool = False

    @property
    def job_id(self) -> str:
        return f"{self.place.namespace}/{self.kind}/{self.name}"

    @property
    def selector(self) -> str:
        return f"{ID}={self.name}"

    @property
    def resources(self) -> str:
        policies = (NETWORK_POLICIES,) if self.has_policy else ()
        return ",".join((KINDS[self.kind][1], "pods", "configmaps", *policies))

    @classmethod
    def of_plan(cls, plan: Plan, run_dir: RunDir) -> Sent:
        settings = kubernetes_settings(plan)
        return cls(
            place=Target(namespace=settings.namespace, context=settings.context or ""),
            kind=settings.kind,
            name=make_name(run_dir),
            has_domain=settings.compute_domain,
            has_policy=settings.network_policy,
        )


@dataclass(frozen=True, kw_only=True)
class Found:
    job: Mapping[str, Any] | None
    pods: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    others: int = 0

    @property
    def is_empty(self) -> bool:
        return self.job is None and not self.pods and not self.others


def read_sent(submission: Submission) -> Sent | None:
    """Read a job's namespace, kind and name from its job id; None if the id has another form."""
    found = _JOB_ID.fullmatch(submission.job_id)
    if found is None:
        return None
    place = Target(namespace=found[1], context=submission.details.get("context", ""))
    return Sent(place=place, kind=found[2], name=found[3])


def find_objects(sent: Sent) -> Found:
    """Find the job and its pods; while the job waits for pods, also find its warning events."""
    kind = KINDS[sent.kind][0]
    items = sent.place.get(sent.resources, f"--selector={sent.selector}")
    job = next((item for item in items if item["kind"] == kind and item["metadata"]["name"] == sent.name), None)
    pods = [item for item in items if item["kind"] == "Pod"]
    waits = job is not None and any(as_map(pod.get("status")).get("phase") == "Pending" for pod in pods)
    events = _find_events(sent) if waits or (job is not None and not pods) else []
    others = sum(item["kind"] in {"ConfigMap", "NetworkPolicy"} for item in items)
    return Found(job=job, pods=pods, events=events, others=others)


def delete_all(sent: Sent) -> proc.Completed:
    """Delete the job and all its objects, including a ComputeDomain that the job does not own yet."""
    done = sent.place.delete(sent.resources, sent.selector)
    if not sent.has_domain:
        return done
    domains = sent.place.delete(COMPUTE_DOMAINS, sent.selector)
    return done if domains.is_ok or kubectl.is_not_found(domains) else domains


def record_objects(sent: Sent, run_dir: RunDir) -> None:
    """Write the last state of the job and its pods to the run directory, in a file that the seal does not cover."""
    found = find_objects(sent)
    value = {
        "schema": SCHEMA,
        "job": None if found.job is None else {"status": found.job.get("status")},
        "images": list_images(found.pods),
        "pods": [{"name": pod["metadata"]["name"], "status": pod.get("status")} for pod in found.pods],
    }
    write_json(run_dir.kubernetes_record, value)


def _find_events(sent: Sent) -> list[dict[str, Any]]:
    items = sent.place.get("events", "--field-selector=type=Warning")
    return [item for item in items if str(as_map(item.get("involvedObject")).get("name", "")).startswith(sent.name)]
