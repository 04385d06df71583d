"""The transformer against a naive one, and decoding over a cache against teacher forcing."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_repro.base.errors import SpecError
from rlk_repro.refengine import data, task
from rlk_repro.refengine.arguments import parse_args
from rlk_repro.refengine.metrics import make_generation_metrics
from rlk_repro.refengine.model import PackedLayout, Transformer, make_model
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
    samples = [prompt + tokens for prompt, (tokens, _) in zip(prompts, responses, strict=True)]
    layout = PackedLayout([len(sample) for sample in samples], CPU)
    packed = torch.tensor([token for sample in samples for token in sample])
    log_probs = (model(packed, layout.positions, layout.attend) / 1.3).log_softmax(dim=-1)
    worst, start = 0.0, 0
    for prompt, (tokens, found) in zip(prompts, responses, strict=True):
        rows = log_probs[start + len(prompt) - 1 :][: len(tokens)]
        forced = rows.gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)
        worst = max(worst, float((forced - torch.tensor(found)).abs().max()))
        start += len(prompt) + len(tokens)
    assert worst < tolerance
    assert len({len(tokens) for tokens, _ in responses}) > 1


def test_a_response_stops_at_its_end_token_and_only_there() -> None:
    engine = RolloutEngine(CONFIG, CPU)
    engine.load_weights(_make_model())
    responses = engine.generate([[3, 4]] * 64, max_tokens=6, temperature=3.0, seed=1)
    assert {tokens[-1] == END_ID for tokens, _ in responses} == {True, False}
    for tokens, log_probs in responses:
        assert tokens.count(END_ID) == (tokens[-1] == END_ID)
        assert len(tokens) == len(log_probs)
        assert tokens[-1] == END_ID or len(tokens) == 6


def test_sampling_repeats_with_its_seed_and_follows_the_weights_only_when_they_are_synced() -> None:
    model, engine = _make_model(), RolloutEngine(CONFIG, CPU)
    engine.load_weights(model)

    def generate(seed: int) -> list[list[int]]:
        responses = engine.generate([[3, 4], [5]], max_tokens=5, temperature=1.0, seed=seed)
        return [tokens for tokens, _ in responses]

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
    drawn = torch.tensor([tokens[0] for tokens, _ in responses])
    counts = torch.bincount(drawn, minlength=19) / 4000
    expected = (_naive_logits(model, [3, 4, 5])[-1] / 2.0).softmax(dim=0)
    assert float((counts - expected).abs().max()) < 4 * math.sqrt(0.25 / 4000)


# Stored rollouts, group-normalised rewards, and the cutting of a rollout into steps and microbatches.


def _make_sample(index: int = 0, **changes: Any) -> data.Sample:
    fields: dict[str, Any] = {
        "group_index": index // 2,
        "index": index,
        "prompt": "1+2=",
        "response": "3$",
        "label": "3",
        "tokens": [3, 12, 4, 13, 5, 1],
        "response_length": 2,
        "loss_mask": [1, 1],
        "rollout_log_probs": [-0.5, -1.25],
        "reward": float(index),
        "status": "completed",
    }
    return data.Sample(**(fields | changes))


def _store(folder: Path, fields: object) -> str:
    torch.save(fields, folder / "0.pt")
    return str(folder / "{rollout_id}.pt")


def test_samples_survive_the_file(tmp_path: Path) -> None:
    template = str(tmp_path / "new folder" / "{rollout_id}.pt")
    samples = [_make_sample(0), _make_sample(1, status="truncated", loss_mask=[1, 0])]
    data.save_samples(template, 3, samples)
    assert (tmp_path / "new folder" / "3.pt").is_file()
    assert data.load_samples(template, 3, num_samples=2, vocab_size=14) == samples


def test_every_missing_file_is_named_and_none_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "0.pt").touch()
    (tmp_path / "2.pt").touch()
    with pytest.raises(SpecError) as caught:
        data.check_rollout_files(str(tmp_path / "{rollout_id}.pt"), 4)
    assert str(caught.value) == "\n".join(f"{tmp_path}/{number}.pt: stored rollout is missing" for number in (1, 3))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": [3, 4, 14]}, "has an unknown token id, got 14, expected 0 to 13, because of"),
        ({"tokens": [3, 4, -1]}, "has an unknown token id, got -1, expected 0 to 13, because of"),
        ({"response_length": 3}, "response_length 3 does not fit its tokens and loss_mask)"),
        ({"rollout_log_probs": [0.0]}, "response_length 2 does not fit its rollout_log_probs)"),
        ({"reward": {"score": 1}}, "not a stored rollout (TypeError: float() argument must be"),
    ],
)
def test_an_unfit_sample_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    fields = {"tokens": [3, 4, 5], "response_length": 2, "reward": 1.0, "status": "completed"}
    template = _store(tmp_path, {"rollout_id": 0, "samples": [fields | change]})
    with pytest.raises(SpecError) as caught:
        data.load_samples(template, 0, num_samples=1, vocab_size=14)
    assert str(caught.value).startswith(f"{tmp_path}/0.pt: ")
    assert reason in str(caught.value)


class _Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("executed",)


def test_a_file_that_carries_code_is_refused_and_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = _store(tmp_path, {"rollout_id": 0, "samples": [_Evil()]})
    with pytest.raises(SpecError, match="not a stored rollout \\(UnpicklingError"):
        data.load_samples(template, 0, num_samples=1, vocab_size=14)
    assert capsys.readouterr().out == ""


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.floats(-5, 5, width=32), min_size=4, max_size=4), min_size=1, max_size=5))
def test_rewards_are_normalised_inside_their_group(groups: list[list[float]]) -> None:
    rewards = data.normalise_rewards([reward for group in groups for reward in group], 4)
    for index, group in enumerate(groups):
        mean, std = statistics.fmean(group), statistics.stdev(group)
        expected = [(reward - mean) / (std + 1e-6) for reward in group]
        tolerance = 1e-3 + 3e-6 / (std + 1e-6)
        assert rewards[4 * index : 4 * index + 4] == pytest.approx(expected, abs=tolerance)


def test_generation_metrics_count_what_was_generated() -> None:
    samples = [
        _make_sample(0, reward=0.25),
        _make_sample(1, reward=0.25, status="truncated", loss_mask=[1, 0]),
        _make_sample(2, reward=1.0),
        _make_sample(3, reward=0.0),
    ]
    assert make_generation_metrics(samples, 0.5) == {
        "rollout/response_len/mean": 1.75,
        "rollout/response_len/median": 2.0,
        "rollout/response_len/max": 2,
        "rollout/response_len/min": 1,
        "rollout/zero_std/count_0.2": 1,
        "rollout/truncated_ratio": 0.25,
        "perf/rollout_time": 0.5,
        "perf/tokens_per_gpu_per_sec": 16.0,
        "perf/longest_sample_tokens_per_sec": 4.0,
        "perf/effective_tokens_per_gpu_per_sec": 14.0,
        "perf/longest_effective_sample_tokens_per_sec": 4.0,
    }


# The additions, their spelling and the rule that rewards them.


def test_questions_depend_on_seed_and_rollout_alone_and_have_their_answers() -> None:
    first = task.make_questions(1, 2, 50, 12)
    assert task.make_questions(1, 2, 50, 12) == first
    assert first not in (task.make_questions(1, 3, 50, 12), task.make_questions(2, 2, 50, 12))
    assert task.make_questions(1, 2, 3, 12) == first[:3]
    for prompt, answer in first:
        a, b = prompt.removesuffix("=").split("+")
        assert answer == str(int(a) + int(b))
        assert max(int(a), int(b)) <= 12


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        *(("17$", 1.0), ("17", 2 / 3), ("1$", 1 / 3), ("27$", 2 / 3)),
        *(("177$", 0.5), ("$", 0.0), ("71$", 1 / 3), ("17?$", 0.5)),
    ],
)
def test_reward_is_the_share_of_right_positions(response: str, reward: float) -> None:
    assert task.score(response, "17") == reward


# The command line: what follows from what, and what is refused.


def test_the_samples_of_a_step_follow_from_the_other_sizes() -> None:
    args = parse_args(["--rollout-batch-size", "4", "--n-samples-per-prompt", "8", "--num-steps-per-rollout", "2"])
    assert args.global_batch_size == 16


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-query-groups 3", "does not divide the attention heads, got 3, expected a div"),
        ("--kv-channels 7", "rotary embedding needs an even size, got 7, expected an even number"),
        ("--num-steps-per-rollout 3", "does not divide the samples of a rollout, got 3"),
        ("--save-debug-rollout-data 0.pt", "does not fit, got '0.pt', expected a template with"),
        ("--debug-train-only", "no rollouts to train on\n  hint: add --load-debug-rollout-data"),
        (
            "--load-debug-rollout-data {rollout_id} --save-debug-rollout-data {rollout_id}",
            "excludes --save-debug-rollout-data",
        ),
    ],
)
def test_contradictions_are_refused(flags: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_args(flags.split())
    assert str(caught.value).startswith(f"{flags.partition(' ')[0]}: {message}")
