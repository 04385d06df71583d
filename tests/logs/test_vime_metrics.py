"""Which metrics a run of vime yields: the table of docs/metrics.md, and what the parser finds in a log."""

from __future__ import annotations

import lzma
import re
from pathlib import Path

import pytest

from rlk_repro.bundle.seal import open_bundle
from rlk_repro.logs.metrics import METRICS, metric_series
from rlk_repro.logs.vime import parse_log
from rlk_repro.report.labels import _LABELS as LABELS
from tests import ROOT
from tests.support.slurm.examples import plan_for
from tests.support.vime_metrics import REQUIRED, SHOWN, Setting, State, metric_states, render_table

LOG = ROOT / "tests" / "assets" / "logs" / "live.log"
# what vime leaves out of its lines in another setting (actor.py, loss.py and ray/rollout.py at the pinned commit)
LEFT_OUT = {
    "live": (),
    "live, one optimizer step": ("perf/log_probs_time",),
    "live, no KL loss": ("perf/ref_log_probs_time", "train/kl_loss"),
    "fixed-rollout": (),
    "train-only": ("perf/rollout_time", "perf/tokens_per_gpu_per_sec"),
}


def test_the_page_has_the_table() -> None:
    assert render_table() in (ROOT / "docs" / "metrics.md").read_text()


def test_every_required_metric_has_a_name_in_the_report() -> None:
    from_log = {metric.name for metric in METRICS}
    for item in REQUIRED:
        for metric in item.metrics:
            assert metric in (from_log if item.is_in_log else LABELS), metric


def test_the_sources_are_those_that_the_parser_reads() -> None:
    keys = {metric.name: {key for _, key in metric.sources} for metric in METRICS}
    for item in REQUIRED:
        if item.is_in_log:
            named = set(re.findall(r"`([a-z_/]+)`", item.source))
            assert named <= set.union(*(keys[metric] for metric in item.metrics)), item.what


@pytest.mark.parametrize("name", SHOWN)
def test_the_table_of_metrics_equals_what_the_parser_finds(name: str, tmp_path: Path) -> None:
    text = LOG.read_text()
    for key in LEFT_OUT[name]:
        text = re.sub(rf"'{re.escape(key)}': [^,}}]+(, )?", "", text)
    log = tmp_path / "stdout.log"
    log.write_text(text)
    found = metric_series(parse_log(log), num_rollouts=3, num_steps_per_rollout=1)
    states = metric_states(SHOWN[name])
    for item in REQUIRED:
        if item.is_in_log:
            for metric in item.metrics:
                has_values = any(sample is not None for sample in found[metric])
                assert has_values is (states[metric] is not State.ABSENT), metric


@pytest.mark.parametrize(
    ("settings", "absent", "void"),
    [
        ((), set(), set()),
        (("workload.grpo.num_steps_per_rollout=1", "workload.grpo.global_batch_size=256"), {"log_probs_time_s"},
         {"ppo_kl", "pg_clipfrac"}),
        (("workload.grpo.use_kl_loss=false",), {"ref_log_probs_time_s", "kl_loss"}, set()),
        (("lane=train-only",), {"rollout_time_s", "rollout_tokens_per_gpu_per_s"},
         {"weight_sync_time_s", "raw_reward"}),
        (("lane=fixed-rollout",), set(), {"rollout_time_s", "rollout_tokens_per_gpu_per_s", "raw_reward"}),
        (("entropy_metric=false",), set(), {"entropy"}),
    ],
)  # fmt: skip
def test_the_settings_of_a_run_decide(settings: tuple[str, ...], absent: set[str], void: set[str]) -> None:
    usual = ("lane=live", "measure.design=parallel", "entropy_metric=true")
    states = metric_states(Setting.of(plan_for("qwen3-4b", "h200", settings=(*usual, *settings))))
    assert {metric for metric, state in states.items() if state is State.ABSENT} == absent
    assert {metric for metric, state in states.items() if state is State.VOID} == void


def test_the_log_of_a_failed_trainer_has_its_metrics(tmp_path: Path) -> None:
    """Whole, as vime 1fc199d9 wrote it on one H200 with Transformer Engine 2.12 and Ray 2.60."""
    log = tmp_path / "stdout.log"
    log.write_bytes(lzma.decompress((LOG.parent / "vime-train-only-h200.log.xz").read_bytes()))
    check_log(log, "train-only", 1)


def test_the_logs_of_the_evidence_have_the_metrics_of_the_table() -> None:
    with open_bundle(ROOT / "docs" / "evidence" / "qwen3-4b-random-live-h200.tgz") as run_dir:
        logs = sorted(run_dir.root.glob("trials/*/stdout.log"))
        assert len(logs) == 4
        for log in logs:
            check_log(log, "live", 27)
        assert not list(run_dir.root.glob("rollouts/*/stdout.log"))


def check_log(log: Path, lane: str, num_rollouts: int) -> None:
    parsed = parse_log(log)
    assert (parsed.reject_counts, len(parsed.rows["perf"]), len(parsed.rows["step"])) == (
        {},
        num_rollouts,
        2 * num_rollouts,
    )
    found = metric_series(parsed, num_rollouts=num_rollouts, num_steps_per_rollout=2)
    states = metric_states(SHOWN[lane])
    for item in REQUIRED:
        if item.is_in_log:
            for metric in item.metrics:
                num_values = sum(sample is not None for sample in found[metric])
                # a sync of weights is told in the line of the next rollout
                least = num_rollouts - 1 if metric == "weight_sync_time_s" else num_rollouts
                assert num_values >= (0 if states[metric] is State.ABSENT else least), metric
