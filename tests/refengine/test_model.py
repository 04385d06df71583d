"""The transformer against a naive one, and decoding over a cache against teacher forcing."""

from __future__ import annotations

import math

import pytest
import torch

from rlk_repro.refengine.model import PackedLayout, Transformer, make_model, make_rotation, rotate
from rlk_repro.refengine.rollout import RolloutEngine
from rlk_repro.refengine.task import END_ID
from rlk_repro.spec.workloads import ReferenceModel

CPU = torch.device("cpu")
CONFIG = ReferenceModel(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=6,
    ffn_hidden_size=20,
    vocab_size=19,
    untie_embeddings_and_output_weights=True,
    rotary_base=100.0,
)


def _make_model(config: ReferenceModel = CONFIG) -> Transformer:
    """Weights large enough that every part shows, norm weights included."""
    model = make_model(config, seed=3, device=CPU, init_std=0.4)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.copy_(torch.rand(weight.shape, generator=generator) + 0.5)
    return model


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean() + CONFIG.norm_epsilon).sqrt() * weight


def _turn(x: torch.Tensor, position: int) -> torch.Tensor:
    """Rotate pair (i, i + D/2) as a complex number by position * base^(-2i/D)."""
    half = len(x) // 2
    turned = x.clone()
    for i in range(half):
        angle = position * CONFIG.rotary_base ** (-2 * i / len(x))
        value = complex(x[i], x[i + half]) * complex(math.cos(angle), math.sin(angle))
        turned[i], turned[i + half] = value.real, value.imag
    return turned


def _naive_attention(weights: dict[str, torch.Tensor], prefix: str, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    size, heads, groups = CONFIG.kv_channels, CONFIG.num_attention_heads, CONFIG.num_query_groups
    split = [(weights[f"{prefix}.qkv.weight"] @ row).view(-1, size) for row in rows]
    outputs = []
    for position in range(len(rows)):
        mixed = []
        for head in range(heads):
            group = head // (heads // groups)
            q = _turn(_norm(split[position][head], weights[f"{prefix}.q_norm.weight"]), position)
            keys = [
                _turn(_norm(split[at][heads + group], weights[f"{prefix}.k_norm.weight"]), at)
                for at in range(position + 1)
            ]
            scores = torch.stack([q @ key / math.sqrt(size) for key in keys]).softmax(dim=0)
            mixed.append(sum(scores[at] * split[at][heads + groups + group] for at in range(position + 1)))
        outputs.append(weights[f"{prefix}.out.weight"] @ torch.cat([torch.as_tensor(part) for part in mixed]))
    return outputs


def _naive_logits(model: Transformer, tokens: list[int]) -> torch.Tensor:
    """One sample in float64, one row and one head at a time."""
    weights = {name: weight.detach().double() for name, weight in model.named_parameters()}
    rows = [weights["embedding"][token] for token in tokens]
    for layer in range(model.config.num_layers):
        prefix = f"blocks.{layer}"
        normed = [_norm(row, weights[f"{prefix}.attention_norm.weight"]) for row in rows]
        mixed = _naive_attention(weights, f"{prefix}.attention", normed)
        rows = [row + part for row, part in zip(rows, mixed, strict=True)]
        for index, row in enumerate(rows):
            gate, up = (
                weights[f"{prefix}.ffn.gate_up.weight"] @ _norm(row, weights[f"{prefix}.ffn_norm.weight"])
            ).chunk(2)
            rows[index] = row + weights[f"{prefix}.ffn.down.weight"] @ (gate * gate.sigmoid() * up)
    head = weights["embedding"] if not model.config.untie_embeddings_and_output_weights else weights["head.weight"]
    return torch.stack([head @ _norm(row, weights["norm.weight"]) for row in rows])


@pytest.mark.parametrize("is_untied", [True, False])
def test_packed_samples_have_the_logits_of_a_naive_transformer_run_alone(*, is_untied: bool) -> None:
    model = _make_model(CONFIG.model_copy(update={"untie_embeddings_and_output_weights": is_untied}))
    samples = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]
    layout = PackedLayout([len(sample) for sample in samples], CPU)
    packed = torch.tensor([token for sample in samples for token in sample])
    logits = model(packed, layout.positions, layout.attend)
    expected = torch.cat([_naive_logits(model, sample) for sample in samples])
    assert expected.std() > 0.5
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=2e-5)


