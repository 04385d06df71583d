from __future__ import annotations

import io
import math
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.logs.lines import scan_lines
from rlk_repro.logs.literal import CutOff, NotADict, read_numbers
from rlk_repro.logs.metrics import METRICS, metric_series
from rlk_repro.logs.vime import ACTORS, MAX_TORN, MAX_TORN_BYTES, LogReject, LogSample, ParsedLog, parse_log
from tests import ROOT, TESTS

LOGS = TESTS / "assets" / "logs"
LIVE = LOGS / "live.log"
DAMAGED = LOGS / "damaged.log"
STAMP = b"2026-11-20T13:45:12.345Z "
PREFIX = b"[2026-11-20 13:45:12] model.py:925 - "
TRAINER = b"\x1b[36m(MegatronTrainRayActor pid=99, ip=10.0.0.4)\x1b[0m "
BAR = "\rActor train:  50%|█████     | 3/6 [00:02<00:02,  1.41microbatch/s]".encode()
CHATTER = (
    b"",
    BAR + BAR,
    b"(VLLMEngine pid=1) INFO 11-20 13:45:01 [loggers.py:127] Engine 000: Running: 64 reqs",
    b"(VLLMEngine pid=1) non-default args: {'seed': 0, 'perf': {'perf/step_time': 0.0}}",
    TRAINER + b"[2026-11-20 13:45:12] actor.py:225 - offload, 3 tensors left",
    b"\x00" * 300 + b"\xff\xfe",
)


def parse(*lines: bytes) -> ParsedLog:
    return parse_bytes(b"".join(line + b"\n" for line in lines))


def parse_bytes(data: bytes) -> ParsedLog:
    with NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return parse_log(Path(file.name))


def rows_of(parsed: ParsedLog) -> dict[str, dict[int, dict[str, LogSample]]]:
    return {kind: {index: dict(row) for index, row in rows.items()} for kind, rows in parsed.rows.items()}


def values_of(parsed: ParsedLog) -> set[tuple[str, int, str, str]]:
    return {
        (kind, index, key, repr(sample.value))
        for kind, rows in rows_of(parsed).items()
        for index, row in rows.items()
        for key, sample in row.items()
    }


def test_a_live_log_is_read_whole():
    parsed = parse_log(LIVE)
    assert sorted(parsed.rows["step"]) == [0, 1, 2, 3, 4, 5]
    assert sorted(parsed.rows["rollout"]) == sorted(parsed.rows["perf"]) == [0, 1, 2]
    assert parsed.reject_counts == {LogReject.HIDDEN: 2, LogReject.QUOTED: 1}
    row = parsed.rows["perf"][1]  # two lines
    assert (row["perf/rollout_time"], row["perf/step_time"]) == (LogSample(6.125, 21), LogSample(16.125, 26))


def test_every_reject_of_a_damaged_log_is_counted_by_reason():
    parsed = parse_log(DAMAGED)
    once = {reason.value: 1 for reason in LogReject if reason is not LogReject.HIDDEN}
    assert parsed.reject_counts == once | {LogReject.CUT_OFF: 3}
    assert values_of(parsed) == {
        ("step", 0, "train/loss", "0.5"),
        ("step", 0, "train/step", "0.0"),
        ("step", 6, "train/step", "6.0"),
        ("rollout", 0, "rollout/raw_reward", "0.25"),
        ("rollout", 1, "rollout/raw_reward", "0.5"),
        ("perf", 0, "perf/step_time", "2.0"),
    }


@pytest.mark.parametrize(
    ("messages", "rows", "rejects"),
    [
        ((b"perf 3: {'perf/train_time': 1.0}", b"perf 3: {'perf/step_time': 5.0, 'perf/train_time': 1.5}"),
         {"perf": {3: {"perf/train_time": LogSample(1.0, 1)}}}, {LogReject.CONFLICT: 1}),
        ((b"critic-step 0: {'train/critic-value_loss': 0.5, 'train/step': 0}",), {}, {}),
        ((b"step 7: {'train/loss': 0.5} [repeated 9x across cluster] (Ray deduplicates logs by ...)",),
         {"step": {7: {"train/loss": LogSample(0.5, 1)}}}, {"hidden by Ray as repetitions of another line": 8}),
    ],
)  # fmt: skip
def test_contradictions_critics_and_lines_that_ray_swallowed_add_nothing(messages, rows, rejects):
    parsed = parse(*(PREFIX + message for message in messages))
    assert rows_of(parsed) == {"step": {}, "rollout": {}, "perf": {}} | rows
    assert parsed.reject_counts == rejects


