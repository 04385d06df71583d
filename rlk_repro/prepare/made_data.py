"""Make data from a seed: addition tasks, and rollouts of random tokens for a model with random weights.

Such a model very seldom ends an answer, so every sample of its rollouts has the longest prompt and
the longest response of the run.  With ``growth``, only samples of the last rollout do: each rollout's
samples are shorter than those of the next rollout.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rlk_repro.base import proc
from rlk_repro.base.errors import EnvironmentMissing, Problem
from rlk_repro.base.files import write_bytes
from rlk_repro.division import find_response_len
from rlk_repro.spec import ArithmeticData, Run, VimeWorkload

RECIPE: Final = 1
"""Increase this version when the same settings no longer give the same prompts or rollouts."""
BYTES_PER_PROMPT: Final = 100
MODULE: Final = "rlk_repro.refengine.random_rollouts"
# The number of rollouts and these lengths follow from the list of response lengths that the module gets.
_OF_LENGTHS: Final = frozenset({"num_files", "response_len", "growth"})
_TIME_LIMIT_S: Final = 3600.0
_WORTH_PROCESSES: Final = 64 << 20
_BYTES_PER_TOKEN: Final = 5
_BYTES_PER_EXPERT: Final = 4


@dataclass(frozen=True, kw_only=True)
class RandomRollouts:
    """One set of random rollouts; without routing replay (R3) the numbers of layers and experts are 0."""

    seed: int
    num_files: int
    num_samples: int
    prompt_len: int
    response_len: int
    vocab_size: int
    num_layers: int = 0
    num_experts: int = 0
    num_experts_per_token: int = 0
    growth: int = 0

    @classmethod
    def of(cls, run: Run, workload: VimeWorkload) -> RandomRollouts | None:
        if workload.rollouts_seed is None:
            return None
        grpo, size = workload.grpo, workload.model.size
        flags = {"num_layers": "num-layers", "num_experts": "num-experts", "num_experts_per_token": "moe-router-topk"}
        return cls(
            seed=workload.rollouts_seed,
            num_files=run.measure.num_stored,
            num_samples=grpo.num_samples,
            prompt_len=grpo.rollout_max_prompt_len,
            response_len=grpo.rollout_max_response_len,
            vocab_size=size("vocab-size"),
            growth=workload.rollouts_growth or 0,
            **({name: size(flag) for name, flag in flags.items()} if grpo.use_rollout_routing_replay else {}),
        )

    @property
    def recipe(self) -> dict[str, Any]:
        recipe = {"recipe": RECIPE, **asdict(self)}
        if not self.growth:
            del recipe["growth"]  # this key came later, and sets of samples of one length keep their names
        return recipe

    @property
    def num_bytes(self) -> int:
        lengths = (self.prompt_len + self.find_response_len(rollout) for rollout in range(self.num_files))
        num_tokens = self.num_samples * sum(lengths)
        return num_tokens * (_BYTES_PER_TOKEN + _BYTES_PER_EXPERT * self.num_layers * self.num_experts_per_token)

    def find_response_len(self, rollout: int) -> int:
        return find_response_len(self.response_len, self.growth, self.num_files, rollout)

    def write(self, folder: Path) -> None:
        """Write the rollouts in torch's format; raise EnvironmentMissing if torch is not installed."""
        sizes = {name: value for name, value in asdict(self).items() if name not in _OF_LENGTHS}
        words = [word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        lengths = [str(self.find_response_len(rollout)) for rollout in range(self.num_files)]
        if self.num_bytes > _WORTH_PROCESSES:
            words += ["--processes", str(min(len(os.sched_getaffinity(0)), self.num_files))]
        command = [sys.executable, "-m", MODULE, str(folder), *words, "--response-lens", *lengths]
        done = proc.run(command, timeout_s=_TIME_LIMIT_S)
        if not done.is_ok:
            raise EnvironmentMissing(
                Problem("random rollouts", f"could not be written ({done.last_words})", expected="a Python with torch",
                        hint="run the same command where torch is installed, as in the stack's image")
            )  # fmt: skip


def prompts_recipe(source: ArithmeticData) -> dict[str, Any]:
    return {"recipe": RECIPE, **source.model_dump()}


def write_prompts(source: ArithmeticData, path: Path) -> None:
    """Write JSON lines with ``prompt`` and ``label``; equal settings give equal bytes."""
    write_bytes(path, "".join(f"{line}\n" for line in _list_lines(source)).encode())


def _list_lines(source: ArithmeticData) -> Iterator[str]:
    for number in range(source.num_prompts):
        first, second = (_draw(source, number, which) for which in range(2))
        prompt = f"What is {first} + {second}? Answer with the number alone."
        yield json.dumps({"prompt": prompt, "label": str(first + second)})


def _draw(source: ArithmeticData, number: int, which: int) -> int:
    # 64 random bits for each number make the modulo's bias negligible.
    digest = hashlib.sha256(f"{source.seed}/{number}/{which}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % (source.max_operand + 1)
