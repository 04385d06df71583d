"""vime's actor under an agreement run: what goes into the model, log-probs and layers are recorded, in each packing."""

from __future__ import annotations

import json
import os
import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlk_repro.analysis.checks import check_pair
from rlk_repro.integration.measure.engines import EngineRecord
from rlk_repro.integration.vime_abi import BEGIN
from rlk_repro.integration.vime_engines import STAGE, VimeEngines
from rlk_repro.integration.vllm_worker import LayerWatch
from rlk_repro.logs.engines import EngineLog, Skipped, read_engines
from rlk_repro.rundir.agreement import PROMPTS, CheckKind, CheckWord, list_failures
from rlk_repro.rundir.paths import TrialDir

WIDTH = 100
SOURCES = pytest.mark.skipif(
    not (os.environ.get("VIME_SRC") and os.environ.get("MEGATRON_SRC")),
    reason="VIME_SRC and MEGATRON_SRC do not name checkouts of vime and Megatron-LM",
)


class Branch(nn.Module):
    """Returns a bias beside its output, as Megatron-LM's attention and MLP do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.linear(x), None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attention, self.mlp = Branch(), Branch()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        x = x + self.self_attention(x)[0]
        return x + self.mlp(x)[0], None


class Model(nn.Module):
    """Megatron-LM's names of modules, and no mixing of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(Layer() for _ in range(2))
        self.decoder.final_layernorm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids: torch.Tensor, packed_seq_params: Any, loss_mask: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        x = self.embedding(input_ids).transpose(0, 1)
        decoder: Any = self.decoder
        for layer in decoder.layers:
            x, _ = layer(x)
        logits: torch.Tensor = decoder.final_layernorm(x).transpose(0, 1) @ self.embedding.weight.T
        return logits


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **given: Any) -> Any:
        return self.module(**given)


