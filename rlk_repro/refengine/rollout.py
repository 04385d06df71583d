"""Generate responses and their log-probs with a copy of the model, token by token with a key/value cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch.nn import functional as F  # noqa: N812

from rlk_repro.refengine import task
from rlk_repro.refengine.data import Sample
from rlk_repro.refengine.model import PackedLayout, Transformer, find_dtype
from rlk_repro.spec.workloads import ReferenceModel

Response: TypeAlias = tuple[list[int], list[float]]
"""Sampled tokens, an end token included if one was drawn, and their log-probs as sampled."""


class KeyValueCache:
    """Keys and values [layer, sample, position, group, D]; the first ``lengths[b]`` positions of sample b are used."""

    def __init__(self, config: ReferenceModel, prompts: PackedLayout, lengths: torch.Tensor, capacity: int) -> None:
        shape = (2, config.num_layers, len(lengths), capacity, config.num_query_groups, config.kv_channels)
        self._keys, self._values = torch.zeros(shape, dtype=find_dtype(config.dtype), device=lengths.device)
        self._prompts, self._lengths = prompts, lengths
        self._samples = torch.arange(len(lengths), device=lengths.device)
        self._positions = torch.arange(capacity, device=lengths.device)
        self._width = prompts.longest
        self._mask = torch.empty(0)

    def attend_prompts(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = (self._prompts.samples, self._prompts.positions)
        self._keys[layer][rows], self._values[layer][rows] = k, v
        return self._prompts.attend(layer, q, k, v)

    def extend(self) -> torch.Tensor:
        positions = self._lengths
        self._lengths, self._width = positions + 1, self._width + 1
        self._mask = (self._positions[: self._width] < self._lengths.unsqueeze(-1))[:, None, None]
        return positions

    def attend_last(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = (self._samples, self._lengths - 1)
        self._keys[layer][rows], self._values[layer][rows] = k, v
        keys, values = (kept[layer][:, : self._width].transpose(1, 2) for kept in (self._keys, self._values))
        grouped = q.view(len(q), k.size(1), -1, k.size(2))
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask).flatten(1, 2)


class RolloutEngine:
    """Generates responses with its own copy of the policy's weights, in the dtype of the model's activations."""

    def __init__(self, config: ReferenceModel, device: torch.device) -> None:
        self.model = (
            Transformer(config).to(device=device, dtype=find_dtype(config.dtype)).requires_grad_(requires_grad=False)
        )
        self.device = device

    @torch.no_grad()
    def load_weights(self, source: Transformer) -> None:
        for own, new in zip(self.model.parameters(), source.parameters(), strict=True):
            own.copy_(new)

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, temperature: float, seed: int
    ) -> list[Response]:
        generator = torch.Generator(self.device).manual_seed(seed)
        layout = PackedLayout([len(prompt) for prompt in prompts], self.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        cache = KeyValueCache(self.model.config, layout, lengths, layout.longest + max_tokens)
        packed = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
        logits = self.model(packed, layout.positions, cache.attend_prompts)[lengths.cumsum(0) - 1]
        tokens, log_probs = [], []
        has_ended = torch.zeros(len(prompts), dtype=torch.bool, device=self.device)
        while True:
            token, log_prob = _draw(logits, temperature, generator)
            tokens.append(token)
            log_probs.append(log_prob)
            has_ended |= token == task.END_ID
            if len(tokens) == max_tokens or bool(has_ended.all()):
                break
            logits = self.model(token, cache.extend(), cache.attend_last)
        return _cut(torch.stack(tokens, dim=1).tolist(), torch.stack(log_probs, dim=1).tolist())


def _draw(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = (logits / temperature).log_softmax(dim=-1)
    tokens = torch.multinomial(log_probs.exp(), 1, generator=generator)
    return tokens.squeeze(-1), log_probs.gather(-1, tokens).squeeze(-1)


def _cut(tokens: list[list[int]], log_probs: list[list[float]]) -> list[Response]:
    responses = []
    for row, values in zip(tokens, log_probs, strict=True):
        length = len(row)
        if task.END_ID in row:
            length = row.index(task.END_ID) + 1
        responses.append((row[:length], values[:length]))
    return responses


def make_samples(
    questions: Sequence[tuple[str, str]],
    responses: Sequence[Response],
) -> list[Sample]:
    """Make samples with rewards; the responses to one question follow each other, equally many for each question."""
    group_size = len(responses) // len(questions)
    samples = []
    for index, (tokens, log_probs) in enumerate(responses):
        prompt, answer = questions[index // group_size]
        text = task.decode(tokens)
        sample = Sample(
            group_index=index // group_size,
            index=index,
            prompt=prompt,
            response=text,
            label=answer,
            tokens=task.encode(prompt) + tokens,
            response_length=len(tokens),
            loss_mask=[1] * len(tokens),
            rollout_log_probs=log_probs,
            reward=task.score(text, answer),
            status="completed" if tokens[-1] == task.END_ID else "truncated",
        )
        samples.append(sample)
    return samples
