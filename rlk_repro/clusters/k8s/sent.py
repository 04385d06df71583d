"""Find and delete the objects of a job in a cluster; all these objects have one common label."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlk_repro.base import proc
from rlk_repro.clusters.api import Submission
from rlk_repro.clusters.k8s.kubectl import SEND_TIMEOUT_S, Target
from rlk_repro.clusters.k8s.naming import AGENT, COLLECTOR, ID, ROLE, make_name
from rlk_repro.clusters.k8s.nodes import uses_compute_domain
from rlk_repro.clusters.k8s.pods import kubernetes_settings
from rlk_repro.clusters.k8s.tree import as_map
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir

COMPUTE_DOMAINS: Final = "computedomains.resource.nvidia.com"
_KINDS: Final = "jobs.batch,pods,configmaps"
_JOB_ID: Final = re.compile(r"([a-z0-9-]{1,63})/job/([a-z][a-z0-9-]{0,62})")


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A job in a namespace; ``kinds`` are those of its objects, of which the job owns all but its collector pod."""

    place: Target
    name: str
    kinds: str = _KINDS

    @property
    def job_id(self) -> str:
        return f"{self.place.namespace}/job/{self.name}"

    @property
    def selector(self) -> str:
        return f"--selector={ID}={self.name}"

    @classmethod
    def of_plan(cls, plan: Plan, run_dir: RunDir) -> Sent:
        settings, kinds = kubernetes_settings(plan), _KINDS
        if settings.network_policy:
            kinds += ",networkpolicies.networking.k8s.io"
        if uses_compute_domain(plan, settings):
            kinds += f",{COMPUTE_DOMAINS}"
        place = Target(namespace=settings.namespace, context=settings.context or "")
        return cls(place=place, name=make_name(run_dir), kinds=kinds)

    def delete(self, *options: str) -> proc.Completed:
        words = ("delete", self.kinds, self.selector, "--ignore-not-found", *(options or ("--wait=false",)))
        return self.place.run(*words, timeout_s=SEND_TIMEOUT_S)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The objects of a run; ``pods`` are those of its agents, ``collector`` packs the run after its end."""

    job: Mapping[str, Any] | None
    pods: Sequence[Mapping[str, Any]]
    collector: Mapping[str, Any] | None


def read_sent(submission: Submission) -> Sent | None:
    """Read a job's namespace and name from its job id; None if the id has another form."""
    found = _JOB_ID.fullmatch(submission.job_id)
    if found is None:
        return None
    return Sent(place=Target(namespace=found[1], context=submission.details.get("context", "")), name=found[2])


def find_objects(sent: Sent) -> Found:
    found: dict[str, list[dict[str, Any]]] = {AGENT: [], COLLECTOR: [], "Job": []}
    for item in sent.place.get(sent.kinds, sent.selector):
        role = item["metadata"]["labels"].get(ROLE) if item["kind"] == "Pod" else item["kind"]
        found.setdefault(str(role), []).append(item)
    jobs, collectors = [*found["Job"], None], [*found[COLLECTOR], None]
    return Found(job=jobs[0], pods=found[AGENT], collector=collectors[0])


def find_warnings(sent: Sent) -> list[dict[str, Any]]:
    """Find the warnings about the job, its pods, and the workload that Kueue makes of the job."""
    items = sent.place.get("events", "--field-selector=type=Warning")
    return [item for item in items if sent.name in str(as_map(item.get("involvedObject")).get("name", ""))]
