"""New hardware needs only a YAML file: the plan is made and rendered for both clusters, and no Python names it."""

import json
from pathlib import Path
from typing import Any

from tests.support.copied_package import Copy

HARDWARE = """\
schema: 1
hardware: b300
title: NVIDIA B300 288 GB (8 per node, x86-64)
platform: cuda
machine: x86_64
gpus_per_node: 8
gpu_memory_gib: 275
name_part: B300
refused_name_parts: [SHARED, MIG]
driver_floor: "580"
links_per_gpu: 18
node_labels:
  nvidia.com/gpu.product: [NVIDIA-B300-SXM6-AC]
"""
LAYOUT = "layouts:\n  b300: {num_nodes: 1, gpus_per_node: 1}\n"
SLURM = """\
profile: site
cluster: slurm
hardware: b300
slurm: {account: rl, gres: "gpu:b300"}
container: {runtime: pyxis, image_dir: /images}
"""
K8S = """\
profile: site
cluster: k8s
hardware: b300
kubernetes: {kind: job, namespace: rl, cpu: "8", memory: 128Gi, results: {claim: results, path: /results}}
"""


def render(copy: Copy, folder: Path, profile: str, cluster: str) -> dict[str, Any]:
    """Return what ``submit --dry-run`` shows on one cluster."""
    (folder / "site.yaml").write_text(profile)
    arguments = ("--cluster", cluster, "--profile", folder / "site.yaml", "--run", "smoke", "--stack", "example")
    done = copy.run("submit", *arguments, "--dry-run", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_hardware_that_no_code_names_is_planned_and_rendered_on_both_clusters(tmp_path: Path) -> None:
    copy = Copy(tmp_path / "source")
    (copy.root / "jobs/hardware/b300.yaml").write_text(HARDWARE)
    copy.replace("jobs/smoke.yaml", "layouts:\n", LAYOUT)
    assert list(copy.touched()) == ["jobs/smoke.yaml"]
    by_slurm = render(copy, tmp_path, SLURM, "slurm")
    assert by_slurm["plan"]["experiment"]["hardware"]["title"].startswith("NVIDIA B300")
    script = by_slurm["job"]["files"]["job.sbatch"]
    assert "gpu:b300:1" in script
    assert "arch=amd64" in script or "x86_64" in script
    objects = render(copy, tmp_path, K8S, "k8s")["job"]["files"]["objects.yaml"]
    assert "NVIDIA-B300-SXM6-AC" in objects
    assert "nvidia.com/gpu: 1" in objects.replace("'", "").replace('"', "")
    assert "amd64" in objects
