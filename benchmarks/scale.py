"""Many jobs and many runs beside a Typer hello: every Slurm script and every file of objects, and 200 submitted runs.

``python -m benchmarks.scale [N]`` runs each command N times (7 by default) in turn with the hello of
``benchmarks.startup``, each from a new process, and prints one JSON object: medians, ratios to hello and how often the
scheduler was asked.  The clients of Slurm are scripts that answer at once and count their calls; with
``SLURM_CONF`` of a real cluster and ``--runs FOLDER`` it is asked instead about the runs in that folder.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.startup import HELLO, MAIN, time_in_turn
from rlk_repro.base.clock import utc_now
from rlk_repro.base.resources import list_names, run_folders
from rlk_repro.clusters.api import Submission
from rlk_repro.clusters.slurm.script import render_sbatch
from rlk_repro.spec.load import load_run
from rlk_repro.submit import planning, sending
from rlk_repro.submit.stage import stage
from tests.support.slurm.examples import HARDWARE, IMAGE_DIR, RUNTIMES, plan_for, run_dir_of, with_site

NUM_RUNS = 200
RENDER = "from benchmarks.scale import render_matrix; print(render_matrix())"
RENDER_PODS = "from tests.support.kube.examples import render_examples; print(len(render_examples()))"
PROFILE = "profile: site\ncluster: slurm\nhardware: cpu\nslurm: {gres: none}\ncontainer: {runtime: host}\n"
CLIENT = """\
#!/bin/sh
echo "$0 $*" >> {folder}/calls
[ "${{0##*/}}" = squeue ] && cat {folder}/queue
exit 0
"""


def render_matrix() -> int:
    """Every run on every hardware it has a layout for, with every container runtime; the number of scripts."""
    num_scripts = 0
    for run in list_names(run_folders()):
        layouts = load_run(run).model.layouts
        for hardware in HARDWARE:
            if hardware not in layouts:
                continue
            plans = [plan_for(run, hardware)]
            with_images = plan_for(run, hardware, stack="example")
            plans += [
                with_site(with_images, container={"runtime": runtime, "image_dir": IMAGE_DIR}) for runtime in RUNTIMES
            ]
            num_scripts += sum(bool(render_sbatch(plan, run_dir_of(plan))) for plan in plans)
    return num_scripts


def make_runs(folder: Path, num_runs: int) -> None:
    """Staged and submitted as far as the disk knows; each waits in the queue."""
    profile = folder / "profile.yaml"
    profile.write_text(PROFILE)
    rows = []
    for number in range(1, num_runs + 1):
        request = planning.Request(run="smoke", cluster="slurm", profile=str(profile), control_pairs=number % 8)
        prepared = planning.prepare(request)
        assert prepared.inputs is not None
        stage(prepared.plan, prepared.inputs, prepared.run_dir, prepared.job)
        submission = Submission(
            cluster="slurm", job_id=str(number), submitted_at=utc_now(), details={"cluster_name": "test"}
        )
        sending.record_submission(prepared.run_dir, submission)
        rows.append(f"{number}|PENDING|Priority||2026-11-21T12:00:00\n")
    (folder / "queue").write_text("".join(rows))


def make_clients(folder: Path) -> None:
    clients = folder / "bin"
    clients.mkdir()
    for name in ("squeue", "sacct", "scontrol", "sinfo", "sbatch", "scancel"):
        (clients / name).write_text(CLIENT.format(folder=folder))
        (clients / name).chmod(0o755)
    os.environ["PATH"] = f"{clients}{os.pathsep}{os.environ['PATH']}"


def count_made(argv: list[str]) -> int:
    return int(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)


def count_calls(folder: Path, argv: list[str]) -> list[str]:
    calls = folder / "calls"
    calls.write_text("")
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return [line.split()[0].rpartition("/")[2] for line in calls.read_text().splitlines()]


def measure(num_times: int, runs: Path | None) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["RLK_REPRO_RUNS"] = str(runs or folder / "runs")
        if runs is None:
            make_clients(folder)
            make_runs(folder, NUM_RUNS)
        hello = folder / "hello.py"
        hello.write_text(HELLO)
        asked = {
            "status": [sys.executable, "-c", MAIN, "status"],
            "runs_list": [sys.executable, "-c", MAIN, "runs", "list", "--submitted"],
        }
        renders = {"render": [sys.executable, "-c", RENDER], "render_pods": [sys.executable, "-c", RENDER_PODS]}
        commands = {"hello": [sys.executable, str(hello), "--help"], **renders, **asked}
        times = time_in_turn(commands, num_times)
        medians = {name: statistics.median(values) for name, values in times.items()}
        return {
            "n": num_times,
            "num_runs": len(sending.list_launched()),
            "num_scripts": count_made(renders["render"]),
            "num_object_files": count_made(renders["render_pods"]),
            "median_s": medians,
            "range_s": {name: [min(values), max(values)] for name, values in times.items()},
            "ratio_to_hello": {name: value / medians["hello"] for name, value in medians.items() if name != "hello"},
            "asked": None if runs else {name: count_calls(folder, argv) for name, argv in asked.items()},
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("num_times", nargs="?", type=int, default=7)
    parser.add_argument("--runs", type=Path)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.num_times, arguments.runs), indent=1))
