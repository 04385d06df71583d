"""Write the record by which engines are compared: inputs, weights, log-probs and layer outputs for the same tokens.

An engine is one implementation of the model: the rollout's, the training's, or a reference.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import torch

from rlk_repro.base.resources import data_dir
from rlk_repro.integration.measure.ledger import OpsWriter
from rlk_repro.rundir.agreement import ALONE, AS_RUN

SCHEMA: Final = 1
MAX_STEPS: Final = 4
MAX_SAMPLES: Final = 32
MAX_CHOSEN: Final = 16
MAX_CHOSEN_PER_SAMPLE: Final = 4
LAYER_CASES: Final = frozenset({AS_RUN, ALONE})
HASHED_BYTES: Final = 64 << 20
NUM_WHOLE: Final = 64
DIALECTS: Final = (
    ("blocks", "attention", "ffn", "norm"),
    ("decoder.layers", "self_attention", "mlp", "decoder.final_layernorm"),
    ("model.layers", "self_attn", "mlp", "model.norm"),
)
"""Names of modules in the reference trainer, in Megatron-LM, and in transformers and vLLM.

Each entry names the list of layers, a layer's attention, a layer's MLP or experts, and the final norm.
"""

Sample = Mapping[str, Any]
Chosen = Sequence[tuple[int, int]]
"""Tokens whose layers are recorded: the sample's index, and the sample's row whose logits predict the token."""


class EngineRecord:
    """Writes the record of one rank; its first line holds the contract by which engines are compared."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._writer = OpsWriter(folder, rank)
        contract = data_dir("manifests") / "contracts" / "agreement.yaml"
        self._writer.write("begin", schema=SCHEMA, contract=contract.read_text())

    def write_inputs(
        self, step: int, engine: str, samples: Sequence[Sample], special: Mapping[str, int] | None = None
    ) -> None:
        """Write samples: ``tokens``, ``loss_mask`` of the response, and number of ``padding`` positions before the
        tokens.
        """
        self._writer.write("inputs", step=step, engine=engine, samples=list(samples), special=dict(special or {}))

    def write_weights(self, step: int, engine: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.write_hashes(step, engine, [(name, hash_tensor(tensor)) for name, tensor in tensors])

    def write_hashes(self, step: int, engine: str, hashes: Sequence[tuple[str, str]], note: str = "") -> None:
        more = {"note": note} if note else {}
        self._writer.write("weights", step=step, engine=engine, tensors=list(hashes), **more)

    def write_log_probs(self, step: int, engine: str, case: str, dtype: str, rows: Iterable[torch.Tensor]) -> None:
        values = [list_numbers(row) for row in rows]
        self._writer.write("log_probs", step=step, engine=engine, case=case, dtype=dtype, values=values)

    def write_pass(
        self, step: int, engine: str, case: str, dtype: str, rows: Iterable[torch.Tensor], capture: LayerCapture
    ) -> None:
        self.write_log_probs(step, engine, case, dtype, rows)
        if fault := capture.find_fault():
            self.skip(step, "layers", engine, case, fault)
        else:
            self.write_points(step, engine, case, dtype, describe_points(capture.found))

    def write_points(self, step: int, engine: str, case: str, dtype: str, points: Mapping[str, Any]) -> None:
        for point, numbers in points.items():
            self._writer.write("layer", step=step, engine=engine, case=case, dtype=dtype, point=point, **numbers)

    def write_routing(
        self, step: int, engine: str, case: str, dtype: str, tokens: Chosen, experts: Mapping[str, Sequence[Any]],
        *, is_replayed: bool = False,
    ) -> None:  # fmt: skip
        self._writer.write(
            "routing", step=step, engine=engine, case=case, dtype=dtype, is_replayed=is_replayed, tokens=list(tokens),
            layers=list(experts), experts=list(experts.values()),
        )  # fmt: skip

    def skip(self, step: int, what: str, engine: str, case: str, reason: str) -> None:
        self._writer.write("skipped", step=step, what=what, engine=engine, case=case, reason=reason)

    def close(self) -> None:
        self._writer.close()


def describe_points(found: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return, for each point of the model, the tokens' projected outputs, and the L2 norms before projection."""
    wide = {point: values.double() for point, values in found.items()}
    return {
        point: {"values": list(map(list_numbers, project(values))), "norms": list_numbers(values.norm(dim=-1))}
        for point, values in wide.items()
    }


def list_numbers(values: torch.Tensor) -> list[float]:
    numbers: list[float] = values.detach().double().flatten().tolist()
    return numbers


def hash_tensor(tensor: torch.Tensor) -> str:
    data = tensor.detach().to("cpu").contiguous()
    digest = hashlib.sha256(f"{data.dtype} {tuple(data.shape)} ".encode())
    for start in range(0, data.nbytes, HASHED_BYTES):
        digest.update(ctypes.string_at(data.data_ptr() + start, min(HASHED_BYTES, data.nbytes - start)))
    return digest.hexdigest()[:32]


def project(values: torch.Tensor) -> torch.Tensor:
    """Project rows onto 64 random directions, which keeps distances on average; rows of up to 64 values stay as is."""
    width = values.shape[-1]
    if width <= NUM_WHOLE:
        return values
    generator = torch.Generator().manual_seed(width)
    matrix = torch.randn(width, NUM_WHOLE, generator=generator, dtype=torch.float64) / NUM_WHOLE**0.5
    projected: torch.Tensor = values.cpu() @ matrix
    return projected


def choose_tokens(samples: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Choose the first response tokens of the first samples; ``samples`` lists pairs: length, response length."""
    chosen = [
        (number, length - response - 1 + place)
        for number, (length, response) in enumerate(samples)
        for place in range(min(response, MAX_CHOSEN_PER_SAMPLE))
    ]
    return chosen[:MAX_CHOSEN]


class CallRows:
    """The rows of chosen tokens in each call of a model.

    For each call of the model, ``calls`` lists pairs: a chosen token's index, and the token's row in that call.
    ``lengths`` lists the number of rows of each call; it is empty if these numbers are unknown.
    """

    def __init__(self, calls: Sequence[Sequence[tuple[int, int]]], lengths: Sequence[int] = ()) -> None:
        self.rows = [[row for _, row in call] for call in calls]
        self.lengths = lengths
        numbers = [number for call in calls for number, _ in call]
        self.order = sorted(range(len(numbers)), key=numbers.__getitem__)

    def pick(self, call: int, values: torch.Tensor) -> torch.Tensor:
        return values[torch.tensor(self.rows[call], dtype=torch.long, device=values.device)]

    def find_fault(self, call: int, num_rows: int, what: str) -> str:
        """Return a message if a call has an unexpected number of rows: the chosen rows may then belong to other tokens,
        and on a GPU an index out of range would end the process.
        """
        expected = self.lengths[call] if self.lengths else max(num_rows, *(row + 1 for row in self.rows[call]), 0)
        return "" if num_rows == expected else f"call {call} of {what} has {num_rows} rows, expected {expected}"


class LayerCapture:
    """Keeps the outputs of a model's layers for chosen tokens, which `CallRows` locates."""

    def __init__(self, calls: Sequence[Sequence[tuple[int, int]]], lengths: Sequence[int] = ()) -> None:
        self._rows, self._fault = CallRows(calls, lengths), ""
        self._call = -1
        self._kept: dict[str, list[torch.Tensor]] = {}

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Capture layer outputs in the ``with`` block; capture none if no tokens are chosen or layers are unknown."""
        with ExitStack() as stack:
            for number, (point, module) in enumerate(list_points(model) if self._rows.order else ()):
                if not number:
                    stack.callback(module.register_forward_pre_hook(self._count).remove)
                is_sum = point.endswith("residual")
                stack.callback(module.register_forward_hook(partial(self._keep, point, is_sum=is_sum)).remove)
            yield

    @property
    def found(self) -> dict[str, torch.Tensor]:
        """The kept outputs [chosen tokens, width] at each point, such as ``layer 0 mlp``, in order of computation."""
        return {point: torch.cat(parts)[self._rows.order] for point, parts in self._kept.items()}

    def find_fault(self) -> str:
        num_calls, num_samples = self._call + 1, len(self._rows.lengths)
        if not self._fault and num_samples and num_calls != num_samples:
            return f"the model was called {num_calls} times, not once for each of {num_samples} samples"
        return self._fault

    def _count(self, _module: Any, _arguments: Any) -> None:
        self._call += 1

    def _keep(self, point: str, _module: Any, _arguments: Any, output: Any, *, is_sum: bool) -> None:
        if self._fault or not 0 <= self._call < len(self._rows.rows):
            return
        parts = output if isinstance(output, tuple) else (output,)
        # a layer of vLLM returns two tensors whose sum is the residual stream
        is_sum = is_sum and len(parts) == 2 and getattr(parts[1], "shape", None) == parts[0].shape
        value = parts[0] + parts[1] if is_sum else parts[0]
        rows = value.detach().reshape(-1, value.shape[-1])
        self._fault = self._rows.find_fault(self._call, len(rows), "the model")
        if not self._fault:
            self._kept.setdefault(point, []).append(self._rows.pick(self._call, rows).double().cpu())


def list_points(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield points, such as ``layer 0 mlp``, with their modules, in call order; the last point is the model itself."""
    for layers, attention, mlp, norm in DIALECTS:
        found = _find(model, layers)
        if found is None:
            continue
        for number, layer in enumerate(found):
            yield f"layer {number} attention", getattr(layer, attention)
            yield f"layer {number} mlp", getattr(layer, mlp)
            yield f"layer {number} residual", layer
        if (final := _find(model, norm)) is not None:
            yield "final norm", final
        yield "logits", model
        return


def _find(owner: Any, path: str) -> Any:
    try:
        return attrgetter(path)(owner)
    except AttributeError:
        return None


def capture_layers(case: str, chosen: Chosen, calls: Sequence[Sequence[int]], lengths: Sequence[int]) -> LayerCapture:
    return LayerCapture(locate_tokens(chosen if case in LAYER_CASES else (), calls, lengths))


def locate_tokens(
    chosen: Chosen, calls: Sequence[Sequence[int]], lengths: Sequence[int]
) -> list[list[tuple[int, int]]]:
    """Return, for each call of a model, its chosen tokens as pairs: index in ``chosen``, and row in the call."""
    found: list[list[tuple[int, int]]] = []
    for samples in calls:
        starts, start = {}, 0
        for sample in samples:
            starts[sample] = start
            start += lengths[sample]
        found.append([(n, starts[sample] + row) for n, (sample, row) in enumerate(chosen) if sample in starts])
    return found
