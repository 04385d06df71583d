"""Weights after vime's sync: hashes of what vime sends, against hashes of vLLM's parameters in vLLM's layout."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlk_repro.analysis.checks import check_pair
from rlk_repro.integration.measure.engines import EngineRecord
from rlk_repro.integration.vime_rollout import RolloutServer
from rlk_repro.integration.vime_weights import WeightSync
from rlk_repro.integration.vllm_worker import LayerWatch
from rlk_repro.logs.engines import Weights, read_engines
from rlk_repro.rundir.agreement import AgreementCheck, CheckKind, CheckWord
from rlk_repro.rundir.paths import TrialDir

SIZE, VOCAB, NUM_EXPERTS = 4, 10, 3


class UnquantizedFusedMoEMethod:
    def __init__(self, backend: str) -> None:
        self.unquantized_backend = SimpleNamespace(name=backend)


class Part(nn.Module):
    """A layer of vLLM: parameters, and attributes that say what the parameters hold."""

    def __init__(self, attributes: dict[str, Any] | None = None, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape).bfloat16(), requires_grad=False))
        for name, value in (attributes or {}).items():
            setattr(self, name, value)


class Vllm(LayerWatch):
    """vLLM's worker with a model of one layer, whose attention and experts are fused as in vLLM."""

    def __init__(self, *, tied: bool = False, backend: str = "TRITON", num_workers: int = 1) -> None:
        self.parallel_config = SimpleNamespace(world_size_across_dp=num_workers)
        layer = nn.Module()
        layer.self_attn, layer.mlp = nn.Module(), nn.Module()
        layer.self_attn.qkv_proj = Part({"output_sizes": [4, 2, 2]}, weight=(8, SIZE), bias=(8,))
        layer.mlp.experts = nn.Module()
        layer.mlp.experts.routed_experts = Part(
            {"quant_method": UnquantizedFusedMoEMethod(backend)},
            w13_weight=(NUM_EXPERTS, 6, SIZE), w2_weight=(NUM_EXPERTS, SIZE, 3),
        )  # fmt: skip
        self.model = nn.Module()
        self.model.model = nn.Module()
        self.model.model.embed_tokens = Part({"org_vocab_size": VOCAB}, weight=(VOCAB + 2, SIZE))
        self.model.model.layers = nn.ModuleList([layer])
        self.model.lm_head = self.model.model.embed_tokens if tied else Part(weight=(VOCAB, SIZE))

    def get_model(self) -> nn.Module:
        return self.model

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Put the tensors of a checkpoint where vLLM's own loaders put them."""
        own, given = dict(self.model.named_parameters()), dict(tensors)
        path = "model.layers.0.self_attn"
        for kind in ("weight", "bias"):
            own[f"{path}.qkv_proj.{kind}"].copy_(torch.cat([given[f"{path}.{part}_proj.{kind}"] for part in "qkv"]))
        path = "model.layers.0.mlp.experts"
        for number in range(NUM_EXPERTS):
            halves = [given[f"{path}.{number}.{part}_proj.weight"] for part in ("gate", "up")]
            own[f"{path}.routed_experts.w13_weight"][number].copy_(torch.cat(halves))
            own[f"{path}.routed_experts.w2_weight"][number].copy_(given[f"{path}.{number}.down_proj.weight"])
        own["model.embed_tokens.weight"][:VOCAB].copy_(given["model.embed_tokens.weight"])
        if "lm_head.weight" in own and "lm_head.weight" in given:
            own["lm_head.weight"].copy_(given["lm_head.weight"])


def make_checkpoint() -> list[tuple[str, torch.Tensor]]:
    """Make tensors as vime converts them, some of them in float32, which vLLM keeps in bfloat16."""
    path, experts = "model.layers.0.self_attn", "model.layers.0.mlp.experts"
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, SIZE)}
    for part, rows in {"q": 4, "k": 2, "v": 2}.items():
        shapes |= {f"{path}.{part}_proj.weight": (rows, SIZE), f"{path}.{part}_proj.bias": (rows,)}
    for number in range(NUM_EXPERTS):
        shapes |= {f"{experts}.{number}.{part}_proj.weight": (3, SIZE) for part in ("gate", "up")}
        shapes[f"{experts}.{number}.down_proj.weight"] = (SIZE, 3)
    shapes["lm_head.weight"] = (VOCAB, SIZE)
    tensors = [(name, torch.randn(shape)) for name, shape in shapes.items()]
    return [(name, value.bfloat16() if value.dim() > 1 else value) for name, value in tensors]


class Updater:
    """vime's updater, which sends the checkpoint in two parts."""

    def __init__(self, vllm: Vllm, **changes: Any) -> None:
        given = {"bf16": True, "fp16": False, "rank": 0, "pipeline_model_parallel_size": 1, "mtp_num_layers": None}
        self.quantization_config = changes.pop("quantization_config", None)
        self.args, self.vllm = Namespace(**given | changes), vllm
        self.checkpoint = make_checkpoint()
        self.received: list[tuple[str, torch.Tensor]] = []

    def update_weights(self) -> str:
        self.received = []
        self.send(self.checkpoint[:5])
        self.send(self.checkpoint[5:])
        self.vllm.load(self.received)
        return "synced"

    def send(self, tensors: list[tuple[str, torch.Tensor]]) -> int:
        self.received += tensors
        return len(self.received)


