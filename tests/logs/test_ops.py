"""Ops files are read however damaged they are, and prove no more than they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_repro.analysis.proof import Proof, prove
from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.logs import engines
from rlk_repro.logs.operators import parse_operators
from rlk_repro.logs.ops import MAX_METRICS, OpsLog, TimerSample, read_ops
from rlk_repro.logs.ops_lines import OpCount
from rlk_repro.logs.telemetry import Telemetry, find_throttled, parse_telemetry
from rlk_repro.logs.vime import parse_log
from rlk_repro.rundir.paths import TrialDir
from rlk_repro.rundir.results import DecisionSummary, ProofStatus

OPS = ("logp", "ratio_kl")
CLASSES = {"logp": "FusedLogpGenericOp", "ratio_kl": "TritonRatioKLOp"}


def make_install(rank: int = 0, **changes: Any) -> dict[str, Any]:
    install = {
        "schema": 1, "event": "install", "mode": "require", "is_requested": True, "ops": list(OPS), "rank": rank,
        "world_size": 1, "trainer": "vime", "platform": "cuda", "of_a_newer_version": 1,
    }  # fmt: skip
    return install | changes


def make_decision(op: str, **changes: Any) -> dict[str, Any]:
    decision = {"event": "decision", "op": op, "implementation": CLASSES[op], "version": "0.1.0", "reason": ""}
    return decision | {"is_rl_kernel": True} | changes


def make_step(step: int, seconds: float = 1.0, *, calls: int = 2, fallbacks: int = 0) -> dict[str, Any]:
    count = {"calls": calls, "tokens": 10 * calls, "fallbacks": fallbacks}
    timers, memory = {"step": seconds, "optimizer": seconds / 4}, {"peak_allocated_bytes": int(1e9 * seconds)}
    return {"event": "step", "step": step, "timers": timers, "memory": memory, "calls": dict.fromkeys(OPS, count)}


def make_events(rank: int = 0, *, world_size: int = 1, num_steps: int = 3) -> list[dict[str, Any]]:
    head = [make_install(rank, world_size=world_size), *(make_decision(op) for op in OPS)]
    return [*head, *(make_step(step) for step in range(num_steps)), {"event": "end", "num_steps": num_steps}]


def write_rank(trial: TrialDir, rank: int, events: list[dict[str, Any]]) -> None:
    path = trial.ops_file(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def prove_events(tmp_path: Path, events: list[dict[str, Any]], **changes: Any) -> Proof:
    trial = TrialDir(tmp_path)
    write_rank(trial, 0, events)
    return prove_log(read_ops(trial), **changes)


def prove_log(log: OpsLog, *, variant: str = "enabled", platform: str = "cuda", num_stages: int = 1) -> Proof:
    return prove(log, variant=variant, requested_ops=OPS, platform=platform, num_stages=num_stages)


def test_series_hold_the_slowest_rank_of_each_step_with_its_line(tmp_path: Path) -> None:
    trial = TrialDir(tmp_path)
    head = [make_install(0, world_size=3)]
    write_rank(trial, 0, [*head, make_step(0, 1.0), make_step(1, 4.0)])
    write_rank(trial, 1, [make_install(1, world_size=3), make_step(0, 2.0), make_step(1, 3.0)])
    log = read_ops(trial)
    assert log.timers["step"] == {
        0: TimerSample(value=2.0, source="ops/1.jsonl", line=2),
        1: TimerSample(value=4.0, source="ops/0.jsonl", line=3),
    }
    assert log.timers["optimizer"][0].value == 0.5
    assert log.memory["peak_allocated_bytes"][1].value == 4_000_000_000
    assert log.calls["logp"] == OpCount(calls=8, tokens=80)
    assert log.calls_in("logp", 1) == OpCount(calls=4, tokens=40)
    assert log.steps() == [0, 1]
    assert log.missing_ranks == (2,)
    assert log.num_rejects == {}


def test_energy_is_the_sum_of_all_ranks_or_nothing(tmp_path: Path) -> None:
    trial = TrialDir(tmp_path)
    used = [[100.5, 200.0, None, 3.0], [50.25, None, 7.0, 4.0]]
    for rank, joules in enumerate(used):
        steps = [make_step(step) | ({} if value is None else {"energy_j": value}) for step, value in enumerate(joules)]
        write_rank(trial, rank, [make_install(rank, world_size=2), *steps[: 4 - rank]])
    assert read_ops(trial).energy == {0: TimerSample(value=150.75, source="ops/0.jsonl", line=2)}
    for rank in range(2):
        write_rank(trial, rank, [make_install(rank, world_size=3), make_step(0) | {"energy_j": 1.0}])
    log = read_ops(trial)
    assert (log.missing_ranks, log.energy) == ((2,), {})


GAP = {"max_abs": 1e-7, "mean_abs": 2e-8, "max_abs_baseline": 11.5, "n": 64}
SHADOW = {
    "event": "shadow", "step": 3, "case": "peaked", "calls": {"logp": {"calls": 1, "tokens": 64, "fallbacks": 0}},
    "log_probs": GAP, "log_probs_no_grad": GAP | {"max_abs": None},
    "loss": {"name": "policy loss", "baseline": -0.5, "enabled": None}, "logits_grad": GAP, "of_a_newer_version": 1,
}  # fmt: skip


def test_shadows_are_read_by_rank(tmp_path: Path) -> None:
    trial = TrialDir(tmp_path)
    write_rank(trial, 0, [make_install(0, world_size=2), SHADOW])
    failed = {"event": "shadow", "step": 3, "case": "peaked", "error": "no"}
    write_rank(trial, 1, [make_install(1, world_size=2), failed])
    log = read_ops(trial)
    first, second = (shadow for rank in log.ranks for shadow in rank.shadows)
    assert (first.step, first.case) == (second.step, second.case) == (3, "peaked")
    assert first.log_probs is not None
    assert first.log_probs_no_grad is not None
    assert (first.log_probs.max_abs, first.log_probs_no_grad.max_abs) == (1e-7, None)
    assert first.calls == {"logp": OpCount(calls=1, tokens=64)}
    assert (second.error, second.log_probs, log.calls) == ("no", None, {})


@pytest.mark.parametrize(
    "change",
    [
        {"log_probs": GAP | {"max_abs": -1.0}},
        {"log_probs": GAP | {"n": -1}},
        {"log_probs": GAP | {"mean_abs": "0"}},
        {"case": "p" * 101},
        {"error": "e" * 1001},
        {"calls": {f"op{number}": {} for number in range(17)}},
        {"loss": {"name": "policy loss"}},
    ],
)
def test_a_shadow_beyond_the_bounds_is_rejected(tmp_path: Path, change: dict[str, Any]) -> None:
    trial = TrialDir(tmp_path)
    write_rank(trial, 0, [make_install(), SHADOW | change, make_step(0)])
    log = read_ops(trial)
    assert (log.ranks[0].shadows, log.num_rejects, log.steps()) == ((), {"not an event": 1}, [0])


def test_ranks_are_read_in_their_order_and_other_files_are_not(tmp_path: Path) -> None:
    trial = TrialDir(tmp_path)
    for rank in (10, 2, 0):
        write_rank(trial, rank, make_events(rank, world_size=11))
    (trial.ops / "notes.jsonl").write_text("x\n")
    trial.ops_file(1).mkdir()
    assert [rank.rank for rank in read_ops(trial).ranks] == [0, 2, 10]


def test_a_trial_has_a_limited_number_of_timers(tmp_path: Path) -> None:
    folder = TrialDir(tmp_path)
    write_rank(folder, 0, [{**make_step(number), "timers": {f"t{number}": 1}, "memory": {}}
                           for number in range(MAX_METRICS + 2)])  # fmt: skip
    log = read_ops(folder)
    assert (len(log.timers), log.num_rejects) == (MAX_METRICS, {"too many metrics": 2})
    assert [*read_ops(folder, num_steps=2).timers] == ["t0", "t1"]


@pytest.mark.parametrize(
    ("text", "reason", "detail"),
    [
        ('{"event":"ste', "torn line", "Invalid JSON: EOF while parsing a string at line 1 column 13"),
        ("not json\n", "not an event", "Invalid JSON: expected ident at line 1 column 2"),
        ('{"event":"lunch"}\n', "not an event",
         "Input tag 'lunch' found using 'event' does not match any of the expected tags: "
         "'install', 'decision', 'step', 'shadow', 'kernels', 'end'"),
        ('{"event":"step","step":9,"timers":{"step":-1},"memory":{},"calls":{}}\n', "not an event",
         "step.timers.step: Input should be greater than or equal to 0"),
        (json.dumps(make_install(3)) + "\n", "another process's line", "rank 3"),
        (json.dumps(make_install()) + "\n", "another process's line", "rank 0"),
        (json.dumps(make_step(1)) + "\n", "step written twice", "step 1"),
        ('{"event":"end","event":"end"}\n', "not an event", "key 'event' is given twice"),
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_used_is_rejected_with_its_number(
    tmp_path: Path, text: str, reason: str, detail: str
) -> None:
    trial = TrialDir(tmp_path)
    write_rank(trial, 0, make_events())
    with trial.ops_file(0).open("a") as stream:
        stream.write(text)
    log = read_ops(trial)
    assert log.ranks[0].first_reject == f"line 8: {reason}: {detail}"
    assert log.num_rejects == {reason: 1}
    assert log.steps() == [0, 1, 2]
    assert prove_log(log).reason == f"ops/0.jsonl: line 8: {reason}: {detail}"


def test_a_newer_file_is_an_error(tmp_path: Path) -> None:
    trial = TrialDir(tmp_path)
    write_rank(trial, 0, [make_install(schema=2)])
    with pytest.raises(BundleUnreadable, match=r"ops/0.jsonl:1: written by a newer version, got 2"):
        read_ops(trial)


@settings(max_examples=30)
@given(data=st.data())
def test_a_file_torn_anywhere_yields_every_whole_line(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    trial = TrialDir(tmp_path_factory.mktemp("trial"))
    events = make_events(num_steps=data.draw(st.integers(0, 4)))[:-1]
    write_rank(trial, 0, events)
    whole = trial.ops_file(0).read_bytes()
    torn = whole[: data.draw(st.integers(0, len(whole)))]
    trial.ops_file(0).write_bytes(torn)
    rank = read_ops(trial).ranks[0]
    num_whole = torn.count(b"\n")
    num_read = (rank.install is not None) + len(rank.decisions) + len(rank.steps)
    # a line that lacks nothing but its newline is whole
    assert num_read - num_whole in {0, 1}
    assert sum(rank.num_rejects.values()) == (0 if torn.endswith(b"\n") or not torn else 1 - (num_read - num_whole))


@settings(max_examples=30)
@given(noise=st.lists(st.binary(max_size=40), max_size=5))
def test_no_bytes_crash_the_log_reader(tmp_path_factory: pytest.TempPathFactory, noise: list[bytes]) -> None:
    trial = TrialDir(tmp_path_factory.mktemp("trial"))
    write_rank(trial, 0, make_events())
    with trial.ops_file(0).open("ab") as stream:
        stream.write(b"\n".join(noise))
    assert read_ops(trial).steps() == [0, 1, 2]


NATIVE = "RL-Kernel's operator ran as plain PyTorch"


@pytest.mark.parametrize(
    ("changes", "platform", "status", "reason"),
    [
        ({}, "cuda", ProofStatus.PROVED, ""),
        ({1: make_decision("logp", implementation="NativeLogpOp"),
          2: make_decision("ratio_kl", implementation="NativeRatioKLOp")}, "cpu", ProofStatus.NATIVE,
         f"logp: {NATIVE}; ratio_kl: {NATIVE}"),
        ({0: make_install(is_requested=False, mode="off")}, "cuda", ProofStatus.MISSING,
         "ops/0.jsonl: the trainer was started with RL-Kernel off"),
        ({0: make_install(world_size=4)}, "cuda", ProofStatus.MISSING, "no ops file of rank 1, 2, 3"),
        ({0: {"event": "end"}}, "cuda", ProofStatus.MISSING, "ops/0.jsonl: has no record of the trainer's setup"),
        ({1: {"event": "end"}}, "cuda", ProofStatus.MISSING, "logp: no decision on rank 0"),
        ({1: make_decision("logp", is_rl_kernel=False, implementation="vime", reason="RL-Kernel cannot be imported")},
         "cuda", ProofStatus.FALLBACK, "logp: RL-Kernel cannot be imported"),
        ({1: make_decision("logp", implementation="NativeLogpOp")}, "cuda", ProofStatus.FALLBACK,
         "logp: NativeLogpOp is not an accepted implementation on cuda"),
        ({4: make_step(1, calls=0)}, "cuda", ProofStatus.MISSING,
         "logp: never called in step 1; ratio_kl: never called in step 1"),
        ({4: make_step(1, fallbacks=3)}, "cuda", ProofStatus.FALLBACK,
         "logp: 3 calls fell back; ratio_kl: 3 calls fell back"),
        ({5: make_step(2) | {"odd": {"logp": "RL-Kernel answered nan"}}}, "cuda", ProofStatus.MISSING,
         "logp: ops/0.jsonl:6: RL-Kernel answered nan"),
    ],
)  # fmt: skip
def test_missing_and_fallback_operators_are_named(
    tmp_path: Path, changes: dict[int, Any], platform: str, status: ProofStatus, reason: str
) -> None:
    events = [changes.get(place, event) for place, event in enumerate(make_events())]
    proof = prove_events(tmp_path, events, platform=platform)
    assert (proof.status, proof.reason) == (status, reason)


def test_a_rank_of_an_earlier_pipeline_stage_needs_no_calls(tmp_path: Path) -> None:
    trial = TrialDir(tmp_path)
    write_rank(trial, 0, make_events(0, world_size=2))
    idle = [make_install(1, world_size=2), *(make_decision(op) for op in OPS)]
    write_rank(trial, 1, [*idle, *(make_step(step, calls=0) for step in range(3))])
    assert prove_log(read_ops(trial), num_stages=2).status is ProofStatus.PROVED
    assert prove_log(read_ops(trial)).status is ProofStatus.MISSING


def test_a_rank_without_a_record_of_a_step_proves_nothing(tmp_path: Path) -> None:
    trial = TrialDir(tmp_path)
    for rank in range(2):
        write_rank(trial, rank, make_events(rank, world_size=2, num_steps=3 - rank))
    proof = prove_log(read_ops(trial))
    assert (proof.status, proof.reason) == (ProofStatus.MISSING, "ops/1.jsonl: has no record of step 2")


def test_a_baseline_asks_for_nothing_and_is_exposed_if_rl_kernel_ran_in_it(tmp_path: Path) -> None:
    quiet = [make_install(is_requested=False, mode="off", ops=[]), make_step(0)]
    assert prove_events(tmp_path, quiet, variant="baseline").status is ProofStatus.NOT_REQUESTED
    assert prove_log(OpsLog(ranks=()), variant="baseline").status is ProofStatus.NOT_REQUESTED
    assert prove_events(tmp_path, make_events(), variant="baseline").status is ProofStatus.PROVED


def test_decisions_are_summed_over_ranks(tmp_path: Path) -> None:
    trial = TrialDir(tmp_path)
    for rank in (0, 1):
        events = make_events(rank, world_size=2, num_steps=1)
        refused = make_decision("logp", implementation="vime", version="", reason="top-p", is_rl_kernel=False)
        events.insert(3, refused)
        events[4] = make_step(0, fallbacks=1)
        write_rank(trial, rank, events)
    assert read_ops(trial).decisions() == (
        DecisionSummary(op="logp", implementation="FusedLogpGenericOp", reason="", is_rl_kernel=True,
                        calls=4, tokens=40, fallbacks=0),
        DecisionSummary(op="logp", implementation="vime", reason="top-p", is_rl_kernel=False,
                        calls=0, tokens=0, fallbacks=2),
        DecisionSummary(op="ratio_kl", implementation="TritonRatioKLOp", reason="", is_rl_kernel=True,
                        calls=4, tokens=40, fallbacks=0),
    )  # fmt: skip


SEEN = ("void fused_logp_forward_online_kernel<float, 128>", "_ratio_kl_fwd_kernel", "_ratio_kl_bwd_kernel", "gemm")


def make_kernels(*names: str) -> dict[str, Any]:
    return {"event": "kernels", "names": list(names)}


def test_a_kernel_that_a_profiler_did_not_see_is_a_missing_proof(tmp_path: Path) -> None:
    assert prove_events(tmp_path, [*make_events(), make_kernels(*SEEN)]).status is ProofStatus.PROVED
    proof = prove_events(tmp_path, [*make_events(), make_kernels(*SEEN[:2])])
    assert proof.status is ProofStatus.MISSING
    assert proof.reason == "ratio_kl: ops/0.jsonl: the profiler saw no _ratio_kl_bwd_kernel"


@pytest.mark.parametrize(
    ("platform", "class_name", "forward"),
    [
        ("cuda", "BatchInvariantLogpSM90Op", "void batch_invariant_logp_sm90_kernel<float, 4>"),
        ("rocm", "TritonBatchInvariantLogpOp", "_batch_invariant_logp_kernel"),
    ],
)
def test_the_newer_log_prob_is_proved_by_both_kernels(
    tmp_path: Path, platform: str, class_name: str, forward: str
) -> None:
    backward = "_batch_invariant_logp_bwd_kernel"
    decisions = [make_decision(op, implementation=class_name) for op in OPS]

    def prove_kernels(*names: str) -> Proof:
        events = [make_events()[0], *decisions, *make_events()[3:], make_kernels(*names)]
        return prove_events(tmp_path, events, platform=platform)

    assert prove_kernels(forward, backward).status is ProofStatus.PROVED
    # where Triton fails, the class's backward pass runs plain PyTorch and reports nothing
    assert prove_kernels(forward, "gemm").reason == f"ratio_kl: ops/0.jsonl: the profiler saw no {backward}"
    assert forward.removeprefix("void ").partition("<")[0] in prove_kernels(backward).reason


def test_a_baseline_with_rl_kernels_kernels_is_not_a_baseline(tmp_path: Path) -> None:
    head = make_install(mode="off", is_requested=False, ops=[])
    step = make_step(0) | {"calls": {}}
    assert prove_events(tmp_path, [head, step, make_kernels("gemm")], variant="baseline").status is (
        ProofStatus.NOT_REQUESTED
    )
    proof = prove_events(tmp_path, [head, step, make_kernels(*SEEN)], variant="baseline")
    assert (proof.status, proof.reason) == (
        ProofStatus.MISSING,
        "ops/0.jsonl: RL-Kernel's void fused_logp_forward_online_kernel<float, 128> ran, though it was off",
    )


# The limits of an engine's record, which may be a stranger's file.


def test_every_piece_of_a_long_line_counts_and_an_endless_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "MAX_LINE_BYTES", 10)
    monkeypatch.setattr(engines, "MAX_BYTES", 100)
    path = tmp_path / "0.jsonl"
    path.write_bytes(b"x" * 35 + b"\n")
    assert list(engines._read_lines(path)) == [None] * 4
    path.write_bytes(b"{}\n" + b"x" * 1000)
    with pytest.raises(BundleUnreadable, match="too large"):
        list(engines._read_lines(path))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("node") / "telemetry.jsonl"


def parse(path: Path, *lines: bytes) -> Telemetry:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return parse_telemetry(path)


def sample(trial: str | None = "a", **fields: object) -> bytes:
    return json.dumps({"t": 1.5, "trial": trial, **fields}).encode()


def throttle(*reasons: str) -> bytes:
    return sample(gpus=[{"index": 0, "throttle_reasons": list(reasons)}])


def test_samples_are_counted_per_trial_and_rejects_by_reason(path):
    def gpus(*reasons: str) -> list[dict[str, object]]:
        return [{"index": number, "power_w": 655.0, "throttle_reasons": [item]} for number, item in enumerate(reasons)]

    lines = [
        sample(None, cpu_percent=3.0, rss_bytes=1 << 20, gpus=gpus("gpu_idle")),
        sample("a", cpu_percent=812.5, gpus=gpus("gpu_idle", "sw_power_cap")),
        sample("a", cpu_percent=799.0, gpus=gpus("hw_thermal_slowdown", "sw_power_cap")),
        sample("b", cpu_percent=None, gpus=[]),
        sample("b").replace(b"1.5", b'"noon"'),
        b"[1, 2]",
        b'{"t": 1795182305.0, "tri{"t": 1795182306.0, "trial": "b", "gpus": []}',
    ]
    path.write_bytes(b"\n".join([*lines, sample("b")[:-5]]))
    telemetry = parse_telemetry(path)
    assert telemetry.trials == {"a": {True: 1, False: 1}, "b": {}}
    assert telemetry.reject_counts == {"not JSON": 1, "not a sample": 2, "the last line is cut off": 1}


@pytest.mark.parametrize(
    ("reason", "fraction"),
    [
        *((name, 0.5) for name in ("hw_slowdown", "SwThermalSlowdown", "hw_power_brake_slowdown", "PROCHOT")),
        ("active_hbm_thrm", 0.5),
        *((name, 0.0) for name in ("sw_power_cap", "gpu_idle", "applications_clocks_setting")),
    ],
)
def test_only_protection_of_the_hardware_counts_as_throttled(path, reason, fraction):
    telemetry = parse(path, throttle("sw_power_cap", reason), throttle())
    assert find_throttled([telemetry]) == {"a": fraction}


def test_nodes_are_merged_by_trial_and_a_fraction_that_no_sample_tells_is_absent(path):
    one = parse(path, sample(rss_bytes=5), throttle("hw_slowdown"))
    two = parse(path, sample(rss_bytes=7), throttle(), throttle(), throttle(), sample("b"))
    assert find_throttled([one, two]) == {"a": 0.25}


def test_a_missing_file_is_an_error_of_the_bundle(tmp_path):
    for read, name in ((parse_telemetry, "telemetry.jsonl"), (parse_log, "stdout.log"), (parse_operators, "o.log")):
        with pytest.raises(BundleUnreadable) as caught:
            read(tmp_path / name)
        assert str(caught.value) == f"{tmp_path / name}: not readable (No such file or directory)"


amounts = st.none() | st.booleans() | st.integers() | st.floats() | st.just(10**400) | st.text(max_size=3)
devices = st.fixed_dictionaries({}, optional={"memory_used_bytes": amounts, "throttle_reasons": st.lists(amounts)})
samples = st.fixed_dictionaries(
    {"t": amounts, "trial": amounts}, optional={"rss_bytes": amounts, "gpus": st.lists(devices | amounts) | amounts}
)
lines = st.binary() | samples.map(lambda value: json.dumps(value).encode()) | st.just(b"[" * 100_000)


@given(st.lists(lines, max_size=5))
def test_no_bytes_make_the_reader_fail(path, content):
    path.write_bytes(b"\n".join(content))
    telemetry = parse_telemetry(path)
    assert len(telemetry.trials) + sum(telemetry.reject_counts.values()) <= max(1, len(content)) + sum(
        line.count(b"\n") for line in content
    )
