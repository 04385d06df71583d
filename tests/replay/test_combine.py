"""Several bundles of one experiment give one effect per machine, and a claim only from three machines on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rlk_repro.base.errors import CheckFailed
from rlk_repro.replay.combine import _number_hosts, _Seen, combine, describe
from rlk_repro.statistics.stats import mean, prediction_interval, t_interval
from tests import ROOT

FOLDER = ROOT / "docs" / "evidence"
R3 = [FOLDER / f"qwen3-30b-a3b-random-4l{part}-h200.tgz" for part in ("", "-six", "-sixteen")]
MODULE = [FOLDER / f"module-qwen3-4b-027c809{part}-h200.tgz" for part in ("", "-second")]


def test_three_bundles_of_five_machines_give_the_figures_of_the_audit() -> None:
    found = combine(R3)
    assert (found.num_machines, found.num_hosts, found.unit) == (5, 5, "host")
    assert [machine.n for machine in found.machines] == [4, 6, 10, 3, 3]
    ends = [found.ratio, found.high, found.low, found.next_high, found.next_low]
    saved = [round(100 - 100 * value, 2) for value in ends if value is not None]
    assert saved == [13.90, 13.20, 14.59, 12.18, 15.58]
    lines = list(describe(found))
    assert lines[0].endswith("13.90 % less time (95 % interval 13.20 % to 14.59 %) on 5 NVIDIA H200s on 5 hosts")
    assert lines[-1].endswith("expected_block_sd_pct, h200, sessions (--json has the values)")


def test_two_machines_support_no_claim_about_their_kind() -> None:
    found = combine(MODULE)
    assert (found.num_machines, found.low, found.next_high) == (2, None, None)
    assert "a claim about this kind of GPU needs 3 machines" in next(describe(found))


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([R3[0], MODULE[0]], "is another experiment"),
        ([MODULE[0], FOLDER / "module-qwen3-4b-202f0e3-h200.tgz"], "commits.rl_kernel: is another experiment"),
        ([MODULE[0], MODULE[0]], "is named twice"),
        ([FOLDER / "module-qwen3-4b-compile-h200.tgz"], "compares no step times, got 'not comparable'"),
    ],
)
def test_what_cannot_be_combined_is_refused(sources: list[Path], message: str) -> None:
    with pytest.raises(CheckFailed, match=message):
        combine(sources)


def test_machines_that_share_a_boot_or_a_gpu_are_one_host() -> None:
    seen = [("g1", "b1"), ("g2", "b1"), ("g3", "b2"), ("g1", "b3")]
    assert _number_hosts([_Seen(gpus=frozenset({gpu}), boots={boot}) for gpu, boot in seen]) == [0, 0, 1, 0]


@pytest.mark.long
@pytest.mark.parametrize("sd_machines", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("sizes", [(3, 3, 3), (10, 3, 3, 6, 4), (2, 2, 3, 2, 3, 2)])
def test_the_intervals_hold_the_mean_machine_and_the_next_one(sd_machines: float, sizes: tuple[int, ...]) -> None:
    source = random.Random(f"{sd_machines} {sizes}")
    number, held, ahead = 20_000, 0, 0
    for _ in range(number):
        values = []
        for size in sizes:
            machine = source.gauss(0, sd_machines)
            values.append(mean([machine + source.gauss(0, 0.3) for _ in range(size)]))
        interval, wider = t_interval(values, 0.95), prediction_interval(values, 0.95)
        assert interval is not None
        assert wider is not None
        held += interval.low <= 0 <= interval.high
        following = source.gauss(0, sd_machines) + source.gauss(0, 0.3 / max(sizes) ** 0.5)
        ahead += wider.low <= following <= wider.high
    assert 0.93 <= held / number <= 0.975
    assert 0.93 <= ahead / number <= 0.975
