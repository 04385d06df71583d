"""Run by test_agreement with vime, Megatron-LM and RL-Kernel on the path: Megatron's GPTModel in
its wrappers, through its schedule and vime's own loss, with logits and with hidden states instead.

``python -m tests.support.linear_agreement RANK WORLD FOLDER KIND`` with KIND tensor or context, what the ranks share;
rank 0 prints one JSON object: differences by setting.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from vime.backends.megatron_utils import loss as loss_module
from vime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp, slice_with_cp

from rlk_repro.integration.measure.installation import Installation
from rlk_repro.integration.output_layers import defer_output_layers
from rlk_repro.integration.switch import Mode, Settings, install_into
from rlk_repro.operators import Case
from tests.support.vime_agreement import OPTIONS


class NoAttention(torch.nn.Module):
    """Stands for attention: returns its input and no bias, the pair that Megatron-LM with vime's patch unpacks."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return hidden, None


class TakeOutput(torch.nn.Module):
    """Stands for bias, dropout and residual: returns the output of the pair."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, *_: Any) -> Any:
        return lambda pair, *_: pair[0]


VOCABULARY, HIDDEN = 64, 32  # over two ranks there are as many columns as hidden values: no shape tells them apart
LENGTHS = (((11, 6), (5, 1)), ((9, 4), (14, 9), (4, 2)))  # per microbatch and sample: all tokens, response


class Norm(torch.nn.Module):
    """Megatron's own without Transformer Engine refuses sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def add_weight_gradient(rows: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor) -> None:
    total.addmm_(gradient.T.float(), rows.float())


class OnCpu(TorchFunctionMode):
    """For Megatron, which names its device itself, keeps states of its random numbers, and adds up the gradients of its
    weights by a kernel of Apex's."""

    def __init__(self) -> None:
        super().__init__()
        megatron_layers._grad_accum_fusion_available = True
        megatron_layers.fused_weight_gradient_mlp_cuda = argparse.Namespace(wgrad_gemm_accum_fp32=add_weight_gradient)
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
        megatron_random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "cpu"} if kwargs.get("device") == "cuda" else kwargs))


def make_model(*, is_tied: bool, is_sequence_parallel: bool = False, is_fused: bool = False, is_bf16: bool) -> Any:
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.3,
        use_cpu_initialization=True,
        tensor_model_parallel_size=mpu.get_tensor_model_parallel_world_size(),
        context_parallel_size=mpu.get_context_parallel_world_size(),
        sequence_parallel=is_sequence_parallel,
        gradient_accumulation_fusion=is_fused,
        bf16=is_bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
    )
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if mpu.get_context_parallel_world_size() > 1:  # only Transformer Engine's attention knows context parallelism
        layer.submodules.self_attention, layer.submodules.self_attn_bda = NoAttention, TakeOutput
    spec = TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=Norm)
    torch.manual_seed(1)
    model: Any = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=128,
        share_embeddings_and_output_weights=is_tied,
        position_embedding_type="none",
    )
    if is_bf16:
        model = Float16Module(config, model)
    sharing = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    model = DistributedDataParallel(config, sharing, model)
    config.no_sync_func, config.finalize_model_grads_func = model.no_sync, lambda *_, **__: model.finish_grad_sync()
    return model


