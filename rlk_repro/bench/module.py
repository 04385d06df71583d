"""Run vime's own log-prob and policy loss functions on random batches: ``python -m rlk_repro.bench.module``.

The calls and log lines are those of vime's training, without a model, an optimizer or a rollout engine.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import math
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeAlias

import torch
from torch import distributed

from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem, SpecError, finish
from rlk_repro.bench.batches import BatchShape, LogitsBatch, make_microbatch
from rlk_repro.bench.measure import make_device, record_kernels
from rlk_repro.bench.module_arguments import parse_args
from rlk_repro.integration.measure.profile import FORWARD_ONLY, UPDATE, DeviceClock, StepProfile, make_clock
from rlk_repro.loss_options import has_old_policy_pass
from rlk_repro.refengine.__main__ import LOG_FORMAT, TIME_FORMAT
from rlk_repro.sources import MEGATRON, VIME
from rlk_repro.workloads.checkouts import require_importable

logger = logging.getLogger(__name__)

LOSS_MODULE: Final = "vime.backends.megatron_utils.loss"
PER_TOKEN: Final = ("rollout_log_probs", "ref_log_probs", "log_probs", "advantages")
TRAIN: Final = "actor_train"
MAX_KERNELS: Final = 1000
Reducer: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)

    def run_rank() -> None:
        rank = find_rank(args.tensor_model_parallel_size)
        start_log(is_quiet=rank > 0)
        run(args, rank)

    return finish(run_rank)


def find_rank(num_ranks: int) -> int:
    """Return the rank that torch's launcher gave this process; return 0 for a single process.

    Raises:
        SpecError: the launcher started more or fewer processes than ``num_ranks``.
    """
    if num_ranks == 1:
        return 0
    found = int(os.environ.get("WORLD_SIZE", "1"))
    if found != num_ranks:
        raise SpecError(
            Problem("--tensor-model-parallel-size", "differs from the number of processes", got=num_ranks,
                    expected=str(found),
                    hint=f"python -m torch.distributed.run --standalone --nproc-per-node {num_ranks} -m …")
        )  # fmt: skip
    return int(os.environ["RANK"])


def start_log(*, is_quiet: bool) -> None:
    """Print lines and warnings as vime does, but without names of this machine's folders."""
    level = logging.ERROR if is_quiet else logging.INFO
    logging.basicConfig(level=level, format=LOG_FORMAT, datefmt=TIME_FORMAT, stream=sys.stdout)
    warnings.formatwarning = format_warning
    if is_quiet:
        warnings.simplefilter("ignore")


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    del line
    return f"{Path(filename).name}:{lineno}: {category.__name__}: {message}\n"


def run(args: argparse.Namespace, rank: int = 0) -> None:
    device = make_device(args.device, rank)
    loss_module = load_vime_loss()
    from rlk_repro.integration.vime import install_loss

    with process_group(args.tensor_model_parallel_size, device):
        installation = install_loss(args)
        bench = ModuleBench(args, loss_module, device, rank, None if installation is None else installation.profile)
        for rollout_id in range(args.num_rollout):
            # a full garbage collection visits all objects that imports made, so it must run outside the timed steps
            gc.collect()
            gc.freeze()
            if installation is not None:
                installation.begin_step(rollout_id)
            bench.train(rollout_id)
            if installation is not None:
                installation.end_step(rollout_id)
        if installation is not None and device.type != "cpu":
            # record kernels after all timing, because a profiler slows the calls that it observes
            installation.turn.is_enabled = True
            names = record_kernels(lambda: bench.run_microbatch(OptimizerStep(), args.num_rollout, 0, 0), MAX_KERNELS)
            installation.ledger.write("kernels", names=names)


def load_vime_loss() -> ModuleType:
    """Import vime's loss module; raise EnvironmentMissing if vime, Megatron-LM or a requirement is absent."""
    require_importable(VIME, MEGATRON)
    try:
        return importlib.import_module(LOSS_MODULE)
    except ModuleNotFoundError as error:
        raise EnvironmentMissing(
            Problem(f"python module {error.name}", "missing", expected=f"what {LOSS_MODULE} imports",
                    hint="install the requirements of vime and Megatron-LM")
        ) from error  # fmt: skip