TORN = TRAINER + PREFIX + b"perf 7: {'perf/train_time': 2.1, 'perf/st"
REST = b"ep_time': 2.3}"
WITHOUT = {"perf/train_time": 2.1, "perf/x": 1.0}
IN_KEY, IN_CALL = b"ep_time': 2.3, 'perf/tim", b"ep_time': np.float64(2"


@pytest.mark.parametrize(
    ("lines", "step_time", "num_cut_off"),
    [
        ((TORN, TRAINER + REST), 2.3, 0),
        ((TORN, TRAINER.replace(b"99", b"98") + REST), None, 1),
        ((TORN, b"something else", TRAINER.replace(b"99", b"98") + b"x", TRAINER + REST), 2.3, 0),
        ((TORN, TRAINER.replace(b"0.4", b"0.5") + REST), None, 1),
        ((TORN, b"see " + TRAINER + REST), None, 1),
        ((STAMP + TORN, STAMP + TRAINER + REST), 2.3, 0),
        ((TORN, TORN.replace(b"perf 7", b"perf 9"), TRAINER + REST), None, 1),
        ((TORN + b"ep_time': 2.5,", TRAINER + b" 'perf/x': 1}"), 2.5, 0),
        ((TORN + b"x" * MAX_TORN_BYTES, TRAINER + REST), None, 1),
        ((TORN, TRAINER + PREFIX + b"perf 8: {'perf/step_time': 9.5}"), None, 1),
        ((TORN, TRAINER + b"ep_time': 2.3, 'perf/tr"), None, 1),
        ((TORN,), None, 1),
        ((TORN.removeprefix(TRAINER), REST), None, 1),
    ],
)
def test_a_dict_that_ray_printed_in_two_lines_is_read_whole(lines, step_time, num_cut_off) -> None:
    """On an H200, Ray's log monitor read the worker's file while vime was writing the line of step 7."""
    parsed = parse(*lines)
    times = {index: row["perf/step_time"].value for index, row in parsed.rows["perf"].items()}
    assert times.get(7) == step_time
    assert parsed.reject_counts == ({LogReject.CUT_OFF: num_cut_off} if num_cut_off else {})


@pytest.mark.parametrize(
    ("begin", "rest", "kept"),
    [
        (b"ep_time': 2", b"47, 'perf/x': 1}", WITHOUT),
        (IN_KEY, b"e-5', 'perf/x': 1}", {}),
        (IN_CALL, b"47)}", {}),
    ],
)
def test_a_torn_number_is_left_out(begin: bytes, rest: bytes, kept: dict[str, float]) -> None:
    """In 1 of 12 trials of six runs on one H200, the line of a step was torn within its entropy."""
    parsed = parse(TORN + begin, TRAINER + rest)
    assert {key: sample.value for key, sample in parsed.rows["perf"].get(7, {}).items()} == kept
    assert parsed.reject_counts == {LogReject.TORN_NUMBER if kept else LogReject.CUT_OFF: 1}


def test_only_so_many_torn_dicts_are_joined() -> None:
    pairs = [(TORN.replace(b"perf 7", b"perf %d" % number), TRAINER + REST) for number in range(MAX_TORN + 5)]
    parsed = parse(*(line for pair in pairs for line in pair))
    assert (len(parsed.rows["perf"]), parsed.reject_counts) == (MAX_TORN, {LogReject.CUT_OFF: 5})


@pytest.mark.parametrize("actor", ["RolloutExecutor", "RolloutManager", "FSDPTrainRayActor", "SGLangEngine"])
def test_the_lines_of_known_actors_are_read_and_the_docs_name_them(actor: str) -> None:
    line = f"({actor} pid=7) [2026-09-11 22:43:16.263 r] metrics.py:89 - perf 0: {{'perf/rollout_time': 12.2}}"
    assert (0 in parse(line.encode()).rows["perf"]) is (actor != "SGLangEngine")
    page = (ROOT / "docs/metrics.md").read_text()
    assert all(f"`{name}`" in page for name in ACTORS)


def test_text_quoted_by_a_message_holds_no_message_however_long_it_is():
    decoy = PREFIX + b"step 7: {'train/loss': 0.5}"
    text = b"(RolloutManager pid=1) [2026-11-20 13:45:12] r.py:1 - First rollout sample: ['" + b"a" * (17 << 20) + decoy
    parsed = parse(text + decoy + b"'], label: 3")
    assert parsed.rows["step"] == {}
    assert parsed.reject_counts == {LogReject.QUOTED: 2}


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("{'a': 1}", {"a": 1}),
        ("{ 'a' : -.5e-3 ,'b':7. }", {"a": -0.0005, "b": 7}),
        ("{'a': inf, 'b': -inf}", {"a": math.inf, "b": -math.inf}),
        ("{'a': np.float64(0.5), 'b': np.float32(-1e-05), 'c': numpy.int64(3)}", {"a": 0.5, "b": -1e-5, "c": 3}),
        ("{'a': tensor(0.25), 'b': tensor(2., device='cuda:0', dtype=torch.float64)}", {"a": 0.25, "b": 2}),
        ("{'a': tensor(1.5, grad_fn=<MeanBackward0>), 'b': array(2.5)}", {"a": 1.5, "b": 2.5}),
        ("{'a': None, 'b': True, 'c': np.False_, 'd': 'x, }', 'e': [1, ('}', {'f': 2})], 'g': 3}", {"g": 3}),
        ('{"it\'s": 1}', {"it's": 1}),
    ],
)
def test_numbers_are_read_in_every_form_that_vime_prints(text, numbers):
    assert read_numbers(text + " tail") == (numbers, len(text))


