"""Run the GRPO loop: sync weights, generate, compute reference and old log-probs, optimise, print vime's log lines."""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem, SpecError
from rlk_repro.refengine import core, metrics, task
from rlk_repro.refengine.data import (
    Microbatch,
    Sample,
    TrainData,
    check_rollout_files,
    load_samples,
    make_loss_batch,
    make_microbatches,
    make_train_data,
    save_samples,
)
from rlk_repro.refengine.model import Transformer, make_model
from rlk_repro.refengine.optimizer import NUM_GROUPS, AdamW
from rlk_repro.refengine.rollout import RolloutEngine, make_samples
from rlk_repro.schedule import LETTERS
from rlk_repro.switches import DEMO_WAIT, SCHEDULED, SWITCH_SCHEDULE

logger = logging.getLogger(__name__)

step_end_hooks: list[Callable[[int], None]] = []
"""Functions called with a rollout's number after the rollout is trained and logged, before the weight sync."""


def run(args: argparse.Namespace) -> None:
    """Run the trainer with the flags that ``parse_args`` returned.

    Raises:
        SpecError: a stored rollout is missing or does not fit the flags; raised before the first step where possible.
        EnvironmentMissing: the requested device does not exist.
        CheckFailed: the gradient norm is not a finite number.
    """
    if args.load_debug_rollout_data is not None:
        check_rollout_files(args.load_debug_rollout_data, args.num_rollout)
    device = make_device(args)
    if args.custom_megatron_init_path is not None:
        load_function(args.custom_megatron_init_path)(args)
    trainer = Trainer(args, device)
    # A full garbage collection visits the 170 000 objects that importing torch creates: 80 to 100
    # ms on a CPU, where a pass of the smoke run takes 20 ms, and always in the same scored step.
    gc.collect()
    gc.freeze()
    trainer.timer.start("train_wait")
    trainer.update_weights()
    for rollout_id in range(args.num_rollout):
        samples = trainer.roll_out(rollout_id)
        trainer.train(rollout_id, samples)
        for hook in step_end_hooks:
            hook(rollout_id)
        trainer.update_weights()


def make_device(args: argparse.Namespace) -> torch.device:
    """Choose the device and configure torch for it; on a CPU equal flags give bitwise equal results."""
    has_gpu = torch.cuda.is_available()
    if args.device == "cuda" and not has_gpu:
        raise EnvironmentMissing(Problem("--device", "torch sees no GPU", got="cuda", hint="use --device cpu"))
    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)
    if args.device == "cpu" or not has_gpu:
        torch.set_deterministic_debug_mode("error")
        return torch.device("cpu")
    return torch.device("cuda")


def load_function(path: str) -> Callable[[argparse.Namespace], object]:
    """Import ``package.module.function``; an error inside the module is raised unchanged."""
    module_name, _, name = path.rpartition(".")
    found: Any = None
    try:
        if module_name:
            found = getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise
    if not callable(found):
        raise SpecError(
            Problem("--custom-megatron-init-path", "no such function", got=path, expected="MODULE.FUNCTION")
        )
    function: Callable[[argparse.Namespace], object] = found
    return function


