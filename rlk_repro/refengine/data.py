"""Read and prepare samples: stored rollout files, rewards per group, training batches.

File format and field names are vime's (``--save-debug-rollout-data``), so vime and this trainer can share files.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rlk_repro.base.errors import Problem, SpecError
from rlk_repro.refengine.core import LossBatch
from rlk_repro.refengine.model import PackedLayout
from rlk_repro.refengine.task import PLACEHOLDER

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt and one response; ``tokens`` holds both, and the other per-token lists cover the response only."""

    group_index: int
    index: int
    prompt: str
    response: str
    label: str
    tokens: list[int]
    response_length: int
    loss_mask: list[int]
    rollout_log_probs: list[float] | None
    reward: float
    status: str


@dataclass(frozen=True, kw_only=True)
class TrainData:
    """One rollout ready for training.  Lists hold one entry per sample; only ``tokens`` includes prompt tokens."""

    tokens: list[torch.Tensor]
    total_lengths: list[int]
    response_lengths: list[int]
    loss_masks: list[torch.Tensor]
    rollout_mask_sums: torch.Tensor
    raw_reward: list[float]
    rewards: list[float]
    truncated: list[int]
    rollout_log_probs: list[torch.Tensor] | None


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    indices: list[int]
    tokens: torch.Tensor
    layout: PackedLayout


def make_rollout_path(template: str, rollout_id: int) -> Path:
    return Path(template.replace(PLACEHOLDER, str(rollout_id)))


def save_samples(template: str, rollout_id: int, samples: Sequence[Sample]) -> None:
    path = make_rollout_path(template, rollout_id)
    logger.info("Save debug rollout data to %s", path)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": rollout_id, "samples": [asdict(sample) for sample in samples]}, path)


def check_rollout_files(template: str, num_rollout: int) -> None:
    """Raise SpecError that names every missing file."""
    paths = [make_rollout_path(template, rollout_id) for rollout_id in range(num_rollout)]
    missing = [Problem(str(path), "stored rollout is missing") for path in paths if not path.is_file()]
    if missing:
        raise SpecError(*missing)


def load_samples(template: str, rollout_id: int, *, num_samples: int, vocab_size: int) -> list[Sample]:
    """Read one stored rollout, without running code that the file may contain.

    Raises:
        SpecError: the file is unreadable, is not a rollout, or has another batch size or vocabulary than this run.
    """
    path = make_rollout_path(template, rollout_id)
    try:
        content = torch.load(path, weights_only=True)
        samples = [_parse_sample(number, fields) for number, fields in enumerate(content["samples"])]
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise SpecError(Problem(str(path), f"not a stored rollout ({reason})")) from error
    if len(samples) != num_samples:
        raise SpecError(
            Problem(str(path), "has a wrong number of samples", got=len(samples), expected=str(num_samples))
        )
    unknown = [token for sample in samples for token in sample.tokens if not 0 <= token < vocab_size]
    if unknown:
        expected = f"0 to {vocab_size - 1}, because of --vocab-size"
        raise SpecError(Problem(str(path), "has an unknown token id", got=unknown[0], expected=expected))
    return samples


def _parse_sample(number: int, fields: dict[str, Any]) -> Sample:
    length, log_probs = int(fields["response_length"]), fields.get("rollout_log_probs")
    mask = fields.get("loss_mask")
    sample = Sample(
        group_index=int(fields.get("group_index") or 0),
        index=number,
        prompt=str(fields.get("prompt", "")),
        response=str(fields.get("response", "")),
        label=str(fields.get("label", "")),
        tokens=[int(token) for token in fields["tokens"]],
        response_length=length,
        loss_mask=[1] * length if mask is None else [int(flag) for flag in mask],
        rollout_log_probs=None if log_probs is None else [float(value) for value in log_probs],
        reward=float(fields["reward"]),
        status=str(fields["status"]),
    )
    if not 0 < length < len(sample.tokens) or len(sample.loss_mask) != length:
        raise ValueError(f"sample {number}: response_length {length} does not fit its tokens and loss_mask")
    if sample.rollout_log_probs is not None and len(sample.rollout_log_probs) != length:
        raise ValueError(f"sample {number}: response_length {length} does not fit its rollout_log_probs")
    return sample


def normalise_rewards(rewards: Sequence[float], group_size: int) -> list[float]:
    """Return (r - mean) / (std + 1e-6) of each reward r; mean and unbiased std are those of the reward's group."""
    groups = torch.tensor(rewards, dtype=torch.float32).view(-1, group_size)
    centred = groups - groups.mean(dim=-1, keepdim=True)
    flat: list[float] = (centred / (groups.std(dim=-1, keepdim=True) + 1e-6)).flatten().tolist()
    return flat


def make_train_data(samples: Sequence[Sample], group_size: int, device: torch.device) -> TrainData:
    raw_reward = [sample.reward for sample in samples]
    log_probs = [sample.rollout_log_probs for sample in samples if sample.rollout_log_probs is not None]
    return TrainData(
        tokens=[torch.tensor(sample.tokens, device=device) for sample in samples],
        total_lengths=[len(sample.tokens) for sample in samples],
        response_lengths=[sample.response_length for sample in samples],
        loss_masks=[torch.tensor(sample.loss_mask, device=device) for sample in samples],
        rollout_mask_sums=torch.tensor([sum(sample.loss_mask) for sample in samples], device=device),
        raw_reward=raw_reward,
        rewards=normalise_rewards(raw_reward, group_size),
        truncated=[int(sample.status == "truncated") for sample in samples],
        rollout_log_probs=[torch.tensor(row, device=device) for row in log_probs]
        if len(log_probs) == len(samples)
        else None,
    )


def make_microbatches(data: TrainData, global_batch_size: int, micro_batch_size: int) -> list[list[Microbatch]]:
    steps = []
    for start in range(0, len(data.tokens), global_batch_size):
        step = range(start, start + global_batch_size)
        steps.append(
            [_pack(data, list(step[at : at + micro_batch_size])) for at in range(0, len(step), micro_batch_size)]
        )
    return steps


def _pack(data: TrainData, indices: list[int]) -> Microbatch:
    tokens = [data.tokens[index] for index in indices]
    layout = PackedLayout([len(sample) for sample in tokens], tokens[0].device)
    return Microbatch(indices=indices, tokens=torch.cat(tokens), layout=layout)


def make_loss_batch(
    data: TrainData,
    microbatch: Microbatch,
    *,
    log_probs: Sequence[torch.Tensor] = (),
    ref_log_probs: Sequence[torch.Tensor] = (),
    advantages: Sequence[torch.Tensor] = (),
) -> LossBatch:
    indices = microbatch.indices
    batch = LossBatch(
        unconcat_tokens=[data.tokens[i] for i in indices],
        total_lengths=[data.total_lengths[i] for i in indices],
        response_lengths=[data.response_lengths[i] for i in indices],
        loss_masks=[data.loss_masks[i] for i in indices],
        rollout_mask_sums=data.rollout_mask_sums[indices],
        log_probs=[log_probs[i] for i in indices] if log_probs else [],
        ref_log_probs=[ref_log_probs[i] for i in indices] if ref_log_probs else [],
        advantages=[advantages[i] for i in indices] if advantages else [],
    )
    if data.rollout_log_probs is not None:
        batch["rollout_log_probs"] = [data.rollout_log_probs[i] for i in indices]
    return batch
