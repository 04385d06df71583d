"""Stored rollouts, group-normalised rewards, and the cutting of a rollout into steps and microbatches."""

from __future__ import annotations

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
        ({"tokens": [3, 4, 14]}, "has an unknown token id, got 14, expected 0 to 13, because of --vocab-size"),
        ({"tokens": [3, 4, -1]}, "has an unknown token id, got -1, expected 0 to 13, because of --vocab-size"),
        (
            {"response_length": 3},
            "not a stored rollout (ValueError: sample 0: response_length 3 does not fit its tokens and loss_mask)",
        ),
        (
            {"rollout_log_probs": [0.0]},
            "not a stored rollout (ValueError: sample 0: response_length 2 does not fit its rollout_log_probs)",
        ),
        ({"reward": {"score": 1}}, "not a stored rollout (TypeError: float() argument must be a string or a real "),
    ],
)
def test_an_unfit_sample_is_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    fields = {"tokens": [3, 4, 5], "response_length": 2, "reward": 1.0, "status": "completed"} | change
    template = _store(tmp_path, {"rollout_id": 0, "samples": [fields]})
    with pytest.raises(SpecError) as caught:
        data.load_samples(template, 0, num_samples=1, vocab_size=14)
    assert str(caught.value).startswith(f"{tmp_path}/0.pt: {reason}")


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


def test_questions_depend_on_seed_and_rollout_alone() -> None:
    first = task.make_questions(1, 2, 50, 99)
    assert task.make_questions(1, 2, 50, 99) == first
    assert task.make_questions(1, 3, 50, 99) != first
    assert task.make_questions(2, 2, 50, 99) != first
    assert task.make_questions(1, 2, 3, 99) == first[:3]


def test_every_answer_is_the_sum_and_operands_stay_in_range() -> None:
    for question in task.make_questions(5, 0, 200, 12):
        a, b = question.prompt.removesuffix("=").split("+")
        assert question.answer == str(int(a) + int(b))
        assert max(int(a), int(b)) <= 12


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("17$", 1.0),
        ("17", 2 / 3),
        ("1$", 1 / 3),
        ("27$", 2 / 3),
        ("177$", 0.5),
        ("$", 0.0),
        ("71$", 1 / 3),
        ("17?$", 0.5),
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
        (
            "--num-query-groups 3",
            "--num-query-groups: does not divide the attention heads, got 3, expected a divisor of 4",
        ),
        (
            "--kv-channels 7",
            "--kv-channels: rotary embedding needs an even size, got 7, expected an even number",
        ),
        (
            "--rollout-batch-size 4 --num-steps-per-rollout 3",
            "--num-steps-per-rollout: does not divide the samples of a rollout, got 3, expected a divisor of 32",
        ),
        (
            "--save-debug-rollout-data 0.pt",
            "--save-debug-rollout-data: does not fit, got '0.pt', expected a template with {rollout_id}",
        ),
        (
            "--debug-train-only",
            "--debug-train-only: no rollouts to train on\n  hint: add --load-debug-rollout-data",
        ),
        (
            "--load-debug-rollout-data {rollout_id} --debug-rollout-only",
            "--load-debug-rollout-data: excludes --debug-rollout-only and --save-debug-rollout-data",
        ),
    ],
)
def test_contradictions_are_refused(flags: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_args(flags.split())
    assert str(caught.value) == message
