"""How fast logs are scrubbed and ``parse_log`` reads, and in how much memory: ``python -m benchmarks.parser [MB ...]``.

For each size a stamped log is generated, 99 % vLLM, Ray and Megatron chatter, read once to warm the page cache and
parsed three times in a fresh process.  Printed: the best MB/s (1 MB = 10^6 bytes), the peak resident memory of that
process and the part of it that parsing added: one block, plus the numbers found (about 2 KiB per rollout).  Before
that, the best MB/s at which the same lines pass the scrubber one by one, as a trial's log does.
"""

from __future__ import annotations

import itertools
import multiprocessing
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rlk_repro.base.secrets import scrub_bytes
from rlk_repro.logs.vime import ParsedLog, parse_log

DEFAULT_SIZES_MB = (200, 2000)
NUM_REPEATS = 3
CHATTER_PER_ROLLOUT_BYTES = 600_000
CHATTER = (
    "(VLLMEngine pid=2101, ip=10.0.0.2) INFO 11-20 13:45:12 [loggers.py:127] Engine 000: Avg prompt throughput: %d.5 "
    "tokens/s, Avg generation throughput: %d.9 tokens/s, Running: 64 reqs, Waiting: 0 reqs, GPU KV cache usage: 12.3%%",
    '(VLLMEngine pid=2101) INFO:     10.0.0.3:%d - "POST /inference/v1/generate HTTP/1.1" 200 OK in %d ms',
    "(MegatronTrainRayActor pid=99, ip=10.0.0.4) [2026-11-20 13:45:12] actor.py:225 - offload %d tensors, %d left",
    "(MegatronTrainRayActor pid=99) > number of parameters on (tensor, pipeline) model parallel rank (%d, 0): %d",
    "(MegatronTrainRayActor pid=99) WARNING:megatron.core.rerun_state_machine:Implicit initialization, %d of %d",
    "(raylet, ip=10.0.0.5) Spilled %d MiB, %d objects, write throughput 1213 MiB/s. Set RAY_verbose_spill_logs=0",
    "(RolloutManager pid=77) Rollout generation:  42%%|████▏     | %d/9999 [00:10<00:14, %d.75it/s]",
    "(VLLMEngine pid=2101) non-default args: {'seed': %d, 'compilation_config': {'mode': 3}, 'port': %d}",
)
STAMP = "2026-11-20T13:45:12.345Z "


def make_chatter(num_bytes: int) -> bytes:
    numbers = itertools.cycle(range(10_000))
    lines: list[bytes] = []
    size = 0
    while size < num_bytes:
        line = CHATTER[len(lines) % len(CHATTER)] % (next(numbers), next(numbers))
        lines.append(f"{STAMP}{line}\n".encode())
        size += len(lines[-1])
    return b"".join(lines)


def make_rollout(index: int) -> bytes:
    """What trainer and RolloutManager print for one rollout."""
    trainer = f"{STAMP}(MegatronTrainRayActor pid=99, ip=10.0.0.4) [2026-11-20 13:45:12] "
    manager = f"{STAMP}(RolloutManager pid=77) [2026-11-20 13:45:12] "
    memory = {"gpu": "0", "used_GB": 71.5, "allocated_GB": 40.25, "reserved_GB": 60.0}
    generation = {"perf/rollout_time": index + 0.5, "rollout/truncated_ratio": 0.0}
    rollout = {"rollout/raw_reward": 0.5, "rollout/response_lengths": 512.0}
    step = {f"train/{key}": index + 0.125 for key in ("loss", "pg_loss", "kl_loss", "grad_norm", "entropy_loss")}
    perf = {f"perf/{key}": index + 0.5 for key in ("train_time", "actor_train_time", "train_wait_time", "step_time")}
    return "".join(
        (
            f"{trainer}memory_utils.py:38 - [Rank 0] Memory-Usage after wake_up model: {memory}\n",
            f"{manager}rollout.py:1351 - perf {index}: {generation}\n",
            f"{trainer}timer.py:32 - Timer actor_train end (elapsed: 12.3s)\n",
            f"{trainer}data.py:193 - rollout {index}: {rollout}\n",
            f"{trainer}model.py:925 - step {index}: {step | {'train/step': index}}\n",
            f"{trainer}train_metric_utils.py:50 - perf {index}: {perf}\n",
        )
    ).encode()


def write_log(path: Path, size_mb: int) -> int:
    """Returns the number of rollouts in the log."""
    chatter = make_chatter(CHATTER_PER_ROLLOUT_BYTES)
    num_rollouts = max(1, size_mb * 1_000_000 // len(chatter))
    with path.open("wb") as stream:
        for index in range(num_rollouts):
            stream.write(chatter)
            stream.write(make_rollout(index))
    return num_rollouts


def peak_rss_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def check(parsed: ParsedLog, num_rollouts: int) -> None:
    """Every generated line was found and nothing was refused."""
    tables = list(parsed.rows.values())
    if parsed.reject_counts or any(len(table) != num_rollouts for table in tables):
        raise SystemExit(f"wrong result: {parsed.reject_counts}, {[len(table) for table in tables]} rollouts")


def measure(path: Path, num_rollouts: int) -> str:
    before_mib = peak_rss_mib()
    seconds = []
    for _ in range(1 + NUM_REPEATS):
        start = time.perf_counter()
        parsed = parse_log(path)
        seconds.append(time.perf_counter() - start)
        check(parsed, num_rollouts)
        del parsed
    megabytes = path.stat().st_size / 1e6
    return (
        f"{megabytes:6.0f} MB, {num_rollouts} rollouts: {megabytes / min(seconds):.0f} MB/s, "
        f"peak RSS {peak_rss_mib():.0f} MiB ({peak_rss_mib() - before_mib:.0f} MiB by parsing)"
    )


def measure_scrubbing() -> str:
    lines = make_chatter(2_000_000).splitlines(keepends=True)
    seconds = []
    for _ in range(1 + NUM_REPEATS):
        start = time.perf_counter()
        for line in lines:
            scrub_bytes(line)
        seconds.append(time.perf_counter() - start)
    return f"scrubbing: {sum(map(len, lines)) / 1e6 / min(seconds):.0f} MB/s"


def main() -> None:
    sys.stdout.write(measure_scrubbing() + "\n")
    for size_mb in [int(argument) for argument in sys.argv[1:]] or DEFAULT_SIZES_MB:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "stdout.log"
            num_rollouts = write_log(path, size_mb)
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                sys.stdout.write(pool.submit(measure, path, num_rollouts).result() + "\n")


if __name__ == "__main__":
    main()