class VllmLayer(nn.Module):
    """Returns two tensors whose sum is the residual stream, as vLLM's layers do."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attention.linear, layer.mlp.linear

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual + x
        residual = residual + self.self_attn(residual)
        return self.mlp(residual), residual


class Vllm(LayerWatch):
    """vLLM's server and worker in one, with the weights of a model of Megatron-LM's form."""

    def __init__(self, model: Any) -> None:
        self.model = nn.Module()
        self.model.model = nn.Module()
        self.model.model.layers = nn.ModuleList(map(VllmLayer, model.decoder.layers))
        self.model.model.norm = model.decoder.final_layernorm
        self.embedding = model.embedding
        self.model.forward = self.compute

    def get_model(self) -> nn.Module:
        return self.model

    def compute(self, tokens: torch.Tensor) -> torch.Tensor:
        inner: Any = self.model.model
        x, residual = torch.zeros_like(self.embedding(tokens)), self.embedding(tokens)
        for layer in inner.layers:
            x, residual = layer(x, residual)
        found: torch.Tensor = inner.norm(x + residual)
        return found

    def answer(self, path: str, body: Any) -> Any:
        if path == "/collective_rpc":
            results = [getattr(self, body["method"])(*body["args"])]
            return json.loads(json.dumps({"results": results}, allow_nan=False))
        ids = torch.tensor(body["token_ids"])
        rows = (self.model(ids) @ self.embedding.weight.T).detach().log_softmax(-1)[:-1]
        found = [{str(int(token)): {"logprob": float(row[token])}} for token, row in zip(ids[1:], rows, strict=True)]
        return {"prompt_logprobs": [None, *found]}


class DataIterator:
    def __init__(self, rollout_data: Any, micro_batch_indices: list[list[int]]) -> None:
        self.rollout_data, self.micro_batch_indices = rollout_data, micro_batch_indices


def forward_only(
    f: Any, args: Any, model: Any, data_iterator: Any, num_microbatches: Any, store_prefix: str = "",
    use_rollout_top_p_replay: bool = False,
) -> dict[str, list[torch.Tensor]]:  # fmt: skip
    """Packs, pads and puts back in order as vime does; ``f`` may change what is packed."""
    assert use_rollout_top_p_replay
    iterator = data_iterator[0]
    data, found = iterator.rollout_data, {}
    assert sum(num_microbatches) == len(iterator.micro_batch_indices)
    for indices in iterator.micro_batch_indices:
        parts = [f(data["tokens"][index]) for index in indices]
        masks = [
            nn.functional.pad(data["loss_masks"][n], (len(data["tokens"][n]) - data["response_lengths"][n] - 1, 1))
            for n in indices
        ]
        packed = torch.cat(parts)
        pad = -len(packed) % args.data_pad_size_multiplier
        starts = torch.tensor([0, *(len(part) for part in parts), *([pad] if pad else [])]).cumsum(0)
        logits = model[0](
            input_ids=nn.functional.pad(packed, (0, pad))[None],
            packed_seq_params=SimpleNamespace(cu_seqlens_q=starts),
            loss_mask=nn.functional.pad(torch.cat(masks), (0, pad))[None],
        )[0]
        for place, index in enumerate(indices):
            rows, length = logits[starts[place] : starts[place + 1]], data["response_lengths"][index]
            chosen = rows[-length - 1 : -1].log_softmax(-1)
            found[index] = chosen.gather(-1, data["tokens"][index][-length:, None]).squeeze(-1)
    return {f"{store_prefix}log_probs": [found[index].detach() for index in sorted(found)]}


def make_data(model: Any) -> dict[str, Any]:
    tokens = [torch.tensor([3, 4, 5, 6, 7][: 3 + n % 3]) for n in range(6)]
    data: dict[str, Any] = {
        "tokens": tokens,
        "total_lengths": [len(one) for one in tokens],
        "response_lengths": [2] * 6,
        "loss_masks": [torch.ones(2, dtype=torch.int) for _ in tokens],
        "micro_batch_indices": [[0, 2], [1, 3], [5, 4]],
    }
    args = make_args()
    iterators = [DataIterator(data, data["micro_batch_indices"])]
    data["rollout_log_probs"] = forward_only(
        lambda ids: ids, args, model, iterators, [3], use_rollout_top_p_replay=True
    )["log_probs"]
    return data


def make_args(**changes: Any) -> Namespace:
    values = {
        "bf16": False, "fp16": False, "sequence_parallel": False, "context_parallel_size": 1,
        "pipeline_model_parallel_size": 1, "data_pad_size_multiplier": 8, "world_size": 1, "rank": 0,
        "tensor_model_parallel_size": 1, "rollout_temperature": 1.0, "rollout_top_p": 1.0,
    }  # fmt: skip
    return Namespace(**values | changes)


def record(
    folder: Path, pack: Any = lambda ids: ids, num_rollouts: int = 1, *, asks_vllm: bool = False, **changes: Any
) -> EngineLog:
    torch.manual_seed(1)
    model = [Wrapper(Model())]
    writer = EngineRecord(TrialDir(folder).engines, 0)
    engines, server = VimeEngines(writer), Vllm(model[0].module)
    if asks_vllm:
        engines.server.follow_connect(lambda *_: None)(None, ["engine"])
        engines.server._post = lambda path, body, timeout_s=0.0: server.answer(path, body)  # type: ignore[method-assign]  # noqa: ARG005
    data = make_data(model)
    begin = engines.follow_begin(lambda given: [DataIterator(given, given["micro_batch_indices"])])
    follow = engines.follow_pass(forward_only)
    for _ in range(num_rollouts):
        iterators = begin(data)
        more = {"use_rollout_top_p_replay": True}
        follow(pack, make_args(**changes), model, iterators, [3], store_prefix="ref_", **more)
        result = follow(pack, make_args(**changes), model, iterators, [2, 1], **more)
        assert len(result["log_probs"]) == 6
    writer.close()
    log = read_engines(TrialDir(folder))
    assert log is not None
    return log


def test_a_rollout_is_recorded_once_with_inputs_log_probs_layers_and_cases(tmp_path: Path) -> None:
    log = record(tmp_path, num_rollouts=2)
    assert log.steps == [0, 1]
    assert log.inputs[0]["training"].samples == log.inputs[0]["rollout"].samples
    cases = [case for (engine, case), found in log.log_probs[0].items() if not isinstance(found, Skipped)]
    assert cases == ["", "", "alone", "padded", "reordered"]
    points = log.layers[0]["training", ""]
    assert list(points)[:3] == ["layer 0 attention", "layer 0 mlp", "layer 0 residual"]
    assert list(points)[-2:] == ["final norm", "logits"]
    assert {len(points[point].values[0]) for point in points} == {64, 20}  # projected, and narrow enough to be whole
    assert 1 not in log.layers
    checks = list(check_pair("p1", [("baseline", log), ("enabled", log)]))
    assert list_failures(checks) == []
    reasons = {item.found for item in checks if item.word is CheckWord.NOT_MEASURED}
    assert "one parallel layout per run; compare bundles with rlk-repro diff" in reasons
    assert "the trainer sent no weights before this step" in reasons


def test_vllm_computes_the_samples_as_prompts_alone_and_together_with_its_layers(tmp_path: Path) -> None:
    log = record(tmp_path, num_rollouts=2, asks_vllm=True)
    assert (1, PROMPTS) in {(step, engine) for step, found in log.log_probs.items() for engine, _ in found}
    points = [f"layer {number} {part}" for number in range(2) for part in ("attention", "mlp", "residual")]
    found = check_pair("p1", [("baseline", log), ("enabled", log)])
    checks = [item for item in found if item.variant == "baseline" and not item.step]
    (layers,) = (item for item in checks if PROMPTS in {item.first, item.second} and item.kind is CheckKind.LAYERS)
    assert (layers.points, layers.word) == ((*points, "final norm"), CheckWord.PASS)
    (alone,) = (item for item in checks if item.first == PROMPTS and item.kind is CheckKind.INVARIANCE)
    assert (alone.second, alone.word) == ("together", CheckWord.PASS)
    assert list_failures(checks) == []


@SOURCES
def test_vime_and_megatron_have_the_names_that_are_followed() -> None:
    vime, megatron = (Path(os.environ[name]) for name in ("VIME_SRC", "MEGATRON_SRC"))
    actor = (vime / "vime/backends/megatron_utils/actor.py").read_text()
    assert "data_iterator = get_data_iterator(rollout_data)" in actor
    assert BEGIN == "get_data_iterator"
    data = (vime / "vime/backends/megatron_utils/data.py").read_text()
    assert re.search(r"class DataIterator:.*?rollout_data: RolloutBatch,\s+micro_batch_indices: list", data, re.DOTALL)
    model = (vime / "vime/backends/megatron_utils/model.py").read_text()
    for given in (
        '"input_ids": tokens',
        '"packed_seq_params": packed_seq_params',
        '"loss_mask": batch["full_loss_masks"]',
    ):
        assert given in model
    assert "origin_indices = sum(data_iterator[0].micro_batch_indices, [])" in model
    core = megatron / "megatron/core"
    layer = (core / "transformer/transformer_layer.py").read_text()
    block = (core / "transformer/transformer_block.py").read_text()
    assert "self.self_attention = " in layer
    assert "self.mlp = " in layer
    assert "self.layers = " in block
    assert "self.final_layernorm = " in block
    assert "self.router = " in (core / "transformer/moe/moe_layer.py").read_text()
    assert "return probs, routing_map" in (core / "transformer/moe/router.py").read_text()
    replay = (vime / "vime/utils/routing_replay.py").read_text()
    assert 'if routing_replay_stage == "fallthrough":' in replay
    assert f'os.environ["{STAGE}"]' in replay
    begin = actor.index("data_iterator = get_data_iterator(rollout_data)\n        num_microbatches")
    assert begin < actor.rindex("self.fill_routing_replay(")
    assert "self.decoder = TransformerBlock(" in (core / "models/gpt/gpt_model.py").read_text()
