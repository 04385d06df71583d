"""What a step saves is predicted from other bundles; what nobody measured is refused, with the run that would tell."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlk_repro.prediction import Measured, load_measured, predict
from rlk_repro.statistics.stats import prediction_interval, t_interval, t_quantile
from tests import ROOT

Call = Callable[..., tuple[int, str, str]]
FOLDER = ROOT / "docs" / "evidence"
SHIPPED = load_measured()
WHOLE = [row for row in SHIPPED if not row.is_module and row.hardware == "h200"]
PAGE = (ROOT / "docs" / "statistics.md").read_text()


@pytest.mark.parametrize("row", WHOLE, ids=lambda row: row.name)
def test_a_whole_step_is_predicted_without_its_own_bundle(row: Measured) -> None:
    """A measured saving has an error of its own, so it is held against both half widths together."""
    found = predict(row, [other for other in SHIPPED if other.bundle != row.bundle])
    no_grad_ms, loss_ms = (row.logits * ps / 1e9 for ps in (row.passes * row.no_grad_ps, row.loss_ps))
    is_against_vime = row.baseline == "trainer"
    for part, measured_ms in zip(found.parts, (no_grad_ms, loss_ms), strict=True):
        assert part.saved_ms == pytest.approx(measured_ms, rel=0.05 if is_against_vime else 0.4)
    half_ms = (found.high_ms - found.low_ms) / 2
    assert half_ms <= 0.25 * found.saved_ms
    own_ms = t_quantile(0.95, row.n - 1) * row.error_ms
    both_ms = math.hypot(half_ms, own_ms)
    word = "inside" if abs(row.saved_ms - found.saved_ms) <= both_ms else "outside"
    ends = f"{found.saved_ms - both_ms:.0f} to {found.saved_ms + both_ms:.0f}"
    figures = f"{found.saved_ms:.1f} ± {half_ms:.1f} | {row.saved_ms:.1f} ± {own_ms:.1f} (n = {row.n})"
    assert f"| `{row.name.removesuffix('.tgz')}` | {figures} | {ends} | {word} |" in PAGE


def test_about_one_step_of_twenty_lies_outside() -> None:
    assert PAGE.count("| outside |") <= 0.1 * len(WHOLE)


def test_a_step_of_another_size_has_no_known_time_and_what_costs_time_has_its_ends_in_order(call: Call) -> None:
    larger = ("--set", "workload.grpo.rollout_batch_size=256", "--set", "workload.grpo.global_batch_size=512")
    assert (
        "no share of a step: its time is unknown"
        in call("predict", "qwen3-4b-random", "--hardware", "h200", *larger)[1]
    )
    row = next(row for row in WHOLE if row.name == "qwen3-4b-random-027c809-h200.tgz")
    costly = [
        replace(other, no_grad_ps=-other.no_grad_ps, loss_ps=-other.loss_ps, saved_ms=-other.saved_ms)
        for other in SHIPPED
    ]
    found = predict(row, costly)
    assert found.low_ms < found.saved_ms < found.high_ms < 0


def test_another_gpu_of_a_host_does_not_narrow_the_interval() -> None:
    row = next(row for row in WHOLE if row.name == "qwen3-4b-random-027c809-h200.tgz")
    other = replace(row, bundle="f" * 12, gpus="GPU-ffffffff")
    alone, beside, elsewhere = (
        predict(row, [*SHIPPED, *more]).low_ms for more in ((), (other,), (replace(other, boots="ffffffff"),))
    )
    assert alone == pytest.approx(beside)
    assert elsewhere != pytest.approx(alone)


@pytest.mark.long
@pytest.mark.parametrize(("sessions", "error"), [(3, 0.3), (3, 1), (4, 3), (16, 0.5), (5, 0.1)])
def test_both_half_widths_together_hold_a_measured_value(sessions: int, error: float) -> None:
    """Of eight steps' savings with a standard deviation of 1, and one more, whose mean of sessions has ``error``."""
    source, held, number = random.Random(f"{sessions} {error}"), 0, 4000
    for _ in range(number):
        ahead = prediction_interval([source.gauss(0, 1) for _ in range(8)], 0.95)
        true, noise = source.gauss(0, 1), error * math.sqrt(sessions)
        own = t_interval([true + source.gauss(0, noise) for _ in range(sessions)], 0.95)
        assert ahead is not None
        assert own is not None
        both = math.hypot(ahead.high - ahead.estimate, own.high - own.estimate)
        held += abs(own.estimate - ahead.estimate) <= both
    assert 0.945 <= held / number <= 0.985


@pytest.mark.parametrize("row", SHIPPED[:1], ids=lambda row: row.name)
def test_a_shipped_row_is_what_its_bundle_gives(call: Call, tmp_path: Path, row: Measured) -> None:
    assert call("predict", str(FOLDER / row.name), "-o", str(tmp_path / "savings.json"))[0] == 0
    assert json.loads((tmp_path / "savings.json").read_text()) == [row.to_json()]


