"""What the real sbatch, bash and srun make of hostile values: nothing is executed, every value arrives as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlk_repro.base.files import write_text
from rlk_repro.clusters.slurm.script import SCRIPT, render_sbatch, sbatch_command
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from tests.support.slurm.cluster import NODES, Cluster
from tests.support.slurm.examples import HOSTILE, plan_for, with_site

# Stands for Python: writes down its arguments, its folder and its path of modules, one file per node.
RECORDER = """\
#!/bin/sh
printf '%s\\0' "$PWD" "$PYTHONPATH" "$@" > "$0.$SLURMD_NODENAME.$3"
"""

# The agent of node-0 breaks once the other one is ready; that one works until it is asked to end, and takes its time.
BREAKING = """\
#!/bin/sh
[ "$3" = rlk_repro.job ] || exit 0
if [ "$SLURMD_NODENAME" = node-0 ]; then
  until [ -e "$0.ready" ]; do sleep 0.1; done
  exit 3
fi
trap 'sleep 2; echo ended > "$0.$SLURMD_NODENAME"; exit 143' TERM
: > "$0.ready"
while :; do sleep 0.1; done
"""


def submit(cluster: Cluster, plan: Plan, run_dir: RunDir) -> str:
    run_dir.job.mkdir(parents=True)
    write_text(run_dir.job / SCRIPT, render_sbatch(plan, run_dir))
    return cluster.ask(*sbatch_command(run_dir)).strip()


def wait_for_end(cluster: Cluster, job_id: str) -> None:
    cluster.wait_until(lambda: cluster.job_field(job_id, "%T") in {"COMPLETED", "FAILED"}, f"the end of {job_id}")


@pytest.fixture
def plan() -> Plan:
    return with_site(plan_for(), slurm={"gres": "none", "stop_before_s": 60})


# Slurm expands % only in a path without a backslash
NAMES = ["".join(name for name in HOSTILE if not set(name) & {"\n", "\\"}), "back\\slash \\ 100%j", "-rf"]


def test_an_option_arrives_as_it_was(cluster: Cluster, plan: Plan, tmp_path: Path) -> None:
    for number, name in enumerate(NAMES):
        held = with_site(plan, slurm={"extra": [f"--comment={name}", "--hold"]})
        job_id = submit(cluster, held, RunDir(tmp_path / str(number)))
        assert cluster.job_field(job_id, "%k") == name.strip()
        cluster.ask("scancel", job_id)


@pytest.fixture
def two_nodes(plan: Plan) -> Plan:
    layout = plan.layout.model_copy(update={"num_nodes": 2})
    return with_site(plan, run=plan.run.model_copy(update={"layouts": {plan.hardware.hardware: layout}}))


def write_python(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_a_path_arrives_as_it_was_on_every_node(cluster: Cluster, two_nodes: Plan, tmp_path: Path, name: str) -> None:
    python = write_python(tmp_path / name / "python", RECORDER)
    path_written_s = python.stat().st_mtime
    code = str(tmp_path / f"code {name}")
    run_dir = RunDir(tmp_path / f"runs {name}" / name)
    plan = with_site(two_nodes, container={"python": str(python), "package_dir": code})
    job_id = submit(cluster, plan, run_dir)
    wait_for_end(cluster, job_id)
    options = ["--nodes", ",".join(NODES), "--allocation", f"{job_id}.0", "--until"]
    root = str(run_dir.root)
    for node in NODES:
        found = Path(f"{python}.{node}.rlk_repro.job").read_text().split("\0")[:-1]
        assert found[:-3] == [root, code, "-P", "-m", "rlk_repro.job", root, *options]
        assert int(found[-3]) > path_written_s
        assert found[-2:] == ["--node", node]
    log = run_dir.job_output("%j" if "\\" in root else job_id)
    assert f"allocation {job_id}.0: {','.join(NODES)}\n" in log.read_text()
    packed = Path(f"{python}.{NODES[0]}.rlk_repro.job.pack").read_text().split("\0")[:-1]
    assert packed == [root, code, "-P", "-m", "rlk_repro.job.pack", root]
    assert list(tmp_path.rglob("pwned*")) == []
    assert not Path("pwned").exists()


def test_an_agent_that_breaks_takes_the_others_with_it_in_good_order(
    cluster: Cluster, two_nodes: Plan, tmp_path: Path
) -> None:
    python = write_python(tmp_path / "python", BREAKING)
    run_dir = RunDir(tmp_path / "run")
    job_id = submit(cluster, with_site(two_nodes, container={"python": str(python)}), run_dir)
    wait_for_end(cluster, job_id)
    assert Path(f"{python}.node-1").read_text() == "ended\n"
    assert "ExitCode=143:0" in cluster.ask("scontrol", "show", "job", job_id)


def test_a_sealed_run_is_left_alone(cluster: Cluster, plan: Plan, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    write_text(run_dir.checksums, "")
    write_text(run_dir.bundle, "sealed")
    job_id = submit(cluster, with_site(plan, container={"python": "/bin/false"}), run_dir)
    wait_for_end(cluster, job_id)
    assert run_dir.job_output(job_id).read_text().endswith("\nalready sealed, nothing to do\n")
    assert run_dir.bundle.read_text() == "sealed"
    assert not run_dir.scheduler.exists()
