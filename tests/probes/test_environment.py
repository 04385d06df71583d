from pathlib import Path

import pytest

from rlk_repro.probes import container, environment
from rlk_repro.rundir.manifest import Unknown
from tests.support.probe_examples import write_tree

TOKEN = "hf_" + "aB3" * 11


def test_only_variables_that_steer_a_run_are_recorded():
    found = environment.select(
        {
            "NCCL_DEBUG": "INFO",
            "VLLM_HOST_IP": "10.0.0.7",
            "RAY_ADDRESS": "10.0.0.7:6379",
            "RAY_HEAD_SVC_SERVICE_HOST": "10.0.0.8",
            "RAY_HEAD_PORT_6379_TCP_ADDR": "10.0.0.8",
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_USER": "me",
            "SLURM_JOB_ACCOUNT": "mine",
            "SLURM_SUBMIT_DIR": "/home/me",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": "/home/me",
            "HOME": "/home/me",
            "AWS_SECRET_ACCESS_KEY": "x" * 40,
        }
    )
    assert found == {"NCCL_DEBUG": "INFO", "PYTHONHASHSEED": "0", "SLURM_JOB_ID": "17"}


def test_values_that_look_like_secrets_are_redacted_and_their_names_stay():
    found = environment.select(
        {"VLLM_API_KEY": "x9Y8" * 5, "VIME_EXTRA": f"a {TOKEN}", "RAY_URL": "redis://me:" + "tulips@host"}
    )
    assert found == {"RAY_URL": "<redacted>", "VIME_EXTRA": "<redacted>", "VLLM_API_KEY": "<redacted>"}


@pytest.mark.parametrize(
    ("files", "variables", "runtime"),
    [
        ({}, {}, "none"),
        ({"/.dockerenv": ""}, {}, "docker"),
        ({"/.dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({"/run/.containerenv": ""}, {}, "podman"),
        ({"/.lock": ""}, {}, "enroot"),
        ({"/.lock": ""}, {"APPTAINER_CONTAINER": "/x.sif"}, "apptainer"),
        ({"/proc/self/cgroup": "0::/kubepods.slice/cri-containerd-1.scope"}, {}, "kubernetes"),
        ({"/proc/self/cgroup": "0::/system.slice/docker-1.scope"}, {}, "docker"),
        ({"/proc/self/cgroup": "0::/"}, {"container": "lxc"}, "lxc"),
    ],
)
def test_the_runtime_is_recognised_by_its_marks(tmp_path, files, variables, runtime):
    facts = container.probe(write_tree(tmp_path, files), variables)
    assert (facts["runtime"], facts["is_container"]) == (runtime, runtime != "none")


def test_the_digest_comes_from_the_launcher_first(tmp_path):
    write_tree(tmp_path, {container.PROVENANCE: '{"image_digest": "sha256:aa"}'})
    assert container.probe(tmp_path, {"RLK_REPRO_IMAGE_DIGEST": "sha256:bb"})["image_digest"] == "sha256:bb"
    assert container.probe(tmp_path, {})["image_digest"] == "sha256:aa"


@pytest.mark.parametrize("record", ["{", "[]", '{"image_digest": null}', '{"image_digest": 3}'])
def test_an_image_without_a_digest_says_why(tmp_path, record):
    write_tree(tmp_path, {container.PROVENANCE: record, "/.dockerenv": ""})
    reason = "RLK_REPRO_IMAGE_DIGEST is not set and /opt/rlk-repro/provenance.json names no image_digest"
    assert container.probe(tmp_path, {})["image_digest"] == Unknown(reason)


def test_an_environments_record_is_named_by_its_own_path(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    write_tree(tmp_path, {"/lock.txt": "", "/provenance.json": "{"})
    assert container.load_provenance(Path("/")) == Unknown(f"{tmp_path}/provenance.json is not JSON")
