"""The reference trainer under the integration: what is hooked, and whole small trials with their files read back."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlk_repro.analysis.proof import prove
from rlk_repro.integration import reference
from rlk_repro.integration.measure.installation import find_installation
from rlk_repro.integration.switch import TIMERS
from rlk_repro.logs.ops import read_ops
from rlk_repro.refengine import core, trainer
from rlk_repro.refengine.__main__ import main
from rlk_repro.refengine.optimizer import AdamW
from rlk_repro.rundir.paths import TrialDir
from rlk_repro.rundir.results import ProofStatus

SMALL = (
    "--num-rollout 3 --rollout-batch-size 4 --n-samples-per-prompt 4 --micro-batch-size 8 --use-kl-loss "
    "--entropy-coef 0 --num-threads 1 --device cpu "
    "--custom-megatron-init-path rlk_repro.integration.reference.install"
)
MODULE_TIMERS = {
    "grpo_loss_backward",
    "grpo_loss_forward",
    "log_probs_backward",
    "log_probs_forward",
    "log_probs_no_grad",
    "clip_kl_backward",
    "clip_kl_forward",
}
VARIABLES = ("VIME_RL_KERNEL", "VIME_RL_KERNEL_MODE", "VIME_RL_KERNEL_OPS", "RLK_REPRO_OPS_DIR")


@pytest.fixture(autouse=True)
def nothing_stays_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    installation = find_installation(core, TIMERS)
    if installation is not None:
        installation.undo()


def test_with_nothing_asked_for_nothing_is_touched() -> None:
    before = dict(vars(core)), AdamW.step, list(trainer.step_end_hooks)
    assert reference.install(argparse.Namespace(device="cpu")) is None
    assert before == (vars(core), AdamW.step, trainer.step_end_hooks)


def test_installing_twice_hooks_once_and_undo_takes_everything_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLK_REPRO_OPS_DIR", str(tmp_path / "ops"))
    before = dict(vars(core)), AdamW.step, list(trainer.step_end_hooks)
    args = argparse.Namespace(device="cpu")
    installation = reference.install(args)
    assert installation is not None
    assert reference.install(args) is installation
    assert trainer.step_end_hooks == [installation.end_step]
    installation.undo()
    assert before == (vars(core), AdamW.step, trainer.step_end_hooks)


@pytest.mark.usefixtures("torch_as_it_was", "without_rl_kernel")
def test_a_trial_in_auto_mode_falls_back_and_records_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trial = TrialDir(tmp_path)
    monkeypatch.setenv("RLK_REPRO_OPS_DIR", str(trial.ops))
    monkeypatch.setenv("VIME_RL_KERNEL", "1")
    monkeypatch.setenv("VIME_RL_KERNEL_MODE", "auto")
    assert main(SMALL.split()) == 0
    installation = find_installation(core, TIMERS)
    assert installation is not None
    installation.undo()
    assert sum("falls back to" in message for message in caplog.messages) == 2
    log = read_ops(trial)
    assert log.num_rejects == {}
    assert log.steps() == [0, 1, 2]
    assert '"event":"end"' in trial.ops_file(0).read_text().splitlines()[-1]
    assert set(log.timers) == {*MODULE_TIMERS, "optimizer", "step"}
    assert (log.calls["logp"].fallbacks, log.calls["ratio_kl"].fallbacks) == (12, 6)
    proof = prove(log, variant="enabled", requested_ops=("logp", "ratio_kl"), platform="cpu")
    assert proof.status is ProofStatus.FALLBACK
    assert proof.reason == "logp: RL-Kernel cannot be imported; ratio_kl: RL-Kernel cannot be imported"
    assert json.loads(trial.libraries_file(0).read_text())["schema"] == 1


@pytest.mark.usefixtures("torch_as_it_was", "without_rl_kernel")
def test_a_trial_in_require_mode_does_not_start_and_gives_the_reason_in_two_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLK_REPRO_OPS_DIR", str(tmp_path / "ops"))
    monkeypatch.setenv("VIME_RL_KERNEL", "1")
    assert main(SMALL.split()) == 3
    assert capsys.readouterr().err.splitlines() == [
        "this machine cannot: VIME_RL_KERNEL_MODE=require: logp, ratio_kl: RL-Kernel cannot be imported, "
        "expected no fallback",
        "  hint: repair the cause, remove the operator from VIME_RL_KERNEL_OPS, or set VIME_RL_KERNEL_MODE=auto",
    ]
    assert find_installation(core, TIMERS) is None
    assert not (tmp_path / "ops").exists()
