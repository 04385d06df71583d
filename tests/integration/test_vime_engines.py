"""vime's actor under an agreement run: what goes into the model, log-probs and layers are recorded, in each packing."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlk_repro.analysis.checks import check_pair
from rlk_repro.integration.measure.engines import EngineRecord
from rlk_repro.integration.measure.routing import RouteCapture
from rlk_repro.integration.vime_engines import STAGE, VimeEngines
from rlk_repro.integration.vime_rollout import RolloutServer
from rlk_repro.integration.vllm_worker import LayerWatch
from rlk_repro.logs.engines import EngineLog, Skipped, read_engines
from rlk_repro.rundir.agreement import PROMPTS, AgreementCheck, CheckKind, CheckWord, list_failures
from rlk_repro.rundir.paths import TrialDir

WIDTH = 100
NUM_EXPERTS, TOP_K, NUM_LAYERS = 8, 2, 3
R3 = {"use_routing_replay": True, "use_rollout_routing_replay": True}


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


class Router(nn.Module):
    """Chooses experts, or takes them from a list as vime's routing replay does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.stored: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.linear(x).reshape(-1, NUM_EXPERTS)
        experts = logits.topk(TOP_K).indices
        if os.environ.get(STAGE) == "replay_forward":
            experts = self.stored.pop(0)
            assert len(experts) == len(logits)
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, value=True)
        return logits.softmax(-1) * chosen, chosen


class Experts(Branch):
    """One linear layer in place of all experts, scaled by the chosen experts' probabilities."""

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
        router: Any = self.experts.router
        found: torch.Tensor = self.linear(x) * router.choose(x)
        return found


class VllmLayer(nn.Module):
    """Returns two tensors whose sum is the residual stream, as vLLM's layers do."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.self_attn = layer.self_attention.linear
        self.mlp = VllmExperts(layer.mlp) if hasattr(layer.mlp, "router") else layer.mlp.linear

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


def make_model(seed: int, *, has_experts: bool = False) -> Any:
    torch.manual_seed(seed)
    model: Any = Model()
    if has_experts:
        model.decoder.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        for layer in model.decoder.layers:
            layer.mlp = Experts()
    return model


def route(server: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the experts [rows, layers, k] of a sample in vLLM's generation, but its last row."""
    capture = RouteCapture([[(row, row) for row in range(len(tokens))]])
    with capture.watching(server.model):
        server.model(tokens)
    return torch.tensor(list(capture.found.values())).transpose(0, 1)[:-1]


def store(model: Any, data: Any, change: Any) -> None:
    """Fill the lists of experts as vime does: one more row per sample, and rows for the padding."""
    for layer in model.decoder.layers:
        layer.mlp.router.stored = []
    for indices in data["micro_batch_indices"]:
        experts = [data["rollout_routed_experts"][index] for index in indices]
        rows = torch.cat([nn.functional.pad(one, (0, 0, 0, 0, 0, 1)) for one in experts])
        rows = change(nn.functional.pad(rows, (0, 0, 0, 0, 0, -len(rows) % 8)))
        for number, layer in enumerate(model.decoder.layers):
            layer.mlp.router.stored.append(rows[:, number])


def record(
    folder: Path,
    pack: Any = lambda ids: ids,
    num_rollouts: int = 1,
    *,
    core: Any = None,
    asks_vllm: bool = False,
    change: Any = lambda rows: rows,
    **changes: Any,
) -> EngineLog:
    """What an agreement run records; ``change`` spoils experts before the training replays them."""
    core = core or make_model(1)
    model, server = [Wrapper(core)], Vllm(core)
    writer = EngineRecord(TrialDir(folder).engines, 0)
    engines = VimeEngines(writer)
    if asks_vllm:
        engines.server.follow_connect(lambda *_: None)(None, ["engine"])
        vars(engines.server)["_post"] = lambda path, body, _=0.0: server.answer(path, body)
    data, args = make_data(model), make_args(**changes)
    is_replayed = hasattr(args, "use_rollout_routing_replay")
    if is_replayed:
        data["rollout_routed_experts"] = [route(server, tokens) for tokens in data["tokens"]]
    begin = engines.follow_begin(lambda given: [DataIterator(given, given["micro_batch_indices"])])
    follow = engines.follow_pass(forward_only)
    more = {"use_rollout_top_p_replay": True}
    for _ in range(num_rollouts):
        iterators = begin(data)
        follow(pack, args, model, iterators, [3], store_prefix="ref_", **more)
        if is_replayed:
            store(core, data, change)
            del data["rollout_routed_experts"]
            os.environ[STAGE] = "replay_forward"
        result = follow(pack, args, model, iterators, [2, 1], **more)
        assert len(result["log_probs"]) == 6
    writer.close()
    log = read_engines(TrialDir(folder))
    assert log is not None
    assert log.num_dropped == 0
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


# vLLM's log-prob of one token, with an empty and with a filled prefix cache.

BLOCK = 4
SAMPLES = [(list(range(10, 10 + length)), 3) for length in (4, 6, 9)]


