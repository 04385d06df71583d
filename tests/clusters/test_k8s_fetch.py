"""A bundle arrives whole, whatever happens on the way, and nothing is fetched twice but the block that was cut."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.base.errors import CheckFailed, EnvironmentMissing
from rlk_repro.clusters.k8s import fetch as fetching
from rlk_repro.clusters.k8s import pod_exec
from rlk_repro.clusters.k8s.facts import BLOCK_BYTES, BUNDLE, Facts, unwrap_block, wrap_block
from rlk_repro.clusters.k8s.fetch import MAX_FAILURES, fetch_bundle
from rlk_repro.clusters.k8s.kubectl import Target, Unreachable
from rlk_repro.clusters.k8s.pod.notes import UID_VARIABLE, Notes, is_followed
from rlk_repro.clusters.k8s.pod_exec import Pod
from rlk_repro.pod.__main__ import main
from rlk_repro.rundir.paths import RunDir
from tests.support.kube.examples import plan_for, with_site
from tests.support.kube.kubelet import REPOSITORY, Faults, RunningPod
from tests.support.kube.plane import ControlPlane
from tests.support.kube.runs import make_server, needs_kubectl, use_server
from tests.support.waiting import wait_until

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
def run_dir(tmp_path: Path, small: None) -> RunDir:
    return RunDir(tmp_path)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, and no pauses between attempts."""
    monkeypatch.setattr(fetching, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(fetching, "FIRST_PAUSE_S", 0.0)


def fetch(far: Far, run_dir: RunDir) -> bytes:
    return fetch_bundle(far.ask, run_dir, len(DATA), DIGEST).read_bytes()


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


def test_an_interrupted_collection_continues_where_it_stopped(run_dir: RunDir) -> None:
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


def test_complete_bundles_are_not_fetched_again(run_dir: RunDir) -> None:
    run_dir.partial_bundle(DIGEST).write_bytes(DATA)
    far = Far()
    assert fetch(far, run_dir) == DATA
    assert far.asked == []


def test_other_bytes_than_the_pods_are_refused(run_dir: RunDir) -> None:
    with pytest.raises(CheckFailed, match="was damaged during the transfer"):
        fetch(Far(DATA[:-1] + b"!"), run_dir)
    assert list(run_dir.root.iterdir()) == []


def test_a_lost_connection_is_given_up_in_the_end(run_dir: RunDir) -> None:
    far = Far(lose=lambda _: True)
    with pytest.raises(Unreachable, match="run the same command again to fetch the missing bytes"):
        fetch(far, run_dir)
    assert len(far.asked) == MAX_FAILURES


def test_a_full_disk_is_reported(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    full = RunDir(Path("/dev/full/x"))
    with pytest.raises(EnvironmentMissing, match="cannot be written"):
        fetch_bundle(Far().ask, full, len(DATA), DIGEST)


@pytest.mark.parametrize("answer", [b"", b"short", wrap_block(b"abc")[:-1], wrap_block(b"abc") + b"x"])
def test_a_block_that_is_not_whole_is_known(answer: bytes) -> None:
    assert unwrap_block(answer) is None
    assert unwrap_block(wrap_block(b"abc")) == b"abc"


UID = "0f1e2d3c"


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run directory as a pod sees it whose agent has ended; the commands of this test run in that pod."""
    monkeypatch.setenv(UID_VARIABLE, UID)
    run_dir = RunDir(tmp_path / "run")
    run_dir.root.mkdir()
    run_dir.bundle.write_bytes(DATA)
    trial = run_dir.trial("00-p1-baseline")
    trial.path.mkdir(parents=True)
    trial.stdout.write_bytes(b"one\ntwo\n")
    (tmp_path / "secret").write_text("no")
    Notes(run_dir, os.environ).write_bundle()
    return run_dir


def ask(capfdbinary: pytest.CaptureFixture[bytes], run_dir: RunDir, verb: str, *words: object) -> tuple[int, bytes]:
    code = main([verb, str(run_dir.root), *map(str, words)])
    sys.stdout.flush()
    return code, capfdbinary.readouterr().out


def test_a_pod_shows_the_bundle_and_the_logs(far: RunDir, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    code, data = ask(capfdbinary, far, "block", BUNDLE, 256, 512)
    assert (code, unwrap_block(data)) == (0, DATA[256:768])
    assert unwrap_block(ask(capfdbinary, far, "block", "trials/00-p1-baseline", 4, 100)[1]) == b"two\n"
    facts = Facts.from_json(json.loads(ask(capfdbinary, far, "show")[1]))
    assert (facts.bundle_bytes, facts.bundle_sha256) == (len(DATA), DIGEST)
    assert [(item.name, item.size_bytes) for item in facts.trials] == [("00-p1-baseline", 8)]
    assert Facts.from_json(facts.to_json()) == facts


def test_an_earlier_pod_s_answer_is_ignored(
    far: RunDir, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setenv(UID_VARIABLE, "another pod, on the same claim")
    assert ask(capfdbinary, far, "show") == (1, b"")
    assert ask(capfdbinary, far, "stop") == (1, b"")


def test_a_pod_knows_who_has_not_read_the_last_lines(far: RunDir, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert not is_followed(far)
    ask(capfdbinary, far, "block", "trials/00-p1-baseline", 0, 4)
    assert is_followed(far)
    ask(capfdbinary, far, "block", "trials/00-p1-baseline", 4, 4)
    assert not is_followed(far)


@pytest.mark.parametrize(
    ("what", "offset", "size"),
    [("", 0, 10), ("../secret", 0, 2), ("trials/..", 0, 10), ("trials/no-such", 0, 10), ("trials/", 0, 10),
     ("trials/../../secret", 0, 2), ("plan.json", 0, 10), (BUNDLE, -1, 10), (BUNDLE, 0, 99999999999),
     (BUNDLE, 0, BLOCK_BYTES + 1), (BUNDLE, 0, -1)],
)  # fmt: skip
def test_a_pod_shows_no_other_files(
    far: RunDir, capfdbinary: pytest.CaptureFixture[bytes], what: str, offset: int, size: int
) -> None:
    assert main(["block", str(far.root), "--", what, str(offset), str(size)]) == 1
    captured = capfdbinary.readouterr()
    assert captured.out == b""
    assert b"cannot be requested" in captured.err


WAIT = """
import os, sys
from pathlib import Path
from rlk_repro.agent.stop import Stop
from rlk_repro.clusters.k8s.pod.notes import Notes
from rlk_repro.rundir.paths import RunDir
stop = Stop()
with stop.installed():
    Notes(RunDir(Path(sys.argv[1])), os.environ).write()
    stop.wait(60)
sys.exit(int(stop.signal or 0))
"""


def test_the_one_wish_that_a_pod_takes(far: RunDir, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    far.pod_note.unlink()
    with subprocess.Popen([sys.executable, "-c", WAIT, str(far.root)]) as first:
        wait_until(far.pod_note.is_file)
        assert ask(capfdbinary, far, "stop") == (0, b"")
        assert first.wait(60) == signal.SIGINT
    assert ask(capfdbinary, far, "stop") == (1, b"")


def test_an_answer_of_a_pod_is_a_short_process_without_the_rest_of_the_program() -> None:
    code = "import sys, rlk_repro.pod.__main__; sys.exit(bool({'pydantic', 'yaml', 'typer'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), UID_VARIABLE: UID}
    Notes(far, env).write_bundle()
    faults = Faults(cut_every_bytes=350 << 20, cuts_left=5)
    with make_server(tmp_path, control_plane, faults=faults) as server:
        use_server(server, tmp_path, monkeypatch)
        mounts = [("/results/smoke/here", str(far.root))]
        server.show("far", RunningPod(folder=tmp_path, env=env, mounts=mounts))
        pod = Pod(place=Target(namespace="default"), name="far", plan=with_site(plan_for()), run_dir=here)
        facts = pod.read_facts()
        assert facts is not None
        assert (facts.bundle_bytes, facts.bundle_sha256) == (size_bytes, digest.hexdigest())
        path = fetch_bundle(
            lambda offset, size: pod.read_block(BUNDLE, offset, size), here, size_bytes, facts.bundle_sha256
        )
        assert path.stat().st_size == size_bytes
        assert faults.cuts_left == 0
        # every cut costs the block that was cut, and checksums
        assert faults.bytes_sent <= size_bytes + 5 * BLOCK_BYTES + (1 << 16)


def test_a_collector_tells_each_reason_once_and_only_while_it_waits(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pod(phase: str, kind: str, reason: str) -> dict[str, Any]:
        return {"status": {"phase": phase, "containerStatuses": [{"state": {kind: {"reason": reason}}}]}}

    looks = [
        *(pod("Pending", "waiting", reason) for reason in ("ErrImagePull", "ImagePullBackOff") * 3),
        pod("Failed", "terminated", "OOMKilled"),
    ]
    monkeypatch.setattr(Target, "get", lambda *_: [looks.pop(0)])
    monkeypatch.setattr(pod_exec, "POLL_S", 0.0)
    collector = Pod(place=Target(context="c", namespace="n"), name="x", plan=plan_for(), run_dir=run_dir)
    told: list[str] = []
    with pytest.raises(CheckFailed, match="OOMKilled"):
        pod_exec._wait_for_collector(collector, told.append)
    assert [line.rpartition("(")[2] for line in told] == ["ErrImagePull)", "ImagePullBackOff)"]
    assert all(line.startswith("pod x waits: ") for line in told)
