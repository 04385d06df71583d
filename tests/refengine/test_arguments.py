"""The command line: what follows from what, and what is refused."""

from __future__ import annotations

import re
import shlex

import pytest

from rlk_repro.base.errors import SpecError
from rlk_repro.refengine.__main__ import main
from rlk_repro.refengine.arguments import parse_args
from tests import ROOT

DOCUMENT = ROOT / "docs" / "reference-trainer.md"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", (1, 32, 32)),
        ("--num-steps-per-rollout 4", (4, 8, 8)),
        ("--global-batch-size 16", (2, 16, 16)),
        ("--global-batch-size 16 --num-steps-per-rollout 2 --micro-batch-size 3", (2, 16, 3)),
    ],
)
def test_batch_sizes_follow_from_each_other(flags: str, expected: tuple[int, int, int]) -> None:
    args = parse_args(["--rollout-batch-size", "4", "--n-samples-per-prompt", "8", *flags.split()])
    assert (args.num_steps_per_rollout, args.global_batch_size, args.micro_batch_size) == expected


def test_model_sizes_and_the_upper_clip_follow_from_the_others() -> None:
    args = parse_args(["--hidden-size", "48", "--num-attention-heads", "6", "--eps-clip", "0.1"])
    assert (args.num_query_groups, args.kv_channels, args.ffn_hidden_size, args.eps_clip_high) == (6, 8, 144, 0.1)


def test_loading_rollouts_is_the_train_only_lane() -> None:
    assert parse_args(["--load-debug-rollout-data", "x/{rollout_id}.pt"]).debug_train_only
    assert not parse_args([]).debug_train_only


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--hidden-size 50",
            "--hidden-size: does not fit, got 50, expected a multiple of --num-attention-heads",
        ),
        (
            "--num-query-groups 3",
            "--num-attention-heads: does not fit, got 4, expected a multiple of --num-query-groups",
        ),
        (
            "--kv-channels 7",
            "--kv-channels: does not fit, got 7, expected an even number, because RoPE rotates pairs",
        ),
        ("--vocab-size 13", "--vocab-size: does not fit, got 13, expected at least the 14 tokens of the task"),
        (
            "--n-samples-per-prompt 1",
            "--n-samples-per-prompt: does not fit, got 1, "
            "expected at least 2, because advantages compare the samples of a prompt",
        ),
        (
            "--rollout-batch-size 4 --global-batch-size 12",
            "--global-batch-size: does not fit, got 12, expected 32 samples per rollout divided by 2 steps",
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


@pytest.mark.parametrize("flags", ["--learning-rate 1", "--num-roll 3", "--lr -1", "--lr nan", "--num-layers 0"])
def test_unknown_shortened_and_impossible_flags_are_usage_errors(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(flags.split())
    assert caught.value.code == 2
    assert flags.split(maxsplit=1)[0] in capsys.readouterr().err


def test_a_users_error_is_two_lines_and_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--debug-train-only"]) == 2
    assert capsys.readouterr().err == (
        "input: --debug-train-only: no rollouts to train on\n  hint: add --load-debug-rollout-data\n"
    )


def test_the_documented_commands_parse() -> None:
    commands = re.findall(r"^python -m rlk_repro\.refengine((?:.*\\\n)*.*)", DOCUMENT.read_text(), re.MULTILINE)
    assert len(commands) >= 2
    for command in commands:
        parse_args(shlex.split(command.replace("\\\n", " ")))
