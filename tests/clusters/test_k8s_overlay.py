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
from tests.support.k8s.examples import num_nodes, plan_for, run_dir_of, with_site
from tests.support.k8s.validate import find_errors

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


def with_overlay(overlay: dict[str, Any]) -> Plan:
    return with_site(PLAN, overlay=overlay)


@pytest.mark.parametrize("site", SITES)
def test_a_sites_overlay_is_valid_and_merged_into_job_and_pods(site: str) -> None:
    overlay = {"metadata": {}, "pod_metadata": {}, "pod_spec": {}, **SITES[site]}
    plan = with_overlay(SITES[site])
    job, before = (render_objects(item, run_dir_of(item))[0] for item in (plan, PLAN))
    assert holds(job["metadata"], overlay["metadata"])
    assert job["metadata"]["labels"].items() >= before["metadata"]["labels"].items()
    pod, other = (item["spec"]["template"] for item in (job, before))
    assert holds(pod["metadata"], overlay["pod_metadata"])
    assert holds(pod["spec"], overlay["pod_spec"])
    assert holds(pod["metadata"]["labels"], other["metadata"]["labels"])
    (container,), (own,) = pod["spec"]["containers"], other["spec"]["containers"]
    assert [container[key] for key in ("name", "image", "command")] == [
        own[key] for key in ("name", "image", "command")
    ]
    assert holds(container["env"], own["env"])
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
    job = render_objects(plan := with_overlay(overlay), run_dir_of(plan))[0]
    assert job["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "rlk-repro"
    assert job["metadata"]["name"] != "other"
    spec = job["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 7
    (shm,) = [volume for volume in spec["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}


def test_an_overlay_and_waived_gang_scheduling_are_warned_about() -> None:
    plan = with_site(PLAN, queue=None, overlay={"pod_spec": {"schedulerName": "kai-scheduler"}})
    remark = backend.render(plan, run_dir_of(plan)).remarks[-1]
    assert remark == "the profile's overlay is merged unchanged and not checked: pod_spec.schedulerName"
    waived = with_site(PLAN, queue=None, gang="waived")
    (gang,) = backend.render(waived, run_dir_of(waived)).remarks
    assert gang.startswith("2 nodes, and gang scheduling is waived: two jobs can each hold half")
    alone = plan_for("smoke", "h200")
    assert backend.render(alone, run_dir_of(alone)).remarks == ()


@pytest.mark.parametrize("overlay", [None, {"pod_spec": {"schedulerName": "my-scheduler"}}])
def test_several_nodes_need_gang_scheduling_or_a_waiver(overlay: dict[str, Any] | None) -> None:
    plan = with_site(PLAN, queue=None, overlay=overlay)
    with pytest.raises(SpecError) as caught:
        backend.render(plan, run_dir_of(plan))
    (problem,) = caught.value.problems
    assert problem.where == "profile generic-h200: kubernetes.queue"
    assert problem.hint == "or set kubernetes.gang: waived"
    alone = with_site(plan_for("smoke", "h200"), queue=None)
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
