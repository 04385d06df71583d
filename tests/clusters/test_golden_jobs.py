"""One job per shape lies in the tree as it is rendered, so that a difference in a commit shows what changed for users.

``make goldens`` rewrites them.
"""

from __future__ import annotations

import os

import pytest

from rlk_repro.clusters.k8s.objects import dump_objects, render_objects
from rlk_repro.clusters.slurm.script import render_sbatch
from tests.support.k8s import examples as k8s
from tests.support.slurm import examples as slurm

JOBS = (
    "smoke.h200.sbatch",  # the host, without a container
    "smoke.h200.apptainer.sbatch",
    "smoke.h200.pyxis.sbatch",
    "smoke.gb200.two-nodes.sbatch",  # pyxis, several nodes
    "qwen3-4b.a100.sbatch",  # vime, an environment on the nodes
    "qwen3-30b-a3b.mi300x.sbatch",  # ROCm, docker
    "smoke.h200.job.yaml",
    "smoke.gb200.job.four-nodes.yaml",  # several nodes of one NVLink domain
)


def render(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if kind == "sbatch":
        plan = dict(slurm.list_plans())[stem]
        return render_sbatch(plan, slurm.run_dir_of(plan))
    plan = dict(k8s.list_plans())[stem]
    return dump_objects(render_objects(plan, k8s.run_dir_of(plan)))


@pytest.mark.parametrize("name", JOBS)
def test_a_job_is_rendered_as_it_lies_in_the_tree(name: str) -> None:
    file = (slurm.EXAMPLES if name.endswith(".sbatch") else k8s.EXAMPLES) / name
    text = render(name)
    if os.environ.get("RLK_REPRO_GOLDENS") == "write":
        file.write_text(text)
    assert file.read_text() == text, "make goldens"
