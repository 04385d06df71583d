"""Define the cases of the operator tier: their tensors, and the least time that any implementation could take."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch

from rlk_repro.bench.measure import Rates
from rlk_repro.refengine.model import find_dtype
from rlk_repro.rundir.operator_results import OperatorCase
from rlk_repro.spec.workloads import Grid

FORWARD_BACKWARD: Final = "forward_backward"
POLICY_OPERATORS: Final = ("ratio_kl", "grpo_loss")
MAX_SAMPLES: Final = 8
CLIP: Final = 0.2
CLIP_HIGH: Final = 0.28
LOGIT_SPREAD: Final = 4.5
"""Standard deviation of the logits.  With 152,000 columns, the entropy is 1.8 nats (ln V - spread² / 2), a
usual value for a policy. Some kernels skip negligible probabilities, and flat logits would leave nothing to skip."""
_ROWS_PER_CHUNK: Final = 256


def expand_grids(grids: Iterable[Grid]) -> tuple[OperatorCase, ...]:
    """Return one case for every combination of each grid's values, in the order of the grids and without repetition."""
    return tuple(dict.fromkeys(case for grid in grids for case in _expand_grid(grid)))


def _expand_grid(grid: Grid) -> Iterator[OperatorCase]:
    sizes: tuple[int | None, ...] = grid.hidden_size or (None,)
    axes = itertools.product(grid.vocab_size, grid.num_tokens, sizes, grid.dtypes, grid.densities, grid.passes)
    for vocab_size, num_tokens, hidden_size, dtype, density, work in axes:
        yield OperatorCase(
            operator=grid.operator,
            num_tokens=num_tokens,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            dtype=dtype,
            density=density,
            work=work,
        )


def needs_grad(case: OperatorCase) -> bool:
    """Whether a case needs gradients: its work includes a backward pass, or its operator is a policy loss."""
    return case.work == FORWARD_BACKWARD or case.operator in POLICY_OPERATORS


def clip_high(case: OperatorCase) -> float:
    """Return the upper clip; it equals the lower clip for ``grpo_loss``, because RL-Kernel clips symmetrically."""
    return CLIP if case.operator == "grpo_loss" else CLIP_HIGH


@dataclass(frozen=True, eq=False)
class CaseTensors:
    """The tensors of one case: N rows, V columns, hidden size D, B samples of T = N / B rows each.

    Cases of ``linear_logp`` have ``hidden`` [N, D] and ``weight`` [V, D]; all other cases have ``logits`` [N, V].
    ``mask`` [N] is true in the wanted rows: the last rows of every sample, because a response follows its prompt.
    """

    case: OperatorCase
    tokens: torch.Tensor
    mask: torch.Tensor
    sample_advantages: torch.Tensor
    noise: torch.Tensor
    logits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    weight: torch.Tensor | None = None

    @cached_property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """Views of the case's logits, or of its hidden states and weight.

        The views require gradients only if the case needs gradients, because some kernels overwrite an input that
        requires a gradient.
        """
        given = [tensor for tensor in (self.logits, self.hidden, self.weight) if tensor is not None]
        return tuple(tensor.detach().requires_grad_(needs_grad(self.case)) for tensor in given)

    def derive(self) -> None:
        """Compute the derived tensors now, so that no timed call computes them."""
        tensors = [*self.leaves, self.rows, self.weights, self.advantages]
        if self.case.operator in POLICY_OPERATORS:
            tensors.append(self.old_log_probs)
        assert all(tensor.device == self.tokens.device for tensor in tensors)

    @property
    def num_samples(self) -> int:
        return len(self.sample_advantages)

    @cached_property
    def rows(self) -> torch.Tensor:
        """The indices of the wanted rows, where ``mask`` is true: int64, ascending."""
        return self.mask.nonzero().squeeze(1)

    @cached_property
    def weights(self) -> torch.Tensor:
        """The weight of each row in the loss, [N] float32; the loss is the mean over the wanted rows."""
        return self.mask.float() / self.mask.sum()

    @cached_property
    def advantages(self) -> torch.Tensor:
        """The sample's advantage on each of its rows, [N] float32."""
        return self.sample_advantages.repeat_interleave(self.case.num_tokens // self.num_samples)

    @cached_property
    def old_log_probs(self) -> torch.Tensor:
        """The current log-probs plus small random changes, [N] float32, so that a few ratios are clipped."""
        assert self.logits is not None, "the inputs of a policy operator include logits"
        chunks = zip(torch.split(self.logits, _ROWS_PER_CHUNK), torch.split(self.tokens, _ROWS_PER_CHUNK), strict=True)
        current = [logits.float().log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1) for logits, ids in chunks]
        return torch.cat(current) + 0.15 * self.noise


