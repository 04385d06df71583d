"""The command line: what follows from what, and what is refused."""

from __future__ import annotations

import pytest

from rlk_repro.base.errors import SpecError
from rlk_repro.refengine.__main__ import main
from rlk_repro.refengine.arguments import parse_args


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


@pytest.mark.parametrize(
    "flags",
    [
        *("--learning-rate 1", "--num-roll 3", "--lr -1", "--lr nan", "--num-layers 0", "--vocab-size 13"),
        *("--n-samples-per-prompt 1", "--num-threads 0"),
    ],
)
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
