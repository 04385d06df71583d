"""A bundle arrives whole, whatever happens on the way, and nothing is fetched twice but the block that was cut."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlk_repro.backends.k8s_fetch import MAX_FAILURES, fetch_bundle
from rlk_repro.backends.k8s_window import read_block
from rlk_repro.backends.kubectl import Place, Unreachable
from rlk_repro.errors import CheckFailed, EnvironmentMissing
from rlk_repro.files import write_json
from rlk_repro.k8s.window import BLOCK_BYTES, BUNDLE, Facts, make_block_path, unwrap_block, wrap_block
from rlk_repro.pod.window import Window
from rlk_repro.rundir import RunDir
from tests.k8s_runs import make_server, needs_kubectl, use_server
from tests.kube_kubelet import Faults
from tests.kube_plane import ControlPlane
from tests.waiting import wait_until

DATA = bytes(range(256)) * 40
DIGEST = hashlib.sha256(DATA).hexdigest()
BLOCK = 1000


class Far:
    """The far end, which loses every n-th block."""

    def __init__(self, data: bytes = DATA, *, lose: Callable[[int], bool] = lambda _: False) -> None:
        self.data = data
        self.lose = lose
        self.asked: list[int] = []

    def ask(self, offset: int, size: int) -> bytes | None:
        self.asked.append(offset)
        return None if self.lose(len(self.asked)) else self.data[offset : offset + size]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def fetch(far: Far, run_dir: RunDir) -> bytes:
    path = fetch_bundle(far.ask, run_dir, len(DATA), DIGEST, block_bytes=BLOCK, sleep=lambda _: None)
    return path.read_bytes()


def test_it_arrives(run_dir: RunDir) -> None:
    far = Far()
    assert fetch(far, run_dir) == DATA
    assert far.asked == list(range(0, len(DATA), BLOCK))
    assert [path.name for path in run_dir.root.iterdir()] == ["bundle.tgz"]


def test_a_block_that_was_cut_is_asked_again_and_no_other(run_dir: RunDir) -> None:
    far = Far(lose=lambda number: number % 3 == 0)
    assert fetch(far, run_dir) == DATA
    assert sorted(set(far.asked)) == list(range(0, len(DATA), BLOCK))
    assert len(far.asked) - len(set(far.asked)) == len(far.asked) // 3


def test_an_interrupted_collection_goes_on_where_it_was(run_dir: RunDir) -> None:
    with pytest.raises(Unreachable, match="after 4000 of 10240 bytes"):
        fetch(Far(lose=lambda number: number > 4), run_dir)
    far = Far()
    assert fetch(far, run_dir) == DATA
    assert far.asked[0] == 4000


def test_half_a_block_on_disk_is_not_trusted(run_dir: RunDir) -> None:
    run_dir.partial_bundle(DIGEST).write_bytes(DATA[:2500])
    far = Far()
    assert fetch(far, run_dir) == DATA
    assert far.asked[0] == 2000


def test_parts_of_another_bundle_are_dropped(run_dir: RunDir) -> None:
    other = run_dir.partial_bundle("0" * 64)
    other.write_bytes(b"x")
    assert fetch(Far(), run_dir) == DATA
    assert not other.exists()


def test_what_is_whole_already_is_not_asked_for(run_dir: RunDir) -> None:
    run_dir.partial_bundle(DIGEST).write_bytes(DATA)
    far = Far()
    assert fetch(far, run_dir) == DATA
    assert far.asked == []


def test_other_bytes_than_the_pods_are_refused(run_dir: RunDir) -> None:
    with pytest.raises(CheckFailed, match="did not arrive as it is"):
        fetch(Far(DATA[:-1] + b"!"), run_dir)
    assert list(run_dir.root.iterdir()) == []


def test_a_lost_connection_is_given_up_in_the_end(run_dir: RunDir) -> None:
    far = Far(lose=lambda _: True)
    with pytest.raises(Unreachable, match="the same command goes on from there"):
        fetch(far, run_dir)
    assert len(far.asked) == MAX_FAILURES


def test_a_disk_without_room_is_told(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    full = RunDir(Path("/dev/full/x"))
    with pytest.raises(EnvironmentMissing, match="cannot be written"):
        fetch_bundle(Far().ask, full, len(DATA), DIGEST, block_bytes=BLOCK)


@pytest.mark.parametrize("answer", [b"", b"short", wrap_block(b"abc")[:-1], wrap_block(b"abc") + b"x"])
def test_a_block_that_is_not_whole_is_known(answer: bytes) -> None:
    assert unwrap_block(answer) is None
    assert unwrap_block(wrap_block(b"abc")) == b"abc"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Window]:
    run_dir = RunDir(tmp_path / "run")
    run_dir.root.mkdir()
    run_dir.bundle.write_bytes(DATA)
    write_json(run_dir.pod_end, {"schema": 1, "exit_code": 0})
    trial = run_dir.trial("00-p1-baseline")
    trial.path.mkdir(parents=True)
    trial.stdout.write_bytes(b"one\ntwo\n")
    (tmp_path / "secret").write_text("no")
    with Window(run_dir, 0, lambda: None) as window:
        yield window


def ask(window: Window, path: str, verb: str = "GET") -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", window.port, timeout=10)) as connection:
        connection.request(verb, path, body=b"{}" if verb == "POST" else None)
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_a_window_shows_the_bundle_and_the_logs(served: Window) -> None:
    code, data = ask(served, f"/{make_block_path(BUNDLE, 256, 512)}")
    assert (code, unwrap_block(data)) == (200, DATA[256:768])
    assert unwrap_block(ask(served, "/trials/00-p1-baseline/4/100?timeout=60s")[1]) == b"two\n"
    facts = served.read_facts()
    assert (facts.bundle_bytes, facts.bundle_sha256) == (len(DATA), DIGEST)
    assert Facts.from_json(facts.to_json()) == facts


def test_a_window_knows_who_has_not_read_the_last_lines(served: Window) -> None:
    assert not served.is_followed()
    ask(served, "/trials/00-p1-baseline/0/4")
    wait_until(served.is_followed)  # the window notes an answer once it is sent
    ask(served, "/trials/00-p1-baseline/4/4")
    wait_until(lambda: not served.is_followed())


@pytest.mark.parametrize(
    "path", ["/", "/../secret", "/trials/../0/10", "/trials/no-such/0/10", "/bundle/-1/10", "/bundle/0/99999999999",
             f"/bundle/0/{BLOCK_BYTES + 1}", "/plan.json", "/trials/..%2F..%2Fsecret/0/2"],
)  # fmt: skip
def test_a_window_shows_nothing_else(served: Window, path: str) -> None:
    assert ask(served, path)[0] == 404
    assert ask(served, path, "POST")[0] == 404


def test_the_one_wish_that_a_window_takes(tmp_path: Path) -> None:
    asked = threading.Event()
    with Window(RunDir(tmp_path), 0, asked.set) as window:
        assert ask(window, "/stop", "POST")[0] == 200
    assert asked.is_set()


@needs_kubectl
@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_gigabytes_over_a_connection_that_is_cut_five_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control_plane: ControlPlane | None
) -> None:
    size_bytes = 2 << 30
    far, here = RunDir(tmp_path / "far"), RunDir(tmp_path / "here")
    for folder in (far, here):
        folder.root.mkdir()
    digest = hashlib.sha256()
    with far.bundle.open("wb") as stream:
        for number in range(size_bytes >> 20):
            block = hashlib.sha256(str(number).encode()).digest() * (1 << 15)
            digest.update(block)
            stream.write(block)
    write_json(far.pod_end, {"schema": 1, "exit_code": 0})
    faults = Faults(cut_every_bytes=350 << 20, cuts_left=5)
    with make_server(tmp_path, control_plane, faults=faults) as server, Window(far, 0, lambda: None) as window:
        use_server(server, tmp_path, monkeypatch)
        server.show("far", window.port)
        place = Place(namespace="default")
        facts = window.read_facts()
        assert facts.bundle_sha256 == digest.hexdigest()
        path = fetch_bundle(
            lambda offset, size: read_block(place, "far", make_block_path(BUNDLE, offset, size)),
            here, size_bytes, facts.bundle_sha256,
        )  # fmt: skip
        assert path.stat().st_size == size_bytes
        assert faults.cuts_left == 0
        # every cut costs the block that was cut, and checksums
        assert faults.bytes_sent <= size_bytes + 5 * BLOCK_BYTES + (1 << 16)