@contextmanager
def process_group(num_ranks: int, device: torch.device) -> Iterator[None]:
    """Create the groups that vime's loss requests from Megatron-LM, and remove them after the block.

    After an error the groups are not removed, because their removal would wait for ranks that wait for this rank.
    """
    from megatron.core import mpu

    backend = "gloo" if device.type == "cpu" else "nccl"
    if num_ranks == 1:
        store = distributed.HashStore()  # type: ignore[attr-defined]
        distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    else:
        distributed.init_process_group(backend)
    mpu.initialize_model_parallel(tensor_model_parallel_size=num_ranks)
    yield
    mpu.destroy_model_parallel()
    distributed.destroy_process_group()


class Phases:
    """Sum the seconds of each phase over its calls; nothing waits for the device before ``settle``.

    With ``lead_ms``, the device is still busy when a phase starts, as after a model's forward pass, so the host issues
    calls early.  The ranks of ``group`` begin a phase together, so no phase includes waiting for another rank's batch.
    """

    def __init__(self, device: torch.device, group: Any, lead_ms: float, profile: StepProfile | None) -> None:
        self._clock = make_clock(is_device=device.type != "cpu")
        self._lead = 0 if device.type == "cpu" else round(lead_ms * find_cycles_per_ms()) if lead_ms else 0
        self._group, self._token, self._profile = group, torch.zeros(1, device=device), profile
        self._intervals: list[tuple[str, Any, Any]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        part = UPDATE if name == TRAIN else FORWARD_ONLY
        with nullcontext() if self._profile is None else self._profile.phase(part):
            if self._lead:
                keep_busy(self._lead)
            distributed.all_reduce(self._token, group=self._group)
            begin = self._clock.mark()
            yield
            self._intervals.append((name, begin, self._clock.mark()))

    def settle(self) -> dict[str, float]:
        self._clock.settle()
        elapsed_s: dict[str, float] = {}
        for name, begin, end in self._intervals:
            elapsed_s[name] = elapsed_s.get(name, 0.0) + self._clock.elapsed_s(begin, end)
        self._intervals.clear()
        self._clock.forget()
        return elapsed_s


def keep_busy(cycles: int) -> None:
    """Keep the device busy for ``cycles`` of its clock, as torch's own tests do."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # noqa: SLF001


def find_cycles_per_ms() -> float:
    clock, cycles = DeviceClock(), 10_000_000
    keep_busy(cycles)  # the first call loads the kernel
    begin = clock.mark()
    keep_busy(cycles)
    end = clock.mark()
    clock.settle()
    return cycles / (1e3 * clock.elapsed_s(begin, end))


class OptimizerStep:
    """Sums over the microbatches of one optimizer step, which stay on the device until ``read`` is called."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []
        self._sums: dict[str, torch.Tensor] = {}
        self._squares: list[torch.Tensor] = []

    def add(self, batch: dict[str, Any], metrics: Mapping[str, torch.Tensor], gradient: torch.Tensor) -> None:
        self.batches.append(batch)
        self._squares.append(torch.linalg.vector_norm(gradient).square())
        for name, value in metrics.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def read(self, *, is_per_token: bool, group: Any) -> dict[str, float]:
        """Return vime's metrics and the gradient norm over all ranks, per token (``is_per_token``) or per sample."""
        squares = torch.stack(self._squares).sum()
        distributed.all_reduce(squares, group=group)
        mask_sums = torch.cat([batch["rollout_mask_sums"] for batch in self.batches])
        divisor = mask_sums.clamp_min(1).sum().item() if is_per_token else len(mask_sums)
        metrics = {name: value.item() / divisor for name, value in self._sums.items()}
        return {**metrics, "grad_norm": math.sqrt(squares.item()) / divisor}


class ModuleBench:
    def __init__(
        self,
        args: argparse.Namespace,
        loss_module: ModuleType,
        device: torch.device,
        rank: int,
        profile: StepProfile | None = None,
    ) -> None:
        from megatron.core import mpu

        self.args, self.device = args, device
        self.loss: Any = loss_module
        self.group = mpu.get_tensor_model_parallel_group()
        self.phases = Phases(device, self.group, args.lead_ms, profile)
        self.shape = BatchShape(
            num_samples=args.num_samples,
            num_tokens=args.num_tokens,
            prompt_fraction=args.prompt_fraction,
            vocab_size=args.vocab_size,
            rank=rank,
            num_ranks=args.tensor_model_parallel_size,
        )

    def train(self, rollout_id: int) -> None:
        args = self.args
        steps = [OptimizerStep() for _ in range(args.num_steps_per_rollout)]
        for number, step in enumerate(steps):
            for index in range(args.num_microbatches):
                self.run_microbatch(step, rollout_id, number, index)
        elapsed_s = self.phases.settle()
        batches = [batch for step in steps for batch in step.batches]
        logger.info("rollout %d: %s", rollout_id, self._make_rollout_metrics(batches))
        for number, step in enumerate(steps, start=rollout_id * len(steps)):
            self._log_step(number, step)
        num_tokens = sum(sum(batch["total_lengths"]) for batch in batches)
        logger.info("perf %d: %s", rollout_id, make_perf_metrics(elapsed_s, num_tokens))

    def run_microbatch(self, step: OptimizerStep, *key: int) -> None:
        """Run the passes that vime's actor runs with these flags; a change of the logits stands for an optimizer step.

        Each call makes its own microbatch, so that the logits of only one microbatch are in memory at a time.
        """
        args = self.args
        microbatch = make_microbatch(self.shape, self.device, args.seed, *key)
        batch = microbatch.batch
        if args.use_kl_loss:
            with self.phases.phase("ref_log_probs"):
                batch["ref_log_probs"] = self._find_log_probs(microbatch)
            microbatch.update()
        microbatch.add_rollout_log_probs(args.rollout_temperature, self.group)
        if has_old_policy_pass(vars(args)):
            with self.phases.phase("log_probs"):
                batch["log_probs"] = self._find_log_probs(microbatch)
            microbatch.update()
        reducer = self._make_reducer(batch)
        with self.phases.phase(TRAIN):
            loss, metrics = self.loss.policy_loss_function(args, batch, microbatch.logits, reducer)
            (gradient,) = torch.autograd.grad(loss, microbatch.logits)
        step.add(batch, metrics, gradient)

    @torch.no_grad()
    def _find_log_probs(self, microbatch: LogitsBatch) -> list[torch.Tensor]:
        _, found = self.loss.get_log_probs_and_entropy(
            microbatch.logits.detach(),
            args=self.args,
            unconcat_tokens=microbatch.batch["unconcat_tokens"],
            total_lengths=microbatch.batch["total_lengths"],
            response_lengths=microbatch.batch["response_lengths"],
            with_entropy=False,
        )
        log_probs: list[torch.Tensor] = found["log_probs"]
        return log_probs

    def _make_reducer(self, batch: Mapping[str, Any], *, is_per_token: bool | None = None) -> Reducer:
        reducer: Reducer = self.loss.get_sum_of_sample_mean(
            batch["total_lengths"],
            batch["response_lengths"],
            batch["loss_masks"],
            batch["rollout_mask_sums"],
            self.args.calculate_per_token_loss if is_per_token is None else is_per_token,
        )
        return reducer

    def _make_rollout_metrics(self, batches: Sequence[dict[str, Any]]) -> dict[str, float]:
        """A per-token value is first averaged in its sample, then over samples."""
        responses = [length for batch in batches for length in batch["response_lengths"]]
        totals = [length for batch in batches for length in batch["total_lengths"]]
        metrics = {"response_lengths": statistics.fmean(responses), "total_lengths": statistics.fmean(totals)}
        for name in PER_TOKEN:
            sums = [
                self._make_reducer(batch, is_per_token=False)(torch.cat(batch[name]))
                for batch in batches
                if name in batch
            ]
            if sums:
                metrics[name] = torch.stack(sums).sum().item() / len(responses)
        return {f"rollout/{name}": value for name, value in metrics.items()}

    def _log_step(self, number: int, step: OptimizerStep) -> None:
        metrics = step.read(is_per_token=self.args.calculate_per_token_loss, group=self.group)
        num_samples = sum(len(batch["total_lengths"]) for batch in step.batches)
        line = {f"train/{name}": value for name, value in metrics.items()}
        logger.info("step %d: %s", number, {**line, "train/global_batch_size": num_samples, "train/step": number})
        norm = metrics["grad_norm"]
        if not math.isfinite(norm):
            what = "the gradient norm is invalid"
            raise CheckFailed(Problem(f"step {number}", what, got=norm, expected="a finite number"))


def make_perf_metrics(elapsed_s: Mapping[str, float], num_tokens: int) -> dict[str, float]:
    """Make the log line ``perf N``; the time of a step is the sum of its phases, without the time to make batches."""
    step_time_s = math.fsum(elapsed_s.values())
    metrics = {f"perf/{name}_time": value for name, value in elapsed_s.items()}
    metrics["perf/train_time"] = step_time_s
    metrics["perf/actor_train_tok_per_s"] = num_tokens / elapsed_s[TRAIN]
    metrics["perf/step_time"] = step_time_s
    return metrics


if __name__ == "__main__":
    sys.exit(main())