@pytest.mark.parametrize(
    "text",
    [
        "{'a': __import__('os').getpid()}",
        "{'a': 1 2}",
        "{'a': 0.1INFO}",
        "{'a': 1, 'a': 1}",
        "{'a': <object>}",
        "{'a': [1, 2}, ...",
        "{'a': tensor([1, 2])}",
        "{a: 1}",
        "{}",
    ],
)
def test_other_literals_are_refused(text):
    with pytest.raises(NotADict):
        read_numbers(text)


keys = st.text(st.sampled_from("abc/_-é 0"), min_size=1).map(lambda key: f"train/{key}")
metric_dicts = st.dictionaries(keys, st.floats(), min_size=1, max_size=5)


@given(metric_dicts)
def test_a_printed_dict_is_read_back(metrics):
    assert repr(read_numbers(repr(metrics))[0]) == repr(metrics)


@given(metric_dicts, st.data())
def test_no_beginning_of_a_dict_is_taken_for_the_whole(metrics, data):
    text = repr(metrics)
    with pytest.raises(CutOff):
        read_numbers(text[: data.draw(st.integers(1, len(text) - 1))])


fragments = st.sampled_from(
    [
        *CHATTER,
        STAMP,
        PREFIX,
        TRAINER,
        b"step 3: {'train/loss': ",
        b"rollout 3: {'rollout/",
        b"perf 3: {'perf/step_time': 1.0}",
        b"[Rank 0] Memory-Usage x: {'gpu': '0', 'used_GB': 1",
        b"Timer train end (elapsed: 0.5s)",
        b" [repeated 9x across cluster]",
        b"np.float64(",
        b"nan, ",
        b"'train/a': inf}",
        b"[(",
        b"\n",
        b"\r",
    ]
)


@given(st.lists(fragments | st.binary(max_size=8), max_size=30))
def test_no_bytes_make_the_parser_fail(parts):
    parsed = parse_bytes(b"".join(parts))
    series = metric_series(parsed, num_rollouts=4, num_steps_per_rollout=2)
    assert set(series) == {metric.name for metric in METRICS}


@st.composite
def messages(draw):
    """A message, and the values that it holds."""
    kind = draw(st.sampled_from(["step", "rollout", "perf"]))
    family = {"step": "train"}.get(kind, kind)
    index = draw(st.integers(0, 3))
    names = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True))
    numbers = {f"{family}/{name}": draw(st.sampled_from([0.5, 0.25, math.nan])) for name in names}
    front = draw(st.sampled_from([b"", STAMP + TRAINER, BAR, TRAINER + BAR]))
    line = front + PREFIX + f"{kind} {index}: {numbers}".encode()
    return line, {(kind, index, key, repr(value)) for key, value in numbers.items()}


@st.composite
def torn_logs(draw):
    """Lines with whole, repeated, glued and torn messages, and the messages that were printed in full."""
    lines, printed = [], []
    for one, two in draw(st.lists(st.tuples(messages(), messages()), max_size=6)):
        line, other = one[0], two[0]
        cut = draw(st.integers(line.index(PREFIX) + 1, len(line) - 1))
        head, tail = line[:cut], line[cut:]
        shapes = [
            ([line], [one]),
            ([line, line], [one]),
            ([line + other], [one, two]),
            ([head], []),
            ([tail], []),
            ([head, tail], []),
            ([head + other], [two]),
            ([head + other, tail], [two]),
            ([head + other + tail], [two]),
        ]
        shape = draw(st.sampled_from(shapes))
        lines += shape[0]
        printed += shape[1]
    return lines, printed


def merge(log: list[tuple[bytes, set[tuple[str, int, str, str]]]]) -> set[tuple[str, int, str, str]]:
    """What remains of whole messages: the first of contradicting ones."""
    first: dict[tuple[str, int, str], str] = {}
    for _, values in log:
        if all(first.get(value[:3], value[3]) == value[3] for value in values):
            first |= {value[:3]: value[3] for value in values}
    return {(*place, value) for place, value in first.items()}