class Timer:
    """Measures named wall-clock phases, logged and summed as vime's timer does.

    Unlike in vime, a phase includes all its GPU work: the device is synchronised at both ends.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._started: dict[str, float] = {}
        self._elapsed_s: dict[str, float] = {}

    def start(self, name: str) -> None:
        assert name not in self._started, f"timer {name} is already running"
        self._synchronize()
        self._started[name] = time.perf_counter()
        logger.info("Timer %s start", name)

    def end(self, name: str) -> None:
        self._synchronize()
        elapsed_s = time.perf_counter() - self._started.pop(name)
        self._elapsed_s[name] = self._elapsed_s.get(name, 0.0) + elapsed_s
        logger.info("Timer %s end (elapsed: %.1fs)", name, elapsed_s)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.start(name)
        try:
            yield
        finally:
            self.end(name)

    def pop_elapsed(self) -> dict[str, float]:
        elapsed_s, self._elapsed_s = self._elapsed_s, {}
        return elapsed_s


class Trainer:
    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        config = args.model
        self.args, self.device = args, device
        self.model = make_model(config, args.seed, device)
        self.reference = make_model(config, args.seed, device).requires_grad_(requires_grad=False)
        self.engine = RolloutEngine(config, device)
        self.optimizer = AdamW(
            self.model,
            lr=args.lr,
            betas=(args.adam_beta1, args.adam_beta2),
            weight_decay=args.weight_decay,
            clip_grad=args.clip_grad,
        )
        waits = os.environ.get(DEMO_WAIT, "0")
        self._schedule = os.environ.get(SWITCH_SCHEDULE, "") if waits == SCHEDULED else ""
        self._waits_always = waits == "1"
        self.timer = Timer(torch.cuda.synchronize if device.type == "cuda" else lambda: None)

    def update_weights(self) -> None:
        """Copy the policy's weights to the generator and log the time; with stored rollouts, log but copy nothing."""
        with self.timer.phase("update_weights"):
            if not self.args.debug_train_only:
                self.engine.load_weights(self.model)

    def roll_out(self, rollout_id: int) -> list[Sample]:
        args = self.args
        if args.load_debug_rollout_data is not None:
            count = args.rollout_batch_size * args.n_samples_per_prompt
            template = args.load_debug_rollout_data
            return load_samples(template, rollout_id, num_samples=count, vocab_size=args.vocab_size)
        start_s = time.perf_counter()
        samples = self._generate(rollout_id)
        if args.save_debug_rollout_data is not None:
            save_samples(args.save_debug_rollout_data, rollout_id, samples)
        elapsed_s = time.perf_counter() - start_s
        logger.info("perf %d: %s", rollout_id, metrics.make_generation_metrics(samples, elapsed_s))
        return samples

    def _generate(self, rollout_id: int) -> list[Sample]:
        args = self.args
        questions = task.make_questions(args.seed, rollout_id, args.rollout_batch_size, args.max_operand)
        size = args.n_samples_per_prompt
        prompts = [task.encode(prompt) for prompt, _ in questions for _ in range(size)]
        responses = self.engine.generate(
            prompts,
            max_tokens=args.rollout_max_response_len,
            temperature=args.rollout_temperature,
            seed=args.seed * 1_000_003 + rollout_id,
        )
        return make_samples(questions, responses)

    def train(self, rollout_id: int, samples: Sequence[Sample]) -> None:
        args, timer, start_s = self.args, self.timer, time.perf_counter()
        with timer.phase("data_preprocess"):
            data = make_train_data(samples, args.n_samples_per_prompt, self.device)
            steps = make_microbatches(data, args.global_batch_size, args.micro_batch_size)
        timer.end("train_wait")
        with timer.phase("train"):
            with timer.phase("ref_log_probs"):
                ref_log_probs = self.compute_log_probs(self.reference, data, steps)
            with timer.phase("log_probs"):
                log_probs = self.compute_log_probs(self.model, data, steps)
            advantages = [torch.full_like(row, reward) for row, reward in zip(log_probs, data.rewards, strict=True)]
            known = {"log_probs": log_probs, "ref_log_probs": ref_log_probs, "advantages": advantages}
            logger.info("rollout %d: %s", rollout_id, metrics.make_rollout_metrics(data, **known))
            with timer.phase("actor_train"):
                for number, step in enumerate(steps, start=rollout_id * len(steps)):
                    self._train_step(number, data, step, known)
            if self._waits_always or LETTERS.get(self._schedule[rollout_id : rollout_id + 1]) == "baseline":
                time.sleep(time.perf_counter() - start_s)
        timer.start("train_wait")
        num_tokens = sum(data.total_lengths)
        logger.info("perf %d: %s", rollout_id, metrics.make_trainer_metrics(timer.pop_elapsed(), num_tokens))

    @torch.no_grad()
    def compute_log_probs(
        self, model: Transformer, data: TrainData, steps: Sequence[Sequence[Microbatch]]
    ) -> list[torch.Tensor]:
        """Return every sample's response log-probs by teacher forcing, in sample order."""
        log_probs: list[torch.Tensor] = []
        for microbatch in itertools.chain.from_iterable(steps):
            logits = forward(model, microbatch)
            log_probs += core.find_response_log_probs(self.args, make_loss_batch(data, microbatch), logits)[0]
        return log_probs

    def _train_step(
        self, number: int, data: TrainData, step: Sequence[Microbatch], known: dict[str, list[torch.Tensor]]
    ) -> None:
        args = self.args
        divisor = args.global_batch_size
        if args.calculate_per_token_loss:
            divisor = core.count_loss_tokens([data.loss_masks[i] for microbatch in step for i in microbatch.indices])
        losses: dict[str, float] = {}
        for microbatch in step:
            batch = make_loss_batch(data, microbatch, **known)
            reducer = core.make_sum_of_sample_mean(
                batch["loss_masks"],
                batch["rollout_mask_sums"],
                calculate_per_token_loss=args.calculate_per_token_loss,
            )
            loss, values = core.policy_loss_function(args, batch, forward(self.model, microbatch), reducer)
            (loss / divisor).backward()
            for name, value in values.items():
                losses[name] = losses.get(name, 0.0) + value.item() / divisor
        grad_norm = self.optimizer.step()
        lrs = [self.optimizer.lr] * NUM_GROUPS
        line = metrics.make_step_metrics(
            losses, grad_norm=grad_norm, lrs=lrs, global_batch_size=args.global_batch_size, step=number
        )
        logger.info("step %d: %s", number, line)
        if not math.isfinite(grad_norm):
            what = "the gradient norm is invalid"
            raise CheckFailed(Problem(f"step {number}", what, got=grad_norm, expected="a finite number"))


def forward(model: Transformer, microbatch: Microbatch) -> torch.Tensor:
    """Return logits [1, T, V] of all packed rows."""
    layout = microbatch.layout
    logits: torch.Tensor = model(microbatch.tokens, layout.positions, layout.attend)
    return logits.unsqueeze(0)
