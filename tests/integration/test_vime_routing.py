"""Experts that vime's engines choose: what is recorded, and that experts replayed for another token or layer are found.

The stand-ins have Megatron-LM's routers with vime's routing replay, and vLLM's routers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlk_repro.analysis.checks import check_pair
from rlk_repro.integration.measure.engines import EngineRecord
from rlk_repro.integration.measure.routing import RouteCapture
from rlk_repro.integration.vime_engines import STAGE, VimeEngines
from rlk_repro.logs.engines import EngineLog, read_engines
from rlk_repro.rundir.agreement import AgreementCheck, CheckKind, CheckWord, list_failures
from rlk_repro.rundir.paths import TrialDir
from tests.integration import test_vime_engines as dense

NUM_EXPERTS, TOP_K, NUM_LAYERS = 8, 2, 3
R3 = {"use_routing_replay": True, "use_rollout_routing_replay": True}


class Router(nn.Module):
    """Chooses experts, or takes them from a list as vime's routing replay does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(dense.WIDTH, NUM_EXPERTS, bias=False)
        self.stored: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.linear(x).reshape(-1, NUM_EXPERTS)
        experts = logits.topk(TOP_K).indices
        if os.environ.get(STAGE) == "replay_forward":
            experts = self.stored.pop(0)
            assert len(experts) == len(logits)
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, value=True)
        return logits.softmax(-1) * chosen, chosen


class Experts(dense.Branch):
    """One linear layer in place of all experts, scaled by the sum of the chosen experts' probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        probs, _ = self.router(x)
        return self.linear(x) * probs.sum(-1).reshape(*x.shape[:-1], 1), None


class VllmRouter:
    def __init__(self, linear: nn.Module) -> None:
        self.linear, self.capture_fn = linear, None

    def set_capture_fn(self, function: Any) -> None:
        self.capture_fn = function

    def choose(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.linear(x)
        ids = logits.topk(TOP_K).indices
        if self.capture_fn is not None:
            self.capture_fn(ids.int())
        found: torch.Tensor = logits.softmax(-1).gather(-1, ids).sum(-1, keepdim=True)
        return found


class VllmExperts(nn.Module):
    def __init__(self, mlp: Experts) -> None:
        super().__init__()
        self.linear, self.experts = mlp.linear, nn.Module()
        self.experts.router = VllmRouter(mlp.router.linear)  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(x) * self.experts.router.choose(x)  # type: ignore[operator,union-attr]
        return found


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    model: Any = dense.Model()
    model.decoder.layers = nn.ModuleList(dense.Layer() for _ in range(NUM_LAYERS))
    for layer in model.decoder.layers:
        layer.mlp = Experts()
    return model


def make_server(model: Any) -> dense.Vllm:
    server = dense.Vllm(model)
    layers: Any = server.model.model.layers  # type: ignore[union-attr]
    for mine, theirs in zip(layers, model.decoder.layers, strict=True):
        mine.mlp = VllmExperts(theirs.mlp)
    return server


def route(server: dense.Vllm, tokens: torch.Tensor) -> torch.Tensor:
    """Return the experts [rows, layers, k] that vLLM's generation chose for a sample, without the last row."""
    capture = RouteCapture([[(row, row) for row in range(len(tokens))]])
    with capture.watching(server.model):
        server.model(tokens)
    return torch.tensor(list(capture.found.values())).transpose(0, 1)[:-1]


def store(model: Any, data: Any, change: Any) -> None:
    """Fill the lists of experts as vime does: a row more for each sample, and rows for the padding."""
    for layer in model.decoder.layers:
        layer.mlp.router.stored = []
    for indices in data["micro_batch_indices"]:
        rows = torch.cat([nn.functional.pad(data["rollout_routed_experts"][n], (0, 0, 0, 0, 0, 1)) for n in indices])
        rows = change(nn.functional.pad(rows, (0, 0, 0, 0, 0, -len(rows) % 8)))
        for number, layer in enumerate(model.decoder.layers):
            layer.mlp.router.stored.append(rows[:, number])


