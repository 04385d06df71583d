"""What Slurm adds to the smoke run: ``python -m benchmarks.slurm_time [N] [--pairs P]``.

Runs it N times (3 by default) on ``local`` and on a real Slurm of this machine (``tests.support.slurm.cluster``) in
turn, each with ``submit --wait``.  A run's time is from the command's start to its end; on Slurm without the time that
the job waited in the queue, which Slurm tells in whole seconds.  With fewer pairs than the run's own six what Slurm
adds weighs more.  Prints one JSON object with every time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from benchmarks.startup import MAIN
from rlk_repro.base.files import load_json
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.store import find_run_dir
from tests.support.slurm.cluster import Cluster, find_missing, running_cluster
from tests.support.slurm.runs import make_profile


def run_smoke(env: dict[str, str], *options: str) -> float:
    began = time.perf_counter()
    argv = [sys.executable, "-c", MAIN, "submit", "--run", "smoke", "--wait", *options]
    subprocess.run(argv, check=True, env={**os.environ, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def ask_queueing_s(cluster: Cluster, run_dir: RunDir) -> float:
    """From submission to start; nothing is asked that accounting would have to know."""
    job_id = load_json(run_dir.submission)["job_id"]
    text = cluster.ask("scontrol", "--oneliner", "show", "job", job_id)
    fields = dict(word.split("=", 1) for word in text.split() if "=" in word)
    submitted, started = (datetime.fromisoformat(fields[name]) for name in ("SubmitTime", "StartTime"))
    return (started - submitted).total_seconds()


def measure(num_times: int, num_pairs: int) -> dict[str, object]:
    missing = find_missing()
    if missing is not None:
        sys.exit(missing)
    local_s, slurm_s, queued_s = [], [], []
    with tempfile.TemporaryDirectory() as name, running_cluster(Path(name) / "cluster") as cluster:
        os.environ["RLK_REPRO_RUNS"] = f"{name}/runs"
        profile = make_profile(Path(name))
        pairs = ("--pairs", str(num_pairs), "--exploratory")
        for _ in range(num_times):
            local_s.append(run_smoke({}, "--cluster", "local", "--hardware", "cpu", *pairs))
            slurm_s.append(run_smoke(cluster.env, "--cluster", "slurm", "--profile", str(profile), *pairs))
            queued_s.append(ask_queueing_s(cluster, find_run_dir(None)))
    net_s = [whole - queued for whole, queued in zip(slurm_s, queued_s, strict=True)]
    return {
        "n": num_times,
        "num_pairs": num_pairs,
        "cores": os.cpu_count(),
        "local_s": local_s,
        "slurm_s": slurm_s,
        "queued_s": queued_s,
        "median_ratio": statistics.median(net_s) / statistics.median(local_s),
        "ratios": [slurm / local for slurm, local in zip(net_s, local_s, strict=True)],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("num_times", nargs="?", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=6)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.num_times, arguments.pairs), indent=1))