def test_every_bundle_of_a_module_run_or_a_whole_step_is_shipped() -> None:
    found = {path.name for kind in ("module-qwen3*", "*-random*") for path in FOLDER.glob(f"{kind}.tgz")}
    assert {row.name for row in SHIPPED} == found


LOG = """
  actor_num_gpus_per_node ......................... 4
  actor_num_nodes ................................. 1
  max_tokens_per_gpu .............................. 16384
  padded_vocab_size ............................... {vocab}
  context_parallel_size ........................... 1
  pipeline_model_parallel_size .................... {pp}
  tensor_model_parallel_size ...................... 1
"""
ROW = "[2026-11-26 16:29:17] a.py:50 - perf {}: {{'perf/step_time': 20.5, 'perf/train_time': 16.0, "
ROW += "'perf/log_probs_time': 3.0, 'perf/actor_train_time': 10.0, 'perf/actor_train_tok_per_s': 40000.0}}\n"
STEP = "[2026-11-26 16:29:17] a.py:50 - step {}: {{'train/loss': 0.1, 'train/entropy_loss': {}}}\n"


@pytest.mark.parametrize(
    ("vocab", "pp", "entropy", "options", "code", "words"),
    [
        (128256, 1, 0.0, "", 0, ("ms less a step", "of a step of 20.50 s, the median of 3 steps of the log",
                                 "1 pass without gradient", "module-qwen3-4b-027c809-h200.tgz (9981a3706c11)")),
        (128256, 1, 0.0, "--step-time 10 --passes 0", 0, ("0 passes without", "of a step of 10.00 s, as given")),
        (128256, 1, 0.0, "--stack vime-host", 0, ("RL-Kernel 202f0e3 on one more H200",)),
        (128256, 1, 4.2, "", 0, ("ms less a step", "module-qwen3-4b-027c809-entropy-h200.tgz (11055e3d4346)")),
        (128256, 1, 4.2, "--tp 8", 1, ("with vime's entropy metric", "submit module-qwen3-4b --hardware h200 --stack",
                                       "--set workload.batch.vocab_size=129024", "--set entropy_metric=true --wait")),
        (128256, 1, 4.2, "--no-entropy", 0, ("ms less a step",)),
        (248320, 1, 0.0, "", 1, ("got '248,320', expected 75,", "vocab_size=248320")),
        (128256, 1, 0.0, "--tp 8", 1, ("TP 8", "--set layouts.h200.tensor_parallel=8")),
        (128256, 2, 0.0, "", 1, ("layout: was not measured, got 'PP 2, CP 1'",)),
        (128256, 1, 0.0, "--tp 0", 2, ("Invalid value for '--tp'",)),
        (128256, 1, 0.0, "--stack host", 1, ("constants: were not measured",)),
        (128256, 1, 0.0, "--hardware mi300x", 1, ("mi300x: constants: were not measured",)),
    ],
)  # fmt: skip
def test_a_log_of_another_shape(
    call: Call, tmp_path: Path, vocab: int, pp: int, entropy: float, options: str, code: int, words: tuple[str, ...]
) -> None:
    log = tmp_path / "my.log"
    steps = "".join(ROW.format(index) + STEP.format(index, entropy) for index in range(5))
    log.write_text(LOG.format(vocab=vocab, pp=pp) + steps)
    begin = time.process_time()
    got, out, err = call("predict", str(log), "--hardware", "h200", *options.split())  # the last one counts
    assert (got, time.process_time() - begin < 1) == (code, True)
    assert [word for word in words if word not in out + err] == []


def test_a_log_without_arguments_says_what_it_needs(call: Call, tmp_path: Path) -> None:
    (tmp_path / "my.log").write_text("".join(ROW.format(index) for index in range(5)))
    code, _, err = call("predict", str(tmp_path / "my.log"))
    assert code == 2
    assert [line.split(": ")[1] for line in err.splitlines()] == [
        "--hardware", "--vocab", "--tp", "--tokens", "--microbatch", "--entropy"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ("qwen3-4b-random", ("predicted        82 ms less", "may miss what is predicted")),
        ("qwen3-4b-random-live", ("predicted        118 ms less", "cannot see what is predicted")),
        ("qwen3-30b-a3b", ("predicted        nothing: h200: constants: were not measured",)),
    ],
)
def test_a_dry_run_prints_the_prediction_beside_what_the_plan_sees(
    call: Call, run: str, words: tuple[str, ...]
) -> None:
    out = call("submit", run, "--hardware", "h200", "--dry-run")[1]
    assert [word for word in words if word not in out] == []
