"""Define a decoder-only transformer like Qwen3: RMSNorm, RoPE, grouped-query attention with QK-norm, SwiGLU.

The model works on packed rows [N] of many samples; the caller passes the function that computes attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from rlk_repro.spec.workloads import ReferenceModel

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of layer, q [N, heads, D], and k and v [N, groups, D], which returns [N, heads, D]."""
INIT_STD: Final = 0.1
"""Standard deviation of the random weights."""


def find_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


class RMSNorm(nn.Module):
    """Return x / rms(x) * weight over the last dimension, computed in float32 or wider and returned in x's dtype."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = widen(x)
        return F.rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), self.epsilon).to(x.dtype)


class Linear(nn.Module):
    """Return x @ weight.T in x's dtype, whatever the weight's dtype."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_out, size_in))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    def __init__(self, config: ReferenceModel, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_size = config.kv_channels
        self.num_heads, self.num_groups = config.num_attention_heads, config.num_query_groups
        self.qkv = Linear(
            config.hidden_size, (config.num_attention_heads + 2 * config.num_query_groups) * config.kv_channels
        )
        self.q_norm = RMSNorm(config.kv_channels, config.norm_epsilon)
        self.k_norm = RMSNorm(config.kv_channels, config.norm_epsilon)
        self.out = Linear(config.num_attention_heads * config.kv_channels, config.hidden_size)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor, attend: Attend) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_size))
        q, k, v = heads.split([self.num_heads, self.num_groups, self.num_groups], dim=1)
        mixed = attend(self.layer, rotate(self.q_norm(q), rotation), rotate(self.k_norm(k), rotation), v)
        y: torch.Tensor = self.out(mixed.flatten(-2))
        return y


class FeedForward(nn.Module):
    def __init__(self, config: ReferenceModel) -> None:
        super().__init__()
        self.gate_up = Linear(config.hidden_size, 2 * config.ffn_hidden_size)
        self.down = Linear(config.ffn_hidden_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        y: torch.Tensor = self.down(F.silu(gate) * up)
        return y


class TransformerBlock(nn.Module):
    def __init__(self, config: ReferenceModel, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.attention = Attention(config, layer)
        self.ffn_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.ffn = FeedForward(config)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor, attend: Attend) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, attend)
        y: torch.Tensor = x + self.ffn(self.ffn_norm(x))
        return y


class Transformer(nn.Module):
    """Computes logits [N, V] from tokens [N] and positions [N]; ``attend`` computes the attention."""

    def __init__(self, config: ReferenceModel) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.blocks = nn.ModuleList(TransformerBlock(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.head = (
            Linear(config.hidden_size, config.vocab_size) if config.untie_embeddings_and_output_weights else None
        )

    @property
    def output_weight(self) -> nn.Parameter:
        return self.embedding if self.head is None else self.head.weight

    def find_hidden_states(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        x = F.embedding(tokens, self.embedding).to(find_dtype(self.config.dtype))
        rotation = make_rotation(positions, self.config.kv_channels, self.config.rotary_base)
        for block in self.blocks:
            x = block(x, rotation, attend)
        hidden: torch.Tensor = self.norm(x)
        return hidden

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        x = self.find_hidden_states(tokens, positions, attend)
        return widen(F.linear(x, self.output_weight.to(x.dtype)))


def make_model(config: ReferenceModel, seed: int, device: torch.device, init_std: float = INIT_STD) -> Transformer:
    """Build a model with the same weights on every device: normal(0, init_std), block outputs scaled by depth."""
    with torch.device("cpu"):
        model = Transformer(config)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            is_residual = name.endswith(("attention.out.weight", "ffn.down.weight"))
            depth_scale = (2 * config.num_layers) ** -0.5 if is_residual else 1.0
            nn.init.normal_(weight, std=init_std * depth_scale, generator=generator)
    return model.to(device)


def make_rotation(positions: torch.Tensor, head_size: int, base: float) -> torch.Tensor:
    """Return cosines and sines [N, 2, head_size] of the angles position * base^(-2i / head_size)."""
    exponents = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32) / head_size
    angles = positions.float().unsqueeze(-1) * base**-exponents
    angles = torch.cat([angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + D/2) of x [N, heads, D] by the angles of ``make_rotation``."""
    cos, sin = rotation[:, :1], rotation[:, 1:]
    wide = widen(x)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def widen(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


class PackedLayout:
    """Maps T packed rows to the samples and positions that they belong to; computes attention inside each sample."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.num_samples, self.longest = len(lengths), max(lengths)
        self.positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        samples = torch.arange(self.num_samples).repeat_interleave(torch.tensor(lengths)).to(device)
        self.slots = samples * self.longest + self.positions
        self.samples = samples

    def attend(self, _layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Compute causal attention inside each sample; padding on the right is hidden from every real row."""
        groups = q.size(1) // k.size(1)
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        rows = torch.cat([q, k, v], dim=1)
        padded = rows.new_zeros(self.num_samples * self.longest, *rows.shape[1:]).index_copy(0, self.slots, rows)
        padded = padded.view(self.num_samples, self.longest, 3, q.size(1), q.size(2)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(padded[0], padded[1], padded[2], is_causal=True)
        return mixed.transpose(1, 2).flatten(0, 1).index_select(0, self.slots)
