"""Find and delete the objects of a job in a cluster; all these objects have one common label."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlk_repro.base import proc
from rlk_repro.clusters.api import Submission
from rlk_repro.clusters.k8s import kubectl
from rlk_repro.clusters.k8s.kubectl import Target
from rlk_repro.clusters.k8s.naming import COLLECTOR, ID, ROLE, make_name
from rlk_repro.clusters.k8s.pods import kubernetes_settings
from rlk_repro.clusters.k8s.tree import as_map
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir

COMPUTE_DOMAINS: Final = "computedomains.resource.nvidia.com"
NETWORK_POLICIES: Final = "networkpolicies.networking.k8s.io"
_JOB_ID: Final = re.compile(r"([a-z0-9-]{1,63})/job/([a-z][a-z0-9-]{0,62})")


@dataclass(frozen=True, kw_only=True)
class Sent:
    place: Target
    name: str
    has_domain: bool = False
    has_policy: bool = False

    @property
    def job_id(self) -> str:
        return f"{self.place.namespace}/job/{self.name}"

    @property
    def selector(self) -> str:
        return f"{ID}={self.name}"

    @property
    def resources(self) -> str:
        policies = (NETWORK_POLICIES,) if self.has_policy else ()
        return ",".join(("jobs.batch", "pods", "configmaps", *policies))

    @classmethod
    def of_plan(cls, plan: Plan, run_dir: RunDir) -> Sent:
        settings = kubernetes_settings(plan)
        return cls(
            place=Target(namespace=settings.namespace, context=settings.context or ""),
            name=make_name(run_dir),
            has_domain=settings.compute_domain,
            has_policy=settings.network_policy,
        )


@dataclass(frozen=True, kw_only=True)
class Found:
    """The objects of a run; ``pods`` are those of its agents, ``collector`` packs the run after its end."""

    job: Mapping[str, Any] | None
    pods: Sequence[Mapping[str, Any]]
    collector: Mapping[str, Any] | None
    num_others: int

    @property
    def is_empty(self) -> bool:
        return self.job is None and not self.pods and self.collector is None and not self.num_others


def read_sent(submission: Submission) -> Sent | None:
    """Read a job's namespace and name from its job id; None if the id has another form."""
    found = _JOB_ID.fullmatch(submission.job_id)
    if found is None:
        return None
    place = Target(namespace=found[1], context=submission.details.get("context", ""))
    return Sent(place=place, name=found[2])


def find_objects(sent: Sent) -> Found:
    items = sent.place.get(sent.resources, f"--selector={sent.selector}")
    agents, collector = [], None
    for pod in (item for item in items if item["kind"] == "Pod"):
        if as_map(pod["metadata"].get("labels")).get(ROLE) == COLLECTOR:
            collector = pod
        else:
            agents.append(pod)
    job = next((item for item in items if item["kind"] == "Job" and item["metadata"]["name"] == sent.name), None)
    num_others = sum(item["kind"] not in {"Job", "Pod"} for item in items)
    return Found(job=job, pods=agents, collector=collector, num_others=num_others)


def find_warnings(sent: Sent) -> list[dict[str, Any]]:
    """Find the warnings about the job, its pods, and the workload that Kueue makes of the job."""
    items = sent.place.get("events", "--field-selector=type=Warning")
    return [item for item in items if sent.name in str(as_map(item.get("involvedObject")).get("name", ""))]


def delete_all(sent: Sent, *options: str) -> proc.Completed:
    """Delete the job and all its objects, including a ComputeDomain that the job does not own yet."""
    done = sent.place.delete(sent.resources, sent.selector, *options)
    if not sent.has_domain:
        return done
    domains = sent.place.delete(COMPUTE_DOMAINS, sent.selector)
    return done if domains.is_ok or kubectl.is_not_found(domains) else domains
