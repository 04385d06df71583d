"""A network policy closes the pods of a run to all other pods; it begins and ends with the job."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.clusters.k8s.objects import render_objects
from rlk_repro.clusters.k8s.pods import make_collector
from rlk_repro.plan import Plan
from tests.support.kube.cluster import Cluster
from tests.support.kube.examples import list_plans, num_nodes, plan_for, run_dir_of, with_site
from tests.support.kube.plane import ControlPlane
from tests.support.kube.runs import (
    LONG,
    collect,
    first_trial_runs,
    needs_kubectl,
    running_server,
    submit,
    wait_for_end,
    wait_gone,
    wait_until,
)
from tests.support.kube.templates import find_templates
from tests.support.kube.validate import find_errors

Object = dict[str, Any]
OPERATOR = {"app.kubernetes.io/component": "kuberay-operator", "app.kubernetes.io/name": "kuberay-operator"}
PLANS = dict(list_plans())


def policy_of(plan: Plan) -> Object | None:
    found = [item for item in render_objects(plan, run_dir_of(plan)) if item["kind"] == "NetworkPolicy"]
    assert len(found) <= 1
    return found[0] if found else None


def labels_of_pods(plan: Plan) -> list[Mapping[str, str]]:
    run_dir = run_dir_of(plan)
    templates = [found.value for item in render_objects(plan, run_dir) for found in find_templates(item)]
    return [item["metadata"]["labels"] for item in [*templates, make_collector(plan, run_dir)]]


def selects(selector: Object | None, labels: Mapping[str, str]) -> bool:
    """Apply a selector by the API's rules: an absent selector selects nothing, an empty one everything."""
    return selector is not None and all(labels.get(key) == value for key, value in selector["matchLabels"].items())


def admits(policy: Object, labels: Mapping[str, str], namespace: str, port: int) -> bool:
    """Tell whether a pod may reach this port of a pod that the policy selects."""
    for rule in policy["spec"]["ingress"]:
        ports = [item["port"] for item in rule.get("ports", ())]
        for peer in rule["from"]:
            space = peer.get("namespaceSelector")
            names = {"kubernetes.io/metadata.name": namespace}
            is_there = namespace == policy["metadata"]["namespace"] if space is None else selects_all(space, names)
            if is_there and selects_all(peer.get("podSelector", {}), labels) and (not ports or port in ports):
                return True
    return False


def selects_all(selector: Object, labels: Mapping[str, str]) -> bool:
    return not selector or selects(selector, labels)


@pytest.mark.parametrize("name", [name for name in PLANS if name.startswith(("smoke.h200", "smoke.gb200"))])
def test_every_kind_of_job_has_a_network_policy_for_exactly_its_pods(name: str) -> None:
    plan = PLANS[name]
    policy = policy_of(plan)
    assert policy is not None
    assert find_errors(policy, ("1.28", "1.34")) == []
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    own, space = labels_of_pods(plan), policy["metadata"]["namespace"]
    assert all(selects(policy["spec"]["podSelector"], labels) for labels in own)
    stranger = {"app": "web"}
    neighbour = {**own[0], "rlk-repro/id": "rlk-another-run"}
    for labels in (stranger, neighbour):
        assert not selects(policy["spec"]["podSelector"], labels)
        assert not any(admits(policy, labels, space, port) for port in (22, 6379, 8265, 10001))
    assert all(admits(policy, labels, space, 6379) for labels in own)
    assert not admits(policy, own[0], "another", 6379), "the labels of a run, in another namespace"
    assert admits(policy, OPERATOR, "kuberay-system", 8265) is ("rayjob" in name)
    assert not admits(policy, OPERATOR, "kuberay-system", 6379)


def test_the_operators_namespace_can_be_named() -> None:
    plan = with_site(plan_for(settings=num_nodes("h200", 2)), operator_namespace="ray-system")
    policy = policy_of(plan)
    assert policy is not None
    assert admits(policy, {}, "ray-system", 8265)
    assert not admits(policy, OPERATOR, "kuberay-system", 8265)


def test_a_site_may_have_no_network_policy() -> None:
    assert policy_of(with_site(plan_for(), network_policy=False)) is None


def test_plans_from_before_keep_their_hash() -> None:
    settings = with_site(plan_for()).profile.kubernetes
    assert settings is not None
    assert settings.network_policy
    assert not {"network_policy", "operator_namespace"} & json.loads(settings.model_dump_json()).keys()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control_plane: ControlPlane | None) -> Iterator[Cluster]:
    with running_server(tmp_path / "kube", monkeypatch, control_plane) as running:
        yield running


@pytest.mark.real
@needs_kubectl
@pytest.mark.timeout(280)
def test_the_network_policy_exists_before_the_pods_and_ends_with_the_job(server: Cluster, tmp_path: Path) -> None:
    launched = submit(tmp_path, LONG, kind="job")
    assert len(server.store.list("networkpolicies")) == 1
    owner = server.store.list("networkpolicies")[0]["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["name"]) == ("Job", launched.submission.details["name"])
    wait_until(launched, first_trial_runs(launched))
    server.delete("jobs", launched.submission.details["name"])
    wait_for_end(launched)
    wait_gone(server)
    collect(launched)
    wait_gone(server)
