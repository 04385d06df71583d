"""What sites add to the objects: it passes the API server's schemas, appears in every pod, and takes nothing away."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlk_repro.base.errors import SpecError
from rlk_repro.clusters.k8s import backend
from rlk_repro.clusters.k8s.objects import render_objects
from rlk_repro.clusters.k8s.overlay import GANG_SCHEDULERS
from rlk_repro.plan import Plan
from tests.support.kube.examples import num_nodes, plan_for, run_dir_of, with_site
from tests.support.kube.templates import find_templates
from tests.support.kube.validate import find_errors

SITES: dict[str, dict[str, Any]] = {
    item["site"]: item["overlay"] for item in yaml.safe_load_all(Path(__file__).with_name("overlays.yaml").read_text())
}
PLAN = plan_for("smoke", "h200", settings=num_nodes("h200", 2))


def holds(found: Any, wanted: Any) -> bool:
    """Whether everything wanted is there, among other things."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(key in found and holds(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return all(any(holds(item, one) for item in found) for one in wanted)
    return bool(found == wanted)


def with_overlay(overlay: dict[str, Any], kind: str = "rayjob") -> Plan:
    return with_site(PLAN, overlay=overlay, kind=kind)


def test_there_are_twelve() -> None:
    assert len(SITES) == 12


@pytest.mark.parametrize("kind", ["rayjob", "job"])
@pytest.mark.parametrize("site", SITES)
def test_a_sites_overlay_is_valid_and_merged_into_every_pod(site: str, kind: str) -> None:
    overlay = {"metadata": {}, "pod_metadata": {}, "pod_spec": {}, **SITES[site]}
    plan, plain = with_overlay(SITES[site], kind), with_site(PLAN, kind=kind)
    job, before = (render_objects(item, run_dir_of(item))[0] for item in (plan, plain))
    ids = {"labels", "annotations"} & before["metadata"].keys()
    assert ids == {"labels", "annotations"}
    assert holds(job["metadata"], overlay["metadata"])
    assert job["metadata"]["labels"].items() >= before["metadata"]["labels"].items()
    pods, others = list(find_templates(job)), list(find_templates(before))
    assert len(pods) == len(others) == (2 if kind == "rayjob" else 1)
    for pod, other in zip(pods, others, strict=True):
        assert holds(pod.value["metadata"], overlay["pod_metadata"])
        assert holds(pod.value["spec"], overlay["pod_spec"])
        assert holds(pod.value["metadata"]["labels"], other.value["metadata"]["labels"])
        container, own = pod.value["spec"]["containers"], other.value["spec"]["containers"]
        assert [item["name"] for item in container] == ["agent"]
        assert (container[0]["image"], container[0]["command"]) == (own[0]["image"], own[0]["command"])
        assert holds(container[0]["env"], own[0]["env"])
    assert find_errors(job, ("1.34",)) == []


def test_an_overlay_is_hashed_into_the_plan_and_not_into_the_experiment() -> None:
    plan = with_overlay({"pod_spec": {"schedulerName": "kai-scheduler"}})
    assert plan.plan_hash != PLAN.plan_hash
    assert plan.experiment_hash == PLAN.experiment_hash
    assert "overlay" not in str(PLAN.to_json()["profile"])


def test_labels_that_identify_objects_stay_and_other_values_are_replaced() -> None:
    overlay = {
        "metadata": {"labels": {"app.kubernetes.io/managed-by": "somebody"}, "name": "other"},
        "pod_spec": {
            "terminationGracePeriodSeconds": 7,
            "volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "1Gi"}}],
        },
    }
    job = render_objects(plan := with_overlay(overlay, "job"), run_dir_of(plan))[0]
    assert job["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "rlk-repro"
    assert job["metadata"]["name"] != "other"
    spec = job["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 7
    (shm,) = [volume for volume in spec["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}


def test_an_overlay_and_waived_gang_scheduling_are_warned_about() -> None:
    plan = with_site(PLAN, queue=None, overlay={"pod_spec": {"schedulerName": "kai-scheduler"}})
    assert backend.render(plan, run_dir_of(plan)).remarks == (
        "the profile's overlay is merged unchanged and not checked: pod_spec.schedulerName",
    )
    waived = with_site(PLAN, queue=None, gang="waived")
    (gang,) = backend.render(waived, run_dir_of(waived)).remarks
    assert gang.startswith("2 nodes, and gang scheduling is waived: two jobs can each hold half")
    alone = plan_for("smoke", "h200")
    assert backend.render(alone, run_dir_of(alone)).remarks == ()


@pytest.mark.parametrize("name", GANG_SCHEDULERS)
def test_a_scheduler_s_name_alone_is_warned_about_where_nothing_groups_the_pods_of_a_job(name: str) -> None:
    def is_warned(kind: str = "job", **parts: Any) -> bool:
        plan = with_site(PLAN, queue=None, kind=kind, overlay={"pod_spec": {"schedulerName": name}, **parts})
        return any(
            "the overlay names a scheduler but no pod group" in remark
            for remark in backend.render(plan, run_dir_of(plan)).remarks
        )

    assert is_warned()
    assert not is_warned("rayjob")
    assert not is_warned(pod_metadata={"annotations": {"scheduling.k8s.io/group-name": "g"}})
    assert not is_warned(metadata={"labels": {"pod-group.scheduling.sigs.k8s.io": "g"}})
    assert not is_warned(metadata={"labels": {"kueue.x-k8s.io/queue-name": "gpus"}})
    assert is_warned(pod_metadata={"labels": {"team": "g"}})


@pytest.mark.parametrize("kind", ["rayjob", "job"])
@pytest.mark.parametrize("overlay", [None, {"pod_spec": {"schedulerName": "my-scheduler"}}])
def test_several_nodes_need_gang_scheduling_or_a_waiver(kind: str, overlay: dict[str, Any] | None) -> None:
    plan = with_site(PLAN, queue=None, kind=kind, overlay=overlay)
    with pytest.raises(SpecError) as caught:
        backend.render(plan, run_dir_of(plan))
    (problem,) = caught.value.problems
    assert problem.where == "profile generic-h200: kubernetes.queue"
    assert problem.what.startswith("missing for a job of 2 nodes: two jobs can each hold half")
    assert "schedulerName kai-scheduler or volcano" in str(problem.expected)
    assert problem.hint == "or set kubernetes.gang: waived"
    alone = with_site(plan_for("smoke", "h200"), queue=None, kind=kind)
    assert backend.render(alone, run_dir_of(alone)).files


@pytest.mark.parametrize(
    "settings",
    [
        {"queue": "gpus"},
        {"overlay": {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}}}},
        *({"overlay": {"pod_spec": {"schedulerName": name}}} for name in GANG_SCHEDULERS),
        {"gang": "waived"},
    ],
)
def test_a_queue_a_gang_scheduler_and_a_waiver_will_do(settings: dict[str, Any]) -> None:
    plan = with_site(PLAN, **{"queue": None, **settings})
    assert backend.render(plan, run_dir_of(plan)).files


def test_a_plan_recorded_before_the_waiver_keeps_its_hash() -> None:
    assert "gang" not in str(PLAN.to_json()["profile"])
    assert with_site(PLAN, gang="waived").plan_hash != PLAN.plan_hash
