"""Rollouts made from a seed: real files by the real command, read as the trainer reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk_repro.base.errors import EnvironmentMissing, SpecError
from rlk_repro.base.files import sha256_bytes
from rlk_repro.prepare import random_rollouts
from rlk_repro.prepare.contents import load_contents
from rlk_repro.prepare.random_rollouts import RandomRollouts
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.rollout_files import check_file
from rlk_repro.spec import VimeWorkload
from rlk_repro.workloads import WORKLOADS
from tests.support.prepare_examples import words
from tests.support.run_plans import make_run_plan

Call = Callable[..., tuple[int, str, str]]
MADE = RandomRollouts(seed=1, num_files=2, num_samples=6, prompt_len=5, response_len=11, vocab_size=1000)
WITH_EXPERTS = replace(MADE, num_layers=2, num_experts=16, num_experts_per_token=4)


def load(folder: Path, number: int) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = torch.load(folder / f"{number}.pt", weights_only=True)["samples"]
    return samples


def test_values_follow_from_the_recipe_alone(tmp_path: Path) -> None:
    MADE.write(tmp_path)
    samples = [sample for number in range(2) for sample in load(tmp_path, number)]
    values = [(sample["index"], sample["tokens"], sample["reward"]) for sample in samples]
    assert sha256_bytes(repr(values).encode()) == "7b2013c12149d274e7222d4e247c25c7e7fa3089609bdb0f55817ccfa105a6ff"
    assert [sample["index"] for sample in samples] == list(range(12))
    for path in tmp_path.iterdir():
        check_file(path)


def test_a_sample_holds_what_training_needs_and_no_log_probs_of_an_engine(tmp_path: Path) -> None:
    MADE.write(tmp_path)
    for sample in load(tmp_path, 0):
        assert len(sample["tokens"]) == 16
        assert all(0 <= token < 1000 for token in sample["tokens"])
        assert sample["response_length"] == 11
        assert 0 <= sample["reward"] < 1
        assert "rollout_log_probs" not in sample


def test_tokens_and_rewards_are_spread_evenly(tmp_path: Path) -> None:
    replace(MADE, num_files=1, num_samples=64, response_len=995).write(tmp_path)
    samples = load(tmp_path, 0)
    tokens = torch.tensor([sample["tokens"] for sample in samples]).flatten()
    counts = torch.bincount(tokens // 100, minlength=10).double()
    expected = len(tokens) / 10
    assert (
        (counts - expected) ** 2 / expected
    ).sum() < 27.9  # chi-squared with 9 degrees of freedom, one in a thousand
    assert len({sample["reward"] for sample in samples}) > 32


def test_samples_grow_from_rollout_to_rollout_and_the_last_ones_have_full_length(tmp_path: Path) -> None:
    growing = replace(MADE, num_files=3, growth=4)
    growing.write(tmp_path)
    lengths = [
        {(len(item["tokens"]), item["response_length"]) for item in load(tmp_path, number)} for number in range(3)
    ]
    assert lengths == [{(8, 3)}, {(12, 7)}, {(16, 11)}]
    assert [growing.find_response_len(number) for number in range(3)] == [3, 7, 11]
    assert growing.recipe == {**MADE.recipe, "num_files": 3, "growth": 4}
    assert growing.num_bytes == 6 * (8 + 12 + 16) * 5


def test_each_token_goes_to_distinct_experts(tmp_path: Path) -> None:
    WITH_EXPERTS.write(tmp_path)
    experts = load(tmp_path, 1)[3]["rollout_routed_experts"]
    assert (experts.dtype, experts.shape) == (torch.int32, (15, 2, 4))
    assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 16 for row in experts.view(-1, 4).tolist())


def test_without_torch_the_error_says_where_to_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_rollouts, "MODULE", "rlk_repro.no_such_module")
    with pytest.raises(
        EnvironmentMissing, match=r"No module named rlk_repro.no_such_module\), expected a Python with torch"
    ):
        MADE.write(tmp_path)


@pytest.mark.parametrize("run", ["qwen3-4b-random", "qwen3-30b-a3b-random-8l"])
def test_a_run_with_a_seed_stores_nothing_and_trains_on_them(tmp_path: Path, run: str) -> None:
    plan = make_run_plan(run, "h200")
    run_dir = RunDir(tmp_path / "runs" / run / "id")
    assert WORKLOADS["vime"].rollout_commands(plan, run_dir) == {}
    command = WORKLOADS["vime"].trainer_command(plan, plan.trials[0], run_dir)
    assert command.stored is not None
    assert command.stored.path.parent == tmp_path / "runs" / "prepared" / "rollouts"
    assert isinstance(plan.run.workload, VimeWorkload)
    made = RandomRollouts.of(plan.run, plan.run.workload)
    assert made is not None
    assert made.num_files == plan.run.measure.num_stored
    assert bool(made.num_experts) is (run == "qwen3-30b-a3b-random-8l")


def test_prepare_makes_them_and_no_prompts(tmp_path: Path, call: Call) -> None:
    asked = words("--set", "lane=train-only", "--set", "workload.rollouts_seed=7", "--set", "measure.pairs=2")
    asked += [
        "--set",
        "measure.warmup_steps=1",
        "--set",
        "measure.scored_steps=2",
        "--set",
        "workload.grpo.rollout_max_response_len=8",
    ]
    code, out, err = call(*asked)
    assert code == 0, err
    assert "measure.scored_steps: submit needs --exploratory for this setting, which changes a measurement rule" in err
    assert "dataset" not in out
    folders = list(tmp_path.glob("**/rollouts/random-*"))
    contents = [load_contents(folder) for folder in folders if folder.is_dir()]
    assert [sorted(item.files) for item in contents if item is not None] == [["0.pt", "1.pt", "2.pt"]]


def test_named_rollouts_and_a_seed_exclude_each_other() -> None:
    named = f"workload.rollouts={{name: a, num_files: 40, digest: 'sha256:{'0' * 64}', made_by: a test}}"
    with pytest.raises(
        SpecError, match=r"workload\.rollouts_seed: contradicts the key `rollouts`, which is also set, got 1234"
    ):
        make_run_plan("qwen3-4b-random", "h200", named)
