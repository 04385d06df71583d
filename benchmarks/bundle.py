"""Checking a bundle beside ``tar xzf`` and ``sha256sum -c``: ``python -m benchmarks.bundle [--large]``.

About 450 MB of generated logs are sealed and packed.  Then both roads run in turn, each from a new process with a warm
page cache; removing what tar unpacked is not counted.  ``--large`` packs 5 GB that do not compress and reports the peak
memory of verifying them (needs 11 GB of disk under TMPDIR).  Prints one JSON object; 1 MB = 10^6 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rlk_repro.bundle.seal import pack, seal
from rlk_repro.rundir.paths import RunDir

NUM_PAIRS = 7
NUM_TRIALS = 12
LOG_BYTES = 450_000_000
LARGE_BYTES = 5_000_000_000
BLOCK_BYTES = 1 << 20
VERIFY = """
import sys
from pathlib import Path
from rlk_repro.bundle.verify import verify_bundle
assert verify_bundle(Path(sys.argv[1])) == []
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


def make_line(number: int, source: random.Random) -> str:
    metrics = {f"train/{key}": source.random() for key in ("loss", "grad_norm", "kl_loss", "entropy")}
    metrics |= {f"perf/{key}": source.random() * 60 for key in ("step_time", "rollout_time")}
    stamp, pid = f"2026-11-20 13:{number // 60 % 60:02d}:{number % 60:02d}", source.randrange(1000, 99999)
    return f"[{stamp}] (RayTrainGroup pid={pid}) step {number}: {metrics}\n"


def make_logs(num_bytes: int) -> Iterator[bytes]:
    """The same 20 MB again and again, far more than the window of deflate."""
    source = random.Random(1)
    block = "".join(make_line(number, source) for number in range(70_000)).encode()
    while num_bytes > 0:
        yield block[:num_bytes]
        num_bytes -= len(block)


def make_noise(num_bytes: int) -> Iterator[bytes]:
    for _ in range(num_bytes // BLOCK_BYTES):
        yield os.urandom(BLOCK_BYTES)


def write(path: Path, pieces: Iterator[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.writelines(pieces)


def verify(bundle: Path) -> tuple[float, float]:
    """Seconds of the whole process, and its peak resident memory in MB."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", VERIFY, str(bundle)], check=True, capture_output=True, text=True)
    return time.perf_counter() - began, int(done.stdout) * 1024 / 1e6


def check_with_tar(bundle: Path) -> float:
    with tempfile.TemporaryDirectory(dir=bundle.parent) as folder:
        began = time.perf_counter()
        subprocess.run(["tar", "xzf", str(bundle), "-C", folder], check=True)
        subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
        return time.perf_counter() - began


def timed(function: Callable[[RunDir], object], run_dir: RunDir) -> float:
    began = time.perf_counter()
    function(run_dir)
    return time.perf_counter() - began


def measure_logs(folder: Path) -> dict[str, object]:
    run_dir = RunDir(folder / "logs")
    for number in range(NUM_TRIALS):
        write(run_dir.trial(f"{number:02d}").stdout, make_logs(LOG_BYTES // NUM_TRIALS))
    seal_s, pack_s = timed(seal, run_dir), timed(pack, run_dir)
    bundle = run_dir.bundle
    pairs = [(verify(bundle), check_with_tar(bundle)) for _ in range(NUM_PAIRS + 1)][1:]
    return {
        "logs_mb": LOG_BYTES / 1e6,
        "bundle_mb": bundle.stat().st_size / 1e6,
        "seal_s": seal_s,
        "pack_s": pack_s,
        "verify_s": statistics.median(seconds for (seconds, _), _ in pairs),
        "tar_and_sha256sum_s": statistics.median(seconds for _, seconds in pairs),
        "ratio_median": statistics.median(tar_s / verify_s for (verify_s, _), tar_s in pairs),
        "ratio_worst": min(tar_s / verify_s for (verify_s, _), tar_s in pairs),
        "verify_peak_mb": max(peak for (_, peak), _ in pairs),
    }


def measure_large(folder: Path) -> dict[str, object]:
    run_dir = RunDir(folder / "large")
    write(run_dir.rollouts / "all.bin", make_noise(LARGE_BYTES))
    seal(run_dir)
    bundle = pack(run_dir, folder / "large.tgz")
    shutil.rmtree(run_dir.root)
    seconds, peak = verify(bundle)
    return {"large_bundle_mb": bundle.stat().st_size / 1e6, "large_verify_s": seconds, "large_verify_peak_mb": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="also 5 GB that do not compress")
    is_large = parser.parse_args().large
    with tempfile.TemporaryDirectory() as folder:
        result = measure_logs(Path(folder))
        if is_large:
            result |= measure_large(Path(folder))
    rounded = {key: round(value, 2) if isinstance(value, float) else value for key, value in result.items()}
    print(json.dumps(rounded, indent=1))


if __name__ == "__main__":
    main()