def make_inputs(case: OperatorCase, device: torch.device, seed: int) -> CaseTensors:
    """Make the case's random tensors from the seed, equal for every implementation, sweep and process."""
    source = torch.Generator(device).manual_seed(seed)
    num_samples, length, num_wanted = _split_rows(case)
    is_wanted = torch.arange(length, device=device) >= length - num_wanted
    dtype, num_tokens, vocab_size = find_dtype(case.dtype), case.num_tokens, case.vocab_size
    logits = hidden = weight = None
    if case.hidden_size is None:
        logits = torch.randn(num_tokens, vocab_size, device=device, dtype=dtype, generator=source).mul_(LOGIT_SPREAD)
    else:
        hidden = torch.randn(num_tokens, case.hidden_size, device=device, dtype=dtype, generator=source)
        weight = torch.randn(vocab_size, case.hidden_size, device=device, dtype=dtype, generator=source)
        weight.mul_(LOGIT_SPREAD / math.sqrt(case.hidden_size))
    inputs = CaseTensors(
        case=case,
        tokens=_sample_tokens(logits, hidden, weight, source),
        mask=is_wanted.repeat(num_samples),
        sample_advantages=torch.randn(num_samples, device=device, generator=source),
        noise=torch.randn(num_tokens, device=device, generator=source),
        logits=logits,
        hidden=hidden,
        weight=weight,
    )
    inputs.derive()
    return inputs


def _sample_tokens(
    logits: torch.Tensor | None, hidden: torch.Tensor | None, weight: torch.Tensor | None, source: torch.Generator
) -> torch.Tensor:
    """Draw each row's token [N] int64 from the row's own distribution, as a rollout draws it."""
    rows = hidden if logits is None else logits
    assert rows is not None
    chunks = (part if weight is None else part @ weight.t() for part in torch.split(rows, _ROWS_PER_CHUNK))
    drawn = [chunk.float().softmax(-1).multinomial(1, generator=source) for chunk in chunks]
    return torch.cat(drawn).squeeze(1)


def _split_rows(case: OperatorCase) -> tuple[int, int, int]:
    """Return the numbers of samples, of rows per sample, and of wanted rows per sample."""
    num_samples = math.gcd(case.num_tokens, MAX_SAMPLES)
    length = case.num_tokens // num_samples
    return num_samples, length, max(1, round(case.density * length))


def estimate_bytes(case: OperatorCase) -> int:
    """Return the bytes of memory that a straightforward implementation needs.

    The bytes are the sum of: the inputs; the fp32 logits, if the inputs are hidden states and weight; and for each pass
    (forward, backward) one fp32 tensor as large as the logits.
    """
    size = find_dtype(case.dtype).itemsize
    logits = 4 * case.num_tokens * case.vocab_size
    given = case.num_tokens * case.vocab_size * size
    if case.hidden_size is not None:
        given = (case.num_tokens + case.vocab_size) * case.hidden_size * size + logits
    return given + logits * (2 if case.work == FORWARD_BACKWARD else 1)


def find_floor_s(case: OperatorCase, rates: Rates) -> float:
    """Return the least time of the case on this device: its memory traffic or its arithmetic, whichever takes longer.

    Logits: the wanted rows are read once, and for the gradient once more; the gradient is written for all rows.  Hidden
    states and weight are read and written as often as logits; the arithmetic is 2 N D V operations forward and 4 N D V
    backward, where N is the number of wanted rows.
    """
    size, width = find_dtype(case.dtype).itemsize, case.hidden_size
    num_samples, _, num_wanted_each = _split_rows(case)
    num_wanted = num_samples * num_wanted_each
    if width is None:
        read, written, num_flops = num_wanted * case.vocab_size * size, case.num_tokens * case.vocab_size * size, 0
    else:
        read = (num_wanted + case.vocab_size) * width * size
        written = (case.num_tokens + case.vocab_size) * width * size
        num_flops = 2 * num_wanted * width * case.vocab_size
    if case.work == FORWARD_BACKWARD:
        num_bytes, num_flops = 2 * read + written, 3 * num_flops
    else:
        num_bytes = read
    arithmetic_s = num_flops / rates.flops_per_s[case.dtype] if num_flops else 0.0
    return max(num_bytes / rates.bytes_per_s, arithmetic_s)
