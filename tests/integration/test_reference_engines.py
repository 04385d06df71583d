"""An agreement run of the reference trainer: planted defects are found and named, clean runs raise no alarm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlk_repro.analysis.checks import check_pair
from rlk_repro.integration.measure.installation import find_installation
from rlk_repro.integration.switch import TIMERS
from rlk_repro.logs.engines import EngineLog, read_engines
from rlk_repro.refengine import core
from rlk_repro.refengine.__main__ import main
from rlk_repro.rundir.agreement import AgreementCheck, CheckKind, CheckWord, list_failures
from rlk_repro.rundir.paths import TrialDir
from tests.support.planted_defects import DEFECTS

SMALL = (
    "--num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 4 --micro-batch-size 4 --num-steps-per-rollout 2 "
    "--num-layers 3 --hidden-size 32 --num-attention-heads 2 --use-kl-loss --entropy-coef 0.1 --num-threads 1 "
    "--device cpu --custom-megatron-init-path rlk_repro.integration.reference.install"
)
Record = Callable[..., EngineLog]
pytestmark = pytest.mark.usefixtures("without_rl_kernel")


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch_as_it_was: None) -> Iterator[Record]:
    """Runs a trial in this process and reads what it recorded of its engines."""
    numbers = iter(range(100))

    def run(flags: str = "") -> EngineLog:
        trial = TrialDir(tmp_path / str(next(numbers)))
        monkeypatch.setenv("RLK_REPRO_OPS_DIR", str(trial.ops))
        monkeypatch.setenv("RLK_REPRO_ENGINES_DIR", str(trial.engines))
        assert main(f"{SMALL} {flags}".split()) == 0
        installation = find_installation(core, TIMERS)
        assert installation is not None
        installation.undo()
        log = read_engines(trial)
        assert log is not None
        return log

    yield run
    installation = find_installation(core, TIMERS)
    if installation is not None:
        installation.undo()


def check(log: EngineLog, other: EngineLog | None = None) -> list[AgreementCheck]:
    return list(check_pair("p1", [("baseline", log), ("enabled", other or log)]))


@pytest.mark.parametrize("is_strong", [False, True], ids=["weak", "strong"])
@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found_and_named(
    name: str, is_strong: bool, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, kind, words = DEFECTS[name]
    plant(monkeypatch, is_strong)
    checks = check(record())
    first = list_failures(checks)[0]
    assert first.kind == kind
    assert words[is_strong] in first.found


@pytest.mark.parametrize("is_strong", [False, True], ids=["weak", "strong"])
def test_a_sum_that_depends_on_the_batch_is_told_from_another_layer(
    is_strong: bool, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine against itself: alone the samples are too few rows to be split."""
    DEFECTS["batch-dependent sum"][0](monkeypatch, is_strong)
    failed = {(item.first, item.second): item.found for item in list_failures(check(record()))}
    assert failed["training", "training, alone"].startswith("first outside at layer 1 mlp")
    assert ("rollout, prompts", "reference") not in failed


def test_a_clean_run_measures_every_engine_and_says_what_it_cannot(record: Record) -> None:
    checks = check(record())
    assert {item.word for item in checks} == {CheckWord.PASS, CheckWord.NOT_MEASURED}
    own = [item for item in checks if item.variant == "baseline" and item.step == 0]
    pairs = {(item.first, item.second) for item in own if item.kind is CheckKind.LOG_PROBS}
    assert len(pairs) == 6  # training, generated, prompts, reference
    cases = {(item.first, item.second): item.word for item in own if item.kind is CheckKind.INVARIANCE}
    assert [case for (engine, case), word in cases.items() if engine == "training" and word is CheckWord.PASS] == [
        *("alone", "packed", "padded", "reordered")
    ]
    missing = {case for (_, case), word in cases.items() if word is CheckWord.NOT_MEASURED}
    assert missing == {"recomputed", "tensor parallel 2", "prefix cache"}
    layers = next(item for item in own if item.kind is CheckKind.LAYERS)
    assert layers.points[:4] == ("layer 0 attention", "layer 0 mlp", "layer 0 residual", "layer 1 attention")
    assert layers.points[-2:] == ("final norm", "logits")


def test_the_record_changes_no_number_of_the_training(
    record: Record, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def list_steps() -> list[str]:
        found = [message for message in caplog.messages if message.startswith("step ")]
        caplog.clear()
        return found

    caplog.set_level("INFO")
    record()
    with_record = list_steps()
    monkeypatch.delenv("RLK_REPRO_ENGINES_DIR")
    monkeypatch.setenv("RLK_REPRO_OPS_DIR", str(tmp_path / "plain"))
    assert main(SMALL.split()) == 0
    assert with_record == list_steps() != []


def test_other_tokens_are_not_compared_between_trials(record: Record) -> None:
    checks = check(record(), record("--seed 7"))
    both = [item for item in checks if item.variant == "both"]
    assert {item.word for item in both} == {CheckWord.NOT_MEASURED}
    assert both[0].found == "the trials have other tokens at this step"