@given(torn_logs())
def test_exactly_the_values_that_were_printed_in_full_are_taken(log):
    lines, printed = log
    assert values_of(parse(*lines)) == merge(printed)


@given(st.lists(messages(), max_size=6), st.lists(st.tuples(st.integers(0, 6), st.sampled_from(CHATTER))))
def test_chatter_never_changes_what_is_read(log, chatter):
    quiet = [line for line, _ in log]
    noisy = list(quiet)
    for place, line in chatter:
        noisy.insert(place, line)
    assert values_of(parse(*noisy)) == values_of(parse(*quiet))


@given(
    st.lists(st.sampled_from([b"\n", b"\r", b"x", b"1", b"N:"])).map(b"".join), st.integers(1, 40), st.integers(1, 40)
)
def test_lines_and_their_numbers_do_not_depend_on_blocks(data, block_bytes, max_line_bytes):
    scanned = scan_lines(
        io.BytesIO(data), {b"N:": b"1", b"xx": b""}, block_bytes=block_bytes, max_line_bytes=max_line_bytes
    )
    found: dict[int, bytes] = {}
    for line in scanned:
        assert line.is_continued == (line.number in found)
        found[line.number] = found.get(line.number, b"") + line.text
    lines = list(io.BytesIO(data))
    wanted = {number for number, line in enumerate(lines, 1) if b"1N:" in line or b"xx" in line}
    assert wanted <= set(found)
    assert all(lines[number - 1] == text for number, text in found.items())


def test_series_hold_one_sample_per_rollout():
    series = metric_series(parse_log(LIVE), num_rollouts=4, num_steps_per_rollout=2)
    assert series["step_time_s"] == (LogSample(49.0, 17), LogSample(16.125, 26), LogSample(16.25, 35), None)
    assert series["raw_reward"][:3] == (LogSample(0.25, 13), LogSample(0.375, 22), LogSample(0.5, 31))
    assert series["train_rollout_logprob_abs_diff"][0] == LogSample(0.0046875, 15)
    # the weight sync of a rollout is the one that followed its training
    assert series["weight_sync_time_s"] == (LogSample(1.625, 26), LogSample(1.75, 35), None, None)
    # throughput counts the whole step
    assert series["tokens_per_s"][1] == LogSample(6001.0 * 4.125 / 16.125, 26)
    assert series["tokens_per_s"][3] is None


def test_the_documented_metrics_are_the_ones_that_exist():
    text = (ROOT / "docs" / "metrics.md").read_text()
    for metric in METRICS:
        assert f"`{metric.name}`" in text
        assert all(f"`{key}`" in text for _, key in metric.sources)
    assert all(reason.value in text for reason in LogReject)


def test_a_rollout_without_all_its_steps_has_no_step_metrics():
    parsed = parse(*[PREFIX + b"step %d: {'train/loss': 1.0}" % index for index in (0, 1, 2, 5)])
    series = metric_series(parsed, num_rollouts=3, num_steps_per_rollout=2)
    assert series["loss"] == (LogSample(1.0, 2), None, None)
    assert series["step_time_s"] == (None, None, None)
    # the cost follows the printed lines
    metric_series(parsed, num_rollouts=4, num_steps_per_rollout=10**9)


@pytest.mark.parametrize(
    ("values", "mean"),
    [("1.0 2.0", 1.5), ("nan 1.0", math.nan), ("inf -inf", math.nan), ("inf 1.0", math.inf), ("1e308 1e308", math.inf)],
)
def test_step_means_survive_what_vime_may_print(values, mean):
    lines = [PREFIX + f"step {index}: {{'train/loss': {value}}}".encode() for index, value in enumerate(values.split())]
    (sample,) = metric_series(parse(*lines), num_rollouts=1, num_steps_per_rollout=2)["loss"]
    assert repr(sample) == repr(LogSample(mean, 2))


def test_one_source_serves_a_whole_series():
    parsed = parse(
        PREFIX + b"perf 0: {'rollout/response_len/mean': 9.0}",
        PREFIX + b"perf 1: {'rollout/response_len/mean': 9.0}",
        PREFIX + b"rollout 1: {'rollout/response_lengths': 7.0}",
    )
    series = metric_series(parsed, num_rollouts=2, num_steps_per_rollout=1)
    assert series["response_length_mean"] == (None, LogSample(7.0, 3))
    fallback = metric_series(
        parse(PREFIX + b"perf 0: {'rollout/response_len/mean': 9.0}"), num_rollouts=1, num_steps_per_rollout=1
    )
    assert fallback["response_length_mean"] == (LogSample(9.0, 1),)
