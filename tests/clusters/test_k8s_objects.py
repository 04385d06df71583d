"""The objects that Kubernetes gets: real schemas, real CEL rules, our own rules, and mistakes that they catch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.base.errors import SpecError
from rlk_repro.base.resources import data_dir
from rlk_repro.clusters.k8s.base import load_base
from rlk_repro.clusters.k8s.naming import MAX_NAME, make_name
from rlk_repro.clusters.k8s.objects import dump_objects, render_objects
from rlk_repro.clusters.k8s.pods import make_collector
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from tests.support.kube.examples import (
    list_plans,
    num_nodes,
    plan_for,
    run_dir_of,
    with_site,
)
from tests.support.kube.rules import find_object_problems
from tests.support.kube.templates import find_templates
from tests.support.kube.validate import check_cel, find_errors, is_custom, load_schema, needs_crds

Object = dict[str, Any]
SAMPLES = (
    "smoke.gb200.rayjob.four-nodes", "smoke.gb200.job.four-nodes", "smoke.mi300x.rayjob.four-nodes",
    "smoke.h200.rayjob.rdma", "smoke.h200.rayjob.queued", "smoke.h200.job.queued",
    "smoke.h200.job.restricted", "smoke.h200.rayjob.secret-and-models", "smoke.h200.job.no-claim",
)  # fmt: skip
# maps whose keys are their author's
FREE = frozenset(
    {"labels", "annotations", "matchLabels", "requests", "limits", "rayStartParams", "nodeSelector", "data"}
)


@cache
def plans() -> dict[str, Plan]:
    return dict(list_plans())


def objects_of(name: str) -> list[Object]:
    plan = plans()[name]
    return copy.deepcopy(render_objects(plan, run_dir_of(plan)))


def container(item: Object) -> Object:
    return dict_of(value for found in find_templates(item) for _, value in found.containers())


def dict_of(found: Iterator[Any]) -> Object:
    first: Object = next(found)
    return first


def template(item: Object) -> Object:
    return dict_of(found.value for found in find_templates(item))


def findings(objects: list[Object]) -> list[str]:
    return [
        *map(str, find_object_problems(objects)),
        *(error for item in objects for error in find_errors(item, ("1.34",))),
    ]


@needs_crds
@pytest.mark.parametrize("name", SAMPLES)
def test_an_example_passes_the_checks_of_server_and_controllers(name: str) -> None:
    objects = objects_of(name)
    assert [error for item in objects for error in find_errors(item)] == []
    assert find_object_problems(objects) == []


@needs_crds
@pytest.mark.real
def test_every_example_passes_the_checks_of_server_and_controllers() -> None:
    wrong = {}
    for name, plan in plans().items():
        objects = render_objects(plan, run_dir_of(plan))
        errors = [error for item in objects for error in find_errors(item)]
        if errors or find_object_problems(objects):
            wrong[name] = errors
    assert wrong == {}


def test_collector_pods_pass_as_well() -> None:
    for name in SAMPLES:
        plan = plans()[name]
        pod = make_collector(plan, run_dir_of(plan))
        assert findings([pod]) == []
        assert "gpu" not in str(pod["spec"]["containers"][0]["resources"])


@pytest.mark.parametrize("path", sorted((data_dir("k8s") / "base").glob("*.yaml")), ids=lambda path: path.stem)
def test_base_manifests_are_plain_objects(path: Path) -> None:
    item = yaml.safe_load(path.read_text())
    assert {"apiVersion", "kind", "metadata", "spec"} == item.keys()
    assert "{{" not in path.read_text()
    if not is_custom(item) and item["kind"] == "Pod":
        assert find_errors(item) == []


def test_a_base_manifest_is_never_changed() -> None:
    before = load_base("pod")
    load_base("pod")["spec"].clear()
    assert load_base("pod") == before


def test_dumping_and_reading_gives_the_same_objects() -> None:
    for name in SAMPLES:
        objects = objects_of(name)
        text = dump_objects(objects)
        assert list(yaml.safe_load_all(text)) == objects
        assert "&id" not in text


@pytest.mark.parametrize(
    "run_id", ["0", "X" * 60, "ünï cødé", "-rf", "$(touch pwned)", "new\nline", "a" * 43, "a" * 44]
)
def test_names_fit_every_controller(run_id: str) -> None:
    plan = dataclasses.replace(plans()["smoke.gb200.rayjob.four-nodes"])
    run_dir = RunDir(Path("/runs") / run_id)
    assert len(make_name(run_dir)) <= MAX_NAME
    for kind in ("rayjob", "job"):
        assert findings(render_objects(with_site(plan, kind=kind), run_dir)) == []


def test_different_runs_have_different_names() -> None:
    names = ["a b", "a-b", "A-b", "a.b", "a" * 60, "a" * 61]
    assert len({make_name(RunDir(Path("/runs") / name)) for name in names}) == len(names)


def test_a_command_is_not_expanded_by_kubernetes() -> None:
    plan = plans()["smoke.h200.job.queued"]
    item = render_objects(plan, RunDir(Path("/runs") / "$(HOME) $$(HOME)"))[0]
    assert "/results/smoke/$$(HOME) $$$(HOME)" in container(item)["command"]


def test_nodes_that_are_asked_for_are_terms_of_their_own() -> None:
    plan = with_site(plan_for("smoke", "mi300x", settings=num_nodes("mi300x", 2)))
    item = render_objects(plan, run_dir_of(plan), nodes=("n1", "n2"))[0]
    assert findings([item]) == []
    rule = template(item)["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    fields = [term["matchFields"][0]["values"] for term in rule["nodeSelectorTerms"]]
    assert fields == [["n1"]] * 3 + [["n2"]] * 3
    with pytest.raises(SpecError, match="names more or fewer nodes than the layout has"):
        render_objects(plan, run_dir_of(plan), nodes=("n1",))


def test_secrets_are_references() -> None:
    assert "secretKeyRef" in str(objects_of("smoke.h200.rayjob.secret-and-models"))
    plan = with_site(plan_for(), env={"HF_TOKEN": {"from_env": "HF_TOKEN"}})
    with pytest.raises(SpecError, match="a pod does not get this shell's variables"):
        render_objects(plan, run_dir_of(plan))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"results": {"path": "/results"}}, "must share a run directory"),
        ({"gpu_products": ["NVIDIA-H200-MIG-1g.18gb"]}, "a partition or a share of a GPU"),
        ({"gpu_resource": "nvidia.com/mig-1g.18gb"}, "a partition or a share of a GPU"),
        ({"gpu_resource": "nvidia.com/gpu.shared"}, "a partition or a share of a GPU"),
        ({"max_time_min": 1.0}, "is shorter than the time limit of one pair"),
        ({"shm": "2000Gi"}, "is not larger than kubernetes.shm"),
        ({"gpu_resource": "amd.com/gpu"}, "is a GPU of another vendor"),
        ({"node_labels": {"nvidia.com/gpu.product": ["NVIDIA-H200-MIG-1g.18gb"]}}, "a partition or a share of a GPU"),
        ({"node_labels": {"kubernetes.io/arch": ["arm64"]}}, "no node with NVIDIA-H200 has this processor"),
        ({"gpu_products": ["NVIDIA-GB200"]}, "no node with NVIDIA-GB200 has this processor"),
        ({"rdma": {"resource": "nvidia.com/gpu"}}, "is not an RDMA device"),
        ({"rdma": {"resource": "hca"}}, "is not an RDMA device"),
        ({"claims": [{"claim": "models", "path": "/results"}]}, "a path is used twice"),
        ({"claims": [{"claim": "models", "path": "/dev/shm"}]}, "a path is used twice"),
    ],
)
def test_a_profile_that_cannot_work_is_refused(values: dict[str, Any], words: str) -> None:
    plan = with_site(plan_for("smoke", "h200", settings=num_nodes("h200", 2)), **values)
    with pytest.raises(SpecError, match=words):
        render_objects(plan, run_dir_of(plan))


def test_a_stack_without_an_image_is_refused() -> None:
    plan = plan_for(stack="host")
    with pytest.raises(SpecError, match="has no image for h200, and a pod needs an image"):
        render_objects(plan, run_dir_of(plan))


def test_an_image_whose_repository_ends_in_a_tag_is_refused() -> None:
    plan = plan_for()
    images = {name: image.model_copy(update={"reference": "cuda:12"}) for name, image in plan.stack.images.items()}
    plan = dataclasses.replace(plan, stack=plan.stack.model_copy(update={"images": images}))
    with pytest.raises(SpecError, match="has a tag, but only the digest is checked"):
        render_objects(plan, run_dir_of(plan))


def test_a_variable_that_every_pod_has_may_not_come_from_a_secret() -> None:
    secrets = {"RLK_REPRO_NODE": {"secret": "names", "key": "node"}}
    plan = with_site(plan_for(), env={"NODE": {"from_env": "RLK_REPRO_NODE"}}, secrets=secrets)
    with pytest.raises(SpecError, match="a name is set twice"):
        render_objects(plan, run_dir_of(plan))


PATHS = st.sampled_from(["/results", "/dev/shm", "/etc/rlk-repro", "/models"])
LABELS = st.sampled_from(["arm64", "amd64", "H200", "NVIDIA-GB200", "NVIDIA-H200-MIG-1g.18gb", "X-SHARED"])
RESOURCES = st.sampled_from(["nvidia.com/gpu", "amd.com/gpu", "nvidia.com/mig-1g.18gb", "nvidia.com/gpu.shared",
                             "hca", "rdma/ib", "site.example/gpu"])  # fmt: skip
SIZES = st.sampled_from(["1", "0.5", "64Gi", "100G", "2Ti"])
NAMES = st.sampled_from(["RLK_REPRO_NODE", "RLK_REPRO_GROUP", "RLK_REPRO_IMAGE_DIGEST", "HF_TOKEN"])
SITES = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["rayjob", "job"]),
        "queue": st.just("q" * 63),
        "cpu": SIZES,
        "memory": SIZES,
        "shm": SIZES,
        "gpu_resource": RESOURCES,
        "gpu_products": st.lists(LABELS, max_size=2),
        "node_labels": st.dictionaries(
            st.sampled_from(["nvidia.com/gpu.product", "amd.com/gpu.product-name", "kubernetes.io/arch"]),
            st.lists(LABELS, min_size=1, max_size=2), max_size=2),
        "rdma": st.fixed_dictionaries({"resource": RESOURCES, "count": st.integers(1, 64)}),
        "compute_domain": st.booleans(),
        "results": st.fixed_dictionaries({"claim": st.just("results"), "path": PATHS}),
        "claims": st.lists(st.fixed_dictionaries({"claim": st.just("c"), "path": PATHS}), max_size=2),
        "grace_s": st.sampled_from([60, 3600]),
        "ttl_s": st.sampled_from([0, 31_536_000]),
        "run_as": st.just({"user": 1000, "group": 1000}),
    },
)  # fmt: skip


@cache
def wide(hardware: str) -> Plan:
    return plan_for("smoke", hardware, settings=num_nodes(hardware, 2))


@given(st.sampled_from(["h200", "gb200", "mi300x"]), SITES, st.lists(NAMES, max_size=2, unique=True))
def test_no_profile_that_is_taken_makes_an_object_that_a_controller_refuses(
    hardware: str, site: dict[str, Any], names: list[str]
) -> None:
    """The rules stand here and not in the product: whatever a profile alone can get wrong is refused before."""
    env = {f"V{number}": {"from_env": name} for number, name in enumerate(names)}
    secrets = {name: {"secret": "s", "key": "k"} for name in names}
    plan = with_site(wide(hardware), env=env, secrets=secrets, **site)
    try:
        objects = render_objects(plan, run_dir_of(plan))
    except SpecError:
        return
    assert find_object_problems(objects) == []


def test_the_loss_of_every_pod_at_once_counts_as_one_restart_and_sigterm_does_not_fail_a_job() -> None:
    (job,) = (item for item in objects_of("smoke.gb200.job.four-nodes") if item["kind"] == "Job")
    assert job["spec"]["backoffLimit"] == 4 * 6
    assert "--restarts=6" in str(container(job)["command"])
    assert job["spec"]["podFailurePolicy"]["rules"][-1]["onExitCodes"]["values"] == [0, 143]


def test_every_example_keeps_our_rules() -> None:
    assert [find_object_problems(render_objects(plan, run_dir_of(plan))) for plan in plans().values()] == [
        [] for _ in plans()
    ]


def test_rocm_pods_have_the_seccomp_profile_that_containers_on_slurm_have_and_others_the_default() -> None:
    for name, profile in {"smoke.mi300x.rayjob.four-nodes": {"type": "Unconfined"}, "smoke.h200.job": None}.items():
        spec = template(objects_of(name)[0])["spec"]
        assert spec["containers"][0]["securityContext"].get("seccompProfile") == profile


def test_ray_s_object_store_leaves_half_of_the_shared_memory() -> None:
    cluster = objects_of("smoke.mi300x.rayjob.four-nodes")[0]["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert {group["rayStartParams"]["object-store-memory"] for group in groups} == {str(32 << 30)}


def test_a_restricted_pod_keeps_to_the_level_restricted() -> None:
    for name in ("smoke.h200.rayjob.restricted", "smoke.h200.job.restricted"):
        spec = template(objects_of(name)[0])["spec"]
        context = spec["containers"][0]["securityContext"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        allowed = {"configMap", "emptyDir", "persistentVolumeClaim"}
        assert all((volume.keys() - {"name"}) <= allowed for volume in spec["volumes"])


# mistakes by hand: where to make them, and a word of the answer
MISTAKES: dict[str, tuple[str, Callable[[list[Object]], Any], str]] = {
    "typed wrong": ("rayjob.rdma", lambda o: o[0]["spec"].update(backoffLimit="0"), "backoffLimit"),
    "unknown field": ("rayjob.rdma", lambda o: o[0]["spec"].update(entryPoint="x"), "entryPoint"),
    "unknown field in a pod": ("job.queued", lambda o: container(o[0]).update(comand=["x"]), "comand"),
    "name too long": ("rayjob.rdma", lambda o: o[0]["metadata"].update(name="a" * 48), "at most 47"),
    "name not DNS-1035": ("rayjob.rdma", lambda o: o[0]["metadata"].update(name="1a"), "DNS-1035"),
    "int in rayStartParams": (
        "rayjob.rdma",
        lambda o: o[0]["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].update({"num-gpus": 8}),
        "rayStartParams[num-gpus]",
    ),
    "other num-gpus than the container has": (
        "rayjob.rdma",
        lambda o: o[0]["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].update({"num-gpus": "4"}),
        "Ray would hand out other GPUs",
    ),
    "suspend without shutdown": (
        "rayjob.rdma", lambda o: o[0]["spec"].update(suspend=True, shutdownAfterJobFinishes=False), "suspend"),
    "ttl without shutdown": (
        "rayjob.rdma", lambda o: o[0]["spec"].update(ttlSecondsAfterFinished=60, shutdownAfterJobFinishes=False),
        "needs shutdownAfterJobFinishes"),
    "ttl that keeps GPUs": (
        "rayjob.rdma", lambda o: o[0]["spec"].update(ttlSecondsAfterFinished=86400), "its GPUs with it"),
    "deletion strategy beside ttl": (
        "rayjob.rdma", lambda o: o[0]["spec"].update(deletionStrategy={"deletionRules": []}), "deletionStrategy"),
    "sidecar with a submitter": (
        "rayjob.rdma",
        lambda o: o[0]["spec"].update(submissionMode="SidecarMode", submitterConfig={"backoffLimit": 0}),
        "SidecarMode forbids it"),
    "sidecar that restarts": (
        "rayjob.rdma",
        lambda o: (
            o[0]["spec"].update(submissionMode="SidecarMode"),
            template(o[0])["spec"].update(restartPolicy="Always")),
        "SidecarMode wants Never"),
    "interactive": (
        "rayjob.rdma", lambda o: o[0]["spec"].update(submissionMode="InteractiveMode"), "submits by hand"),
    "mode misspelt": ("rayjob.rdma", lambda o: o[0]["spec"].update(submissionMode="HttpMode"), "no such mode"),
    "retry": ("rayjob.rdma", lambda o: o[0]["spec"].update(backoffLimit=2), "another trial"),
    "queue and a cluster of others": (
        "rayjob.queued", lambda o: o[0]["spec"].update(clusterSelector={"a": "b"}), "Kueue manages no clusters"),
    "queue and autoscaling": (
        "rayjob.queued",
        lambda o: o[0]["spec"]["rayClusterSpec"].update(enableInTreeAutoscaling=True), "not with Kueue"),
    "queue and no shutdown": (
        "rayjob.queued", lambda o: o[0]["spec"].update(shutdownAfterJobFinishes=False), "must get the nodes back"),
    "queue and many groups": (
        "rayjob.queued",
        lambda o: o[0]["spec"]["rayClusterSpec"].update(
            workerGroupSpecs=[{"groupName": f"g{n}", "minReplicas": 1, "maxReplicas": 1, "replicas": 1,
                               "template": template(o[0])} for n in range(8)]),
        "eight sets of pods"),
    "elastic group": (
        "rayjob.rdma",
        lambda o: o[0]["spec"]["rayClusterSpec"]["workerGroupSpecs"][0].update(maxReplicas=9), "as its layout says"),
    "several hosts per replica": (
        "rayjob.rdma",
        lambda o: o[0]["spec"]["rayClusterSpec"]["workerGroupSpecs"][0].update(numOfHosts=2), "multiplies the pods"),
    "head without dashboard port": (
        "rayjob.rdma", lambda o: container(o[0])["ports"].pop(1), "KubeRay adds its own ports only where"),
    "command without the annotation": (
        "rayjob.rdma", lambda o: template(o[0])["metadata"]["annotations"].pop("ray.io/overwrite-container-cmd"),
        "overwrite-container-cmd"),
    "claim template created twice": (
        "gb200.rayjob.four-nodes",
        lambda o: o.append({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
                            "metadata": {"name": f"{o[0]['metadata']['name']}-channel", "namespace": "default"},
                            "spec": {"spec": {}}}),
        "fails where it is there"),
    "claim template of nobody": (
        "gb200.rayjob.four-nodes", lambda o: o.pop(1), "nobody makes this claim template"),
    "claim that no container uses": (
        "gb200.job.four-nodes", lambda o: container(o[0])["resources"].pop("claims"), "allocated in vain"),
    "claim that the pod lacks": (
        "gb200.job.four-nodes", lambda o: template(o[0])["spec"].pop("resourceClaims"), "the pod has no such claim"),
    "deprecated numNodes": ("gb200.rayjob.four-nodes", lambda o: o[1]["spec"].update(numNodes=4), "deprecated"),
    "domain across racks": (
        "gb200.job.four-nodes", lambda o: template(o[0])["spec"]["affinity"].pop("podAffinity"), "NVLink domain"),
    "wrong architecture": (
        "gb200.rayjob.four-nodes",
        lambda o: expressions(o)[0].update(values=["amd64"]), "no node with NVIDIA-GB200 has this processor"),
    "MIG product": (
        "rayjob.rdma", lambda o: expressions(o)[1]["values"].append("NVIDIA-H200-MIG-1g.18gb"), "a share of a GPU"),
    "shared product": (
        "rayjob.rdma", lambda o: expressions(o)[1]["values"].append("NVIDIA-H200-SHARED"), "a share of a GPU"),
    "one spelling of a label": (
        "job.queued", lambda o: template(o[0])["spec"].update(nodeSelector={"a": "b"}), "one spelling"),
    "tag instead of digest": (
        "job.queued", lambda o: container(o[0]).update(image="registry.example/cuda:latest"), "a tag may be another"),
    "tag beside the digest": (
        "job.queued",
        lambda o: container(o[0]).update(image="r.example:5000/cuda:1@sha256:" + "0" * 64), "a tag as well"),
    "secret in env": (
        "job.queued", lambda o: container(o[0])["env"].append({"name": "HF_TOKEN", "value": "hf_" + "a" * 30}),
        "a secret in a manifest"),
    "secret by its shape": (
        "job.queued", lambda o: container(o[0])["env"].append({"name": "X", "value": "ghp_" + "a1" * 15}),
        "a secret in a manifest"),
    "secret in a command": (
        "job.queued", lambda o: container(o[0])["command"].append("hf_" + "a" * 30), "a secret in a manifest"),
    "number in env": (
        "job.queued", lambda o: container(o[0])["env"].append({"name": "X", "value": 1}), "the API wants text"),
    "env twice": (
        "job.queued",
        lambda o: container(o[0])["env"].append({"name": "RLK_REPRO_NODE", "value": "x"}), "wins silently"),
    "GPU limit without request": (
        "job.queued",
        lambda o: container(o[0])["resources"]["requests"].pop("nvidia.com/gpu"), "a limit, and a request"),
    "GPU request without limit": (
        "job.queued", lambda o: container(o[0])["resources"]["limits"].pop("nvidia.com/gpu"), "a limit, and a request"),
    "half a GPU": (
        "job.queued", lambda o: [part.update({"nvidia.com/gpu": "0.5"}) for part in resources(o)], "comes whole"),
    "more requested than allowed": (
        "job.queued",
        lambda o: container(o[0])["resources"]["requests"].update({"nvidia.com/gpu": "2"}), "overcommitted"),
    "MIG resource": (
        "job.queued",
        lambda o: [part.update({"nvidia.com/mig-1g.18gb": "1"}) for part in resources(o)], "share of a GPU"),
    "no quantity": ("job.queued", lambda o: [part.update(memory="1 TB") for part in resources(o)], "no quantity"),
    "not guaranteed": ("job.queued", lambda o: container(o[0])["resources"]["requests"].pop("cpu"), "not Guaranteed"),
    "privileged": (
        "job.queued", lambda o: container(o[0])["securityContext"].update(privileged=True), "device plugin"),
    "escalation": (
        "job.queued",
        lambda o: container(o[0])["securityContext"].pop("allowPrivilegeEscalation"), "restricted refuses"),
    "capabilities kept": (
        "job.queued", lambda o: container(o[0])["securityContext"].pop("capabilities"), "restricted refuses it"),
    "IPC_LOCK without RDMA": (
        "job.queued", lambda o: container(o[0])["securityContext"]["capabilities"].update(add=["IPC_LOCK"]), "RDMA"),
    "SYS_ADMIN": (
        "job.queued",
        lambda o: container(o[0])["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]), "nothing needs"),
    "host network": ("job.queued", lambda o: template(o[0])["spec"].update(hostNetwork=True), "baseline refuses"),
    "host path": (
        "job.queued", lambda o: template(o[0])["spec"]["volumes"].append({"name": "h", "hostPath": {"path": "/"}}),
        "folders of the node"),
    "mount without volume": ("job.queued", lambda o: template(o[0])["spec"]["volumes"].pop(0), "no such volume"),
    "volume twice": (
        "job.queued",
        lambda o: template(o[0])["spec"]["volumes"].append({"name": "shm", "emptyDir": {}}), "two of one name"),
    "restart of a container": (
        "job.queued", lambda o: template(o[0])["spec"].update(restartPolicy="OnFailure"), "another trial"),
    "token of the API": (
        "job.queued", lambda o: template(o[0])["spec"].pop("automountServiceAccountToken"), "speaks with the API"),
    "no time to pack": (
        "job.restricted", lambda o: template(o[0])["spec"].update(terminationGracePeriodSeconds=1), "record and pack"),
    "retry of a job": ("job.queued", lambda o: o[0]["spec"].pop("podFailurePolicy"), "another trial"),
    "generated name": (
        "job.queued",
        lambda o: o[0]["metadata"].update(generateName=o[0]["metadata"].pop("name")), "a name of its own"),
    "no namespace": ("job.queued", lambda o: o[0]["metadata"].pop("namespace"), "whatever the context says"),
    "label too long": ("job.queued", lambda o: o[0]["metadata"]["labels"].update(x="a" * 64), "63 characters"),
    "huge annotation": ("job.queued", lambda o: o[0]["metadata"]["annotations"].update(x="a" * 300000), "too large"),
    "two namespaces": (
        "gb200.rayjob.four-nodes", lambda o: o[1]["metadata"].update(namespace="other"), "several namespaces"),
    "job with a long name": (
        "job.queued", lambda o: o[0]["metadata"].update(name="a" * 56), "its pods get longer names"),
    "workers one after the other": (
        "gb200.job.four-nodes", lambda o: o[0]["spec"].update(parallelism=1), "run at once"),
    "no number of pods": ("gb200.job.four-nodes", lambda o: o[0]["spec"].pop("completions"), "Indexed needs it"),
    "completion mode misspelt": (
        "gb200.job.four-nodes", lambda o: o[0]["spec"].update(completionMode="indexed"), "no such mode"),
}  # fmt: skip


def expressions(objects: list[Object]) -> list[Object]:
    rule = template(objects[0])["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return list(rule["nodeSelectorTerms"][-1]["matchExpressions"])  # the term with NVIDIA's own label


def resources(objects: list[Object]) -> list[Object]:
    return [container(objects[0])["resources"][part] for part in ("requests", "limits")]


# those that only a schema tells
BY_SCHEMA = {"typed wrong", "unknown field", "unknown field in a pod"}


@needs_crds
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_by_hand_are_caught_and_located(name: str) -> None:
    example, change, words = MISTAKES[name]
    example = example if example.startswith("gb200") else f"h200.{example}"
    objects = objects_of(f"smoke.{example}")
    change(objects)
    found = findings(objects)
    assert any(words in line for line in found), found
    if name not in BY_SCHEMA:
        line = next(line for line in map(str, find_object_problems(objects)) if words in line)
        assert ": " in line


@needs_crds
def test_cel_rules_of_the_real_crds_are_evaluated() -> None:
    rayjob = objects_of("smoke.h200.rayjob.rdma")[0]
    rayjob["spec"]["managedBy"] = "somebody"
    assert list(check_cel(load_schema(rayjob["apiVersion"], "RayJob").raw, rayjob, ""))


def mutations(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Every place of an object: an unknown field in it, and a value of a type that it is not."""
    name = ".".join(map(str, path))
    if isinstance(value, dict):
        if path and path[-1] not in FREE:
            yield f"{name}: unknown", path, {**value, "noSuchField": 1}
        yield from (
            (what, where, new) for key, item in value.items() for what, where, new in mutations(item, (*path, key))
        )
        if path:
            yield f"{name}: a text for a map", path, "text"
    elif isinstance(value, list):
        yield f"{name}: a text for a list", path, "text"
        for index, item in enumerate(value):
            yield from mutations(item, (*path, index))
    elif isinstance(value, str):
        yield f"{name}: a map for a text", path, {"a": {"b": 1}}
    else:
        yield f"{name}: a list for a number or truth value", path, [value]


def put(item: Object, path: tuple[Any, ...], new: Any) -> Object:
    changed: Any = copy.deepcopy(item)
    place = changed
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = new
    return dict(changed)


@needs_crds
@pytest.mark.parametrize("name", [SAMPLES[6], *(pytest.param(name, marks=pytest.mark.real) for name in SAMPLES[:3])])
def test_mistakes_by_mutation_are_caught(name: str) -> None:
    survivors = []
    number = 0
    for item in objects_of(name):
        for what, path, new in mutations(item):
            if path in {("kind",), ("apiVersion",)}:
                continue  # another object altogether: no schema would be found
            number += 1
            if not find_errors(put(item, path, new), ("1.34",)):
                survivors.append(what)
    assert number > 150
    assert survivors == []