def test_rotation_keeps_lengths_and_makes_scores_depend_on_distance_only() -> None:
    q, k = (torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))

    def score(at_q: int, at_k: int) -> float:
        turned = [rotate(x, make_rotation(torch.tensor([at]), 8, 50.0)) for x, at in ((q, at_q), (k, at_k))]
        assert turned[0].norm().item() == pytest.approx(q.norm().item(), rel=1e-6)
        return float((turned[0] * turned[1]).sum())

    assert score(9, 4) == pytest.approx(score(25, 20), rel=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), rel=1e-2)


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = make_model(CONFIG, seed=8, device=CPU)
    torch.manual_seed(2)
    again, other = make_model(CONFIG, seed=8, device=CPU), make_model(CONFIG, seed=9, device=CPU)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.embedding, other.embedding)
    assert first.blocks[0].get_parameter("ffn.down.weight").std().item() == pytest.approx(0.1 / 2, rel=0.1)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.2)])
@torch.no_grad()
def test_decoding_over_the_cache_gives_the_log_probs_of_teacher_forcing(dtype: str, tolerance: float) -> None:
    model = _make_model(CONFIG.model_copy(update={"dtype": dtype}))
    engine = RolloutEngine(model.config, CPU)
    engine.load_weights(model)
    prompts = [[3, 4, 5, 6], [7, 8], [2, 9, 3, 4, 5, 6, 7], [10]] * 3
    responses = engine.generate(prompts, max_tokens=9, temperature=1.3, seed=5)
    samples = [prompt + response.tokens for prompt, response in zip(prompts, responses, strict=True)]
    layout = PackedLayout([len(sample) for sample in samples], CPU)
    packed = torch.tensor([token for sample in samples for token in sample])
    log_probs = (model(packed, layout.positions, layout.attend) / 1.3).log_softmax(dim=-1)
    worst, start = 0.0, 0
    for prompt, response in zip(prompts, responses, strict=True):
        rows = log_probs[start + len(prompt) - 1 :][: len(response.tokens)]
        forced = rows.gather(-1, torch.tensor(response.tokens).unsqueeze(-1)).squeeze(-1)
        worst = max(worst, float((forced - torch.tensor(response.log_probs)).abs().max()))
        start += len(prompt) + len(response.tokens)
    assert worst < tolerance
    assert len({len(response.tokens) for response in responses}) > 1


def test_a_response_stops_at_its_end_token_and_only_there() -> None:
    engine = RolloutEngine(CONFIG, CPU)
    engine.load_weights(_make_model())
    responses = engine.generate([[3, 4]] * 64, max_tokens=6, temperature=3.0, seed=1)
    assert {response.is_finished for response in responses} == {True, False}
    for response in responses:
        assert response.tokens.count(END_ID) == (response.tokens[-1] == END_ID) == response.is_finished
        assert len(response.tokens) == len(response.log_probs)
        assert response.is_finished or len(response.tokens) == 6


def test_sampling_repeats_with_its_seed_and_follows_the_weights_only_when_they_are_synced() -> None:
    model, engine = _make_model(), RolloutEngine(CONFIG, CPU)
    engine.load_weights(model)

    def generate(seed: int) -> list[list[int]]:
        responses = engine.generate([[3, 4], [5]], max_tokens=5, temperature=1.0, seed=seed)
        return [response.tokens for response in responses]

    first = generate(1)
    assert generate(1) == first
    assert generate(2) != first
    with torch.no_grad():
        model.embedding.mul_(-1)
    assert generate(1) == first
    engine.load_weights(model)
    assert generate(1) != first


def test_sampled_tokens_are_as_frequent_as_their_probabilities() -> None:
    model, engine = _make_model(), RolloutEngine(CONFIG, CPU)
    engine.load_weights(model)
    responses = engine.generate([[3, 4, 5]] * 4000, max_tokens=1, temperature=2.0, seed=7)
    counts = torch.bincount(torch.tensor([response.tokens[0] for response in responses]), minlength=19) / 4000
    expected = (_naive_logits(model, [3, 4, 5])[-1] / 2.0).softmax(dim=0)
    assert float((counts - expected).abs().max()) < 4 * math.sqrt(0.25 / 4000)