def sync_and_check(
    folder: Path, updater: Updater, spoil: Callable[[Any], object] = lambda _: None, fault: Exception | None = None
) -> Iterator[AgreementCheck]:
    """Yield the checks of weights after one sync and two records; ``spoil`` changes the model after the sync."""
    server, writer = RolloutServer(), EngineRecord(TrialDir(folder).engines, 0)

    def answer(path: str, body: Any, timeout_s: float) -> Any:
        assert (path, timeout_s > 0) == ("/collective_rpc", True)
        if fault is not None:
            raise fault
        spoil(updater.vllm.model)
        results = [getattr(updater.vllm, body["method"])(*body["args"])]
        return json.loads(json.dumps({"results": results}))

    server._post = answer  # type: ignore[method-assign,assignment]
    sync = WeightSync(server)
    kind: Any = type("Followed", (type(updater),), {})
    kind.send, kind.update_weights = sync.follow_send(kind.send), sync.follow_update(kind.update_weights)
    updater.__class__ = kind
    assert updater.update_weights() == "synced"
    assert [name for name, _ in updater.received] == [name for name, _ in updater.checkpoint]
    for step in range(2):
        writer.write_inputs(step, "rollout", [])
        sync.write(writer, step)
    writer.close()
    log = read_engines(TrialDir(folder))
    found = check_pair("p1", [("baseline", log), ("enabled", log)])
    return (item for item in found if item.kind is CheckKind.WEIGHTS and item.variant == "baseline")


def test_after_a_sync_all_tensors_are_equal_and_a_step_without_sync_has_the_reason(tmp_path: Path) -> None:
    synced, later = sync_and_check(tmp_path, Updater(Vllm()))
    assert (synced.word, synced.num, synced.found) == (CheckWord.PASS, 17, "17 tensors equal")
    assert (later.step, later.word) == (1, CheckWord.NOT_MEASURED)
    assert later.found == "the trainer sent no weights between this step and the step before"


def find(model: Any, name: str) -> Any:
    return dict(model.named_parameters())[name]


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda model: find(model, "model.layers.0.self_attn.qkv_proj.weight")[5, 1].add_(1),
         "model.layers.0.self_attn.k_proj.weight is not equal, the first of 1 such tensor"),
        (lambda model: find(model, "model.layers.0.self_attn.qkv_proj.bias")[3].add_(1),
         "model.layers.0.self_attn.q_proj.bias is not equal, the first of 1 such tensor"),
        (lambda model: find(model, "model.layers.0.mlp.experts.routed_experts.w13_weight")[1, 3:].add_(1),
         "model.layers.0.mlp.experts.1.up_proj.weight is not equal, the first of 1 such tensor"),
        (lambda model: find(model, "model.layers.0.mlp.experts.routed_experts.w2_weight").add_(1),
         "model.layers.0.mlp.experts.0.down_proj.weight is not equal, the first of 3 such tensors"),
        (lambda model: find(model, "model.embed_tokens.weight").mul_(2),
         "model.embed_tokens.weight is not equal, the first of 1 such tensor"),
        (lambda model: delattr(model, "lm_head"), "lm_head.weight is missing in rollout, the first of 1 such tensor"),
        (lambda model: setattr(model, "head", Part(weight=(2, 2))),
         "head.weight is missing in training, the first of 1 such tensor"),
    ],
)  # fmt: skip
def test_a_weight_that_was_not_synced_is_named(spoil: Callable[[Any], object], found: str, tmp_path: Path) -> None:
    synced, _ = sync_and_check(tmp_path, Updater(Vllm()), spoil)
    assert (synced.word, synced.found) == (CheckWord.FAIL, found)


def test_a_tied_output_layer_is_named_or_compared_if_vime_sends_it(tmp_path: Path) -> None:
    updater = Updater(Vllm(tied=True))
    head = updater.checkpoint.pop()
    synced, _ = sync_and_check(tmp_path / "one", updater)
    assert synced.word is CheckWord.PASS
    assert synced.found == "16 tensors equal; rollout: lm_head.weight is model.embed_tokens.weight"
    updater = Updater(Vllm(tied=True))
    updater.checkpoint[-1] = head
    synced, _ = sync_and_check(tmp_path / "two", updater)
    assert synced.found == "lm_head.weight is not equal, the first of 1 such tensor"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (OSError("refused"), "vLLM did not answer: OSError"),
        (TimeoutError(), "vLLM did not answer: TimeoutError"),
        (KeyError("results"), "the comparison failed: KeyError"),
    ],
)
def test_a_server_that_fails_leaves_the_sync_and_the_hashes_of_the_training(
    fault: Exception, reason: str, tmp_path: Path
) -> None:
    synced, _ = sync_and_check(tmp_path, Updater(Vllm()), fault=fault)
    assert (synced.word, synced.found) == (CheckWord.NOT_MEASURED, reason)
    log = read_engines(TrialDir(tmp_path))
    assert log is not None
    assert isinstance(log.weights[0]["training"], Weights)
