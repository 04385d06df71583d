"""Check a profile for Kubernetes with the cluster's facts and the server's dry run of a plan's objects."""

from __future__ import annotations

from rlk_repro.base.findings import Finding, Level, sort_findings
from rlk_repro.clusters.k8s import kubectl
from rlk_repro.clusters.k8s.kubectl import Target
from rlk_repro.clusters.k8s.objects import dump_objects, render_objects
from rlk_repro.clusters.k8s.propose import judge_kubernetes
from rlk_repro.clusters.k8s.site import probe_site
from rlk_repro.clusters.profiles import load_all_hardware
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir, runs_root
from rlk_repro.spec import KubernetesSettings, Profile


def check_profile(profile: Profile, plan: Plan | None) -> list[Finding]:
    settings = profile.kubernetes or KubernetesSettings()
    site = probe_site(Target(namespace=settings.namespace, context=settings.context or ""))
    found = judge_kubernetes(profile, site, load_all_hardware(), plan)
    return sort_findings(found if plan is None else [*found, ask_api_server(plan, site.place)])


def ask_api_server(plan: Plan, place: Target) -> Finding:
    """Ask the server for a dry run, which checks admission, quotas and schemas."""
    objects = render_objects(plan, RunDir(runs_root() / "check"))
    done = place.send("apply", dump_objects(objects).encode(), "--dry-run=server")
    level, answer = (Level.INFO, "accepted") if done.is_ok else (Level.BLOCKING, kubectl.quote_words(done))
    return Finding(level, "kubectl apply --dry-run=server", "accepted", answer)