def record(
    folder: Path, seed: int = 1, change: Any = lambda rows: rows, *, asks_vllm: bool = True, **changes: Any
) -> EngineLog:
    os.environ[STAGE] = "fallthrough"
    core = make_model(seed)
    model, server = [dense.Wrapper(core)], make_server(core)
    writer = EngineRecord(TrialDir(folder).engines, 0)
    engines = VimeEngines(writer)
    if asks_vllm:
        engines.server.follow_connect(lambda *_: None)(None, ["engine"])
        engines.server._post = lambda path, body, timeout_s=0.0: server.answer(path, body)  # type: ignore[method-assign]  # noqa: ARG005
    data, args = dense.make_data(model), dense.make_args(num_experts=NUM_EXPERTS, **changes)
    is_replayed = bool(changes.get("use_rollout_routing_replay"))
    if is_replayed:
        data["rollout_routed_experts"] = [route(server, tokens) for tokens in data["tokens"]]
    iterators = engines.follow_begin(lambda given: [dense.DataIterator(given, given["micro_batch_indices"])])(data)
    if is_replayed:
        store(core, data, change)
        del data["rollout_routed_experts"]
        os.environ[STAGE] = "replay_forward"
    follow = engines.follow_pass(dense.forward_only)
    follow(lambda ids: ids, args, model, iterators, [2, 1], use_rollout_top_p_replay=True)
    writer.close()
    assert not any(layer.mlp.router.stored for layer in core.decoder.layers)
    log = read_engines(TrialDir(folder))
    assert log is not None
    assert log.num_dropped == 0
    return log


def find_routing(log: EngineLog) -> dict[tuple[str, str], AgreementCheck]:
    checks = check_pair("p1", [("baseline", log), ("enabled", log)])
    return {
        (item.first, item.second): item
        for item in checks
        if item.kind is CheckKind.ROUTING and item.variant == "baseline"
    }


@pytest.fixture(autouse=True)
def stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STAGE, "fallthrough")


def test_engines_that_replay_and_engines_that_choose_have_equal_experts(tmp_path: Path) -> None:
    found = find_routing(record(tmp_path, **R3))
    assert list(found) == [
        ("training", "rollout, generated"),
        ("training", "rollout, prompts"),
        ("rollout, generated", "rollout, prompts"),
        ("training", "training, own routing"),
    ]
    assert {item.word for item in found.values()} == {CheckWord.PASS}
    assert {item.found for item in found.values()} == {"36 choices of experts equal"}  # 12 tokens in 3 layers
    assert [item.bound for item in found.values()] == [0, 0.1, 0.1, 0.1]
    assert os.environ[STAGE] == "replay_forward"


def test_without_replay_the_generation_has_a_reason_and_a_sample_alone_its_experts(tmp_path: Path) -> None:
    found = find_routing(record(tmp_path, asks_vllm=False))
    generated = found["training", "rollout, generated"]
    assert generated.word is CheckWord.NOT_MEASURED
    assert generated.found == "vLLM returns the experts chosen in generation only with routing replay (R3)"
    assert found["training", "training, alone"].word is CheckWord.PASS


@pytest.mark.parametrize(
    ("change", "start"),
    [
        (lambda rows: rows.roll(1, dims=0), "first at layer 0, sample 0, position 0 of its response, token 4: expert "),
        (lambda rows: rows.roll(-1, dims=0), "first at layer 0, sample 0, "),
        (lambda rows: rows[:, [0, 2, 1]], "first at layer 1, sample 0, "),
        (lambda rows: torch.cat([rows[:, :2], (rows[:, 2:] + 1) % NUM_EXPERTS], dim=1), "first at layer 2, sample 0, "),
    ],
)
def test_experts_of_another_token_or_layer_are_found(change: Any, start: str, tmp_path: Path) -> None:
    log = record(tmp_path, change=change, **R3)
    check = find_routing(log)["training", "rollout, generated"]
    assert check.word is CheckWord.FAIL
    assert start in check.found
    first = list_failures(check_pair("p1", [("baseline", log), ("enabled", log)]))[0]
    assert first.kind is CheckKind.ROUTING


@pytest.mark.parametrize(("settings", "num_seeds"), [(R3, 20), ({}, 4)])
def test_clean_runs_give_no_alarm(settings: dict[str, Any], num_seeds: int, tmp_path: Path) -> None:
    for seed in range(num_seeds):
        log = record(tmp_path / str(seed), seed, **settings)
        assert list_failures(check_pair("p1", [("baseline", log), ("enabled", log)])) == []