class CachingServer(RolloutServer):
    """Answers as vLLM does: whole blocks of a prefix are cached by salt, its own token is first."""

    def __init__(self, error: float = 0.0) -> None:
        super().__init__()
        self.error, self.seen = error, set[tuple[str, int]]()

    def generate(self, tokens: Sequence[int], wanted: dict[str, Any], **more: str) -> Any:
        assert wanted["logprobs"] == len(wanted["logprob_token_ids"])
        key = (more["cache_salt"], len(tokens))
        cached = (len(tokens) - 1) // BLOCK * BLOCK if key in self.seen else 0
        self.seen.add(key)
        value = -len(tokens) / 7 - (self.error if cached else 0)
        listed = [
            {"token": f"token_id:{token}", "logprob": one}
            for token, one in ((99, -9.0), (wanted["logprob_token_ids"][0], value))
        ]
        return {
            "choices": [{"logprobs": {"content": [{"top_logprobs": listed}]}}],
            "usage": {"prompt_tokens_details": {"cached_tokens": cached}},
        }


@pytest.mark.parametrize(
    ("error", "word", "found"),
    [
        (0.0, CheckWord.PASS, "bitwise"),
        (0.5, CheckWord.FAIL, "largest 0.5 at sample 1, position 2 of its response, token 15"),
    ],
)
def test_a_cached_prefix_that_changes_a_log_prob_is_found_with_its_token(
    error: float, word: CheckWord, found: str, tmp_path: Path
) -> None:
    record = EngineRecord(TrialDir(tmp_path).engines, 0)
    inputs = [{"tokens": tokens, "loss_mask": [1] * num, "padding": 0} for tokens, num in SAMPLES]
    record.write_inputs(0, "rollout", inputs)
    record.write_log_probs(0, "rollout, generated", "", "bfloat16", [])
    CachingServer(error).record_prefixes(record, 0, "bfloat16", SAMPLES)
    record.close()
    log = read_engines(TrialDir(tmp_path))
    checks = check_pair("p1", [("baseline", log), ("enabled", log)])
    (check, _) = (item for item in checks if item.kind is CheckKind.INVARIANCE)
    assert (check.first, check.second) == ("rollout, generated", "prefix cache")
    assert (check.word, check.found) == (word, found)
    assert check.num == 2, "a prefix of 3 tokens fills no block"


# Experts that the engines choose: experts replayed for another token or layer are found.


def record_experts(folder: Path, seed: int = 1, *, asks_vllm: bool = True, **changes: Any) -> EngineLog:
    os.environ[STAGE] = "fallthrough"
    core = make_model(seed, has_experts=True)
    log = record(folder, core=core, asks_vllm=asks_vllm, num_experts=NUM_EXPERTS, **changes)
    assert not any(layer.mlp.router.stored for layer in core.decoder.layers)
    return log


def find_routing(log: EngineLog) -> dict[tuple[str, str], AgreementCheck]:
    checks = check_pair("p1", [("baseline", log), ("enabled", log)])
    return {
        (item.first, item.second): item
        for item in checks
        if item.kind is CheckKind.ROUTING and item.variant == "baseline"
    }


def test_engines_that_replay_and_engines_that_choose_have_equal_experts(tmp_path: Path) -> None:
    found = find_routing(record_experts(tmp_path, **R3))
    assert list(found) == [
        ("training", "rollout, generated"),
        ("training", "rollout, prompts"),
        ("rollout, generated", "rollout, prompts"),
        ("training", "training, own routing"),
    ]
    assert {item.word for item in found.values()} == {CheckWord.PASS}
    # 12 tokens in 3 layers
    assert {item.found for item in found.values()} == {"36 choices of experts equal"}
    assert [item.bound for item in found.values()] == [0, 0.1, 0.1, 0.1]
    assert os.environ[STAGE] == "replay_forward"


def test_without_replay_only_the_generation_s_experts_have_a_reason(tmp_path: Path) -> None:
    found = find_routing(record_experts(tmp_path, asks_vllm=False))
    generated = found["training", "rollout, generated"]
    assert generated.word is CheckWord.NOT_MEASURED
    assert generated.found.endswith("chosen in generation only with routing replay (R3)")
    assert found["training", "training, alone"].word is CheckWord.PASS


def spoil_the_last_layer(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows[:, :2], (rows[:, 2:] + 1) % NUM_EXPERTS], dim=1)


@pytest.mark.parametrize(
    ("change", "start"),
    [
        (lambda rows: rows.roll(1, dims=0), "first at layer 0, sample 0, position 0 of its resp"),
        (lambda rows: rows.roll(-1, dims=0), "first at layer 0, sample 0, "),
        (lambda rows: rows[:, [0, 2, 1]], "first at layer 1, sample 0, "),
        (spoil_the_last_layer, "first at layer 2, sample 0, "),
    ],
)
def test_experts_of_another_token_are_found(change: Any, start: str, tmp_path: Path) -> None:
    log = record_experts(tmp_path, change=change, **R3)
    check = find_routing(log)["training", "rollout, generated"]
    assert check.word is CheckWord.FAIL
    assert start in check.found
    first = list_failures(check_pair("p1", [("baseline", log), ("enabled", log)]))[0]
    assert first.kind is CheckKind.ROUTING


@pytest.mark.parametrize(("settings", "num_seeds"), [(R3, 6), ({}, 2)])
def test_clean_runs_give_no_alarm(settings: dict[str, Any], num_seeds: int, tmp_path: Path) -> None:
    for seed in range(num_seeds):
        log = record_experts(tmp_path / str(seed), seed, **settings)
        assert list_failures(check_pair("p1", [("baseline", log), ("enabled", log)])) == []