def make_batch(number: int, lengths: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    size = mpu.get_context_parallel_world_size()
    samples = [torch.randint(VOCABULARY, (total,), generator=generator) for total, _ in lengths]

    def draw(mean: float) -> list[torch.Tensor]:
        found = [torch.randn(response, generator=generator) + mean for _, response in lengths]
        return [slice_log_prob_with_cp(row, *place) for row, place in zip(found, lengths, strict=True)]

    rows = torch.cat([slice_with_cp(ids, 0) for ids in samples])
    rows = F.pad(rows, (0, -len(rows) % 8))
    owners = torch.cat([torch.full((len(slice_with_cp(ids, 0)),), i) for i, ids in enumerate(samples)])
    owners = F.pad(owners, (0, len(rows) - len(owners)), value=-1)
    hidden_pairs = (owners.unsqueeze(0) != owners.unsqueeze(1)) | torch.ones(len(rows), len(rows)).triu(1).bool()
    masks = [(torch.rand(response, generator=generator) < 0.8).float() for _, response in lengths]
    return {
        "input_ids": rows.unsqueeze(0),
        "attention_mask": None if size > 1 else hidden_pairs[None, None],
        "unconcat_tokens": samples,
        "total_lengths": [total for total, _ in lengths],
        "response_lengths": [response for _, response in lengths],
        "loss_masks": masks,
        "rollout_mask_sums": torch.stack([mask.sum() for mask in masks]),
        "advantages": draw(0.0),
        "log_probs": draw(-math.log(VOCABULARY)),
        "ref_log_probs": draw(-math.log(VOCABULARY)),
    }


class Trainer:
    """Passes of vime's actor over the microbatches, and every number that came out of them."""

    def __init__(self, model: Any, *, recompute: bool) -> None:
        options = OPTIONS | {"recompute_loss_function": recompute}
        self.model, self.args = model, argparse.Namespace(**options)
        self.core = model
        while hasattr(self.core, "module"):
            self.core = self.core.module
        self.batches = [make_batch(number, lengths) for number, lengths in enumerate(LENGTHS)]

    def run(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            passed = self._schedule(self._find_log_probs, is_training=False)
        found["log_probs"] = torch.cat([row for item in passed for row in item["log_probs"]])
        self.model.zero_grad_buffer()
        hidden: list[torch.Tensor] = []
        with self._watch_hidden_states(hidden):
            losses = self._schedule(self._find_loss, is_training=True)
        found["loss"] = torch.stack([item["values"] for item in losses])
        found["hidden"] = torch.cat(hidden)
        assert found["hidden"].any(), "there is something to learn"
        for name, weight in self.core.named_parameters():
            assert weight.grad is None, "Megatron has added it to its own buffer"
            found[name] = weight.main_grad.clone()
        return found

    def _schedule(self, forward_step: Callable[..., Any], *, is_training: bool) -> list[Any]:
        found: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(self.batches),
            model=[self.model],
            num_microbatches=len(self.batches),
            seq_length=128,
            micro_batch_size=1,
            forward_only=not is_training,
        )
        return found

    def _forward(self, batch: dict[str, Any]) -> torch.Tensor:
        tokens, mask = batch["input_ids"], batch["attention_mask"]
        result: torch.Tensor = self.model(input_ids=tokens, position_ids=None, attention_mask=mask, labels=None)
        return result

    def _find_log_probs(self, batches: Iterator[dict[str, Any]], _model: Any) -> Any:
        batch = next(batches)
        shapes = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
        return self._forward(batch), functools.partial(
            loss_module.get_log_probs_and_entropy, args=self.args, with_entropy=False, **shapes
        )

    def _find_loss(self, batches: Iterator[dict[str, Any]], _model: Any) -> Any:
        batch = next(batches)
        number = sum(len(lengths) for lengths in LENGTHS)
        loss = functools.partial(loss_module.loss_function, self.args, batch, len(LENGTHS), number)
        return self._forward(batch), loss

    @contextlib.contextmanager
    def _watch_hidden_states(self, gradients: list[torch.Tensor]) -> Iterator[None]:
        """Gradients at the input of the output layer, in both cases the same tensor."""

        def watch(_layer: Any, inputs: Any) -> None:
            inputs[0].register_hook(lambda gradient: gradients.append(gradient.flatten(0, 1).float()))

        handle = self.core.output_layer.register_forward_pre_hook(watch)
        try:
            yield
        finally:
            handle.remove()


def install(model: Any, ops: tuple[str, ...]) -> Installation:
    case = Case(platform="cpu", tensor_parallel=mpu.get_tensor_model_parallel_world_size(),
                context_parallel=mpu.get_context_parallel_world_size())  # fmt: skip
    settings = Settings(mode=Mode.REQUIRE, ops=ops, has_entropy_metric=False)
    installation = install_into(loss_module, settings, trainer="vime", case=case)
    defer_output_layers(installation, [model])
    return installation


def differ(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest of each kind: log-probs absolutely, losses as |x - y| / (1 + |y|), gradients as a part of their
    largest."""
    worst: dict[str, float] = {}
    for name, value in expected.items():
        assert value.isfinite().all(), name
        assert found[name].isfinite().all(), name
        distance = (found[name] - value).abs()
        if name == "loss":
            distance = distance / (1 + value.abs())
        elif name != "log_probs":
            distance = distance / value.abs().max().clamp_min(1e-30)
        is_head = "output_layer" in name or "word_embeddings" in name
        kind = name if name in {"log_probs", "loss", "hidden"} else "head" if is_head else "weights"
        worst[kind] = max(worst.get(kind, 0.0), float(distance.max()))
    return worst


def compare(**shape: bool) -> dict[str, float]:
    model = make_model(**shape)
    found: dict[str, float] = {}
    for recompute in (False, True):
        trainer = Trainer(model, recompute=recompute)
        with install(model, ()):
            expected = trainer.run()
        with install(model, ("linear_logp",)) as installation:
            result = trainer.run()
            assert installation._watch.settle() == {}
        with install(model, ()):
            again = trainer.run()
        assert all(torch.equal(again[name], value) for name, value in expected.items()), "undone"
        for name, value in differ(result, expected).items():
            found[name] = max(found.get(name, 0.0), value)
    return found


def main() -> None:
    rank, world, folder, kind = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world)
    tensor, context = (world, 1) if kind == "tensor" else (1, world)
    mpu.initialize_model_parallel(tensor, 1, context_parallel_size=context)
    with OnCpu():
        chosen = {name: shape for name, shape in SHAPES.items() if is_possible(shape, tensor)}
        result = {name: compare(**shape) for name, shape in chosen.items()}
    if rank == 0:
        sys.stdout.write(json.dumps(result) + "\n")
    dist.destroy_process_group()


SHAPES = {
    "untied": {"is_tied": False, "is_bf16": False},
    "tied, fused weight gradients, bfloat16": {"is_tied": True, "is_fused": True, "is_bf16": True},
    "sequence parallel, fused": {"is_tied": False, "is_sequence_parallel": True, "is_fused": True, "is_bf16": False},
    "tied, sequence parallel, bfloat16": {"is_tied": True, "is_sequence_parallel": True, "is_bf16": True},
}


def is_possible(shape: dict[str, bool], tensor_parallel: int) -> bool:
    return tensor_parallel > 1 or not shape.get("is_sequence_parallel")


if __name__ == "__main__":
    main()
