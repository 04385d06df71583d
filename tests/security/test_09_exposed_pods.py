"""Another pod of the cluster cannot reach a run's pods: no port is open, and no request ends a run."""

from __future__ import annotations

import contextlib
import http.client
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlk_repro.clusters.api import JobState
from rlk_repro.clusters.k8s.kubectl import Target
from rlk_repro.clusters.k8s.pod_exec import Pod, mirror_logs
from rlk_repro.clusters.registry import get_backend
from rlk_repro.rundir.paths import RunDir
from rlk_repro.submit import sending
from tests.support.kube.cluster import Cluster
from tests.support.kube.examples import plan_for, with_site
from tests.support.kube.kubelet import RunningPod
from tests.support.kube.plane import ControlPlane
from tests.support.kube.runs import (
    LONG,
    first_trial_runs,
    needs_kubectl,
    running_server,
    submit,
    wait_for_end,
    wait_until,
)

pytestmark = [needs_kubectl, pytest.mark.timeout(280)]
LISTENING = "0A"
LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control_plane: ControlPlane | None) -> Iterator[Cluster]:
    with running_server(tmp_path / "kube", monkeypatch, control_plane) as running:
        yield running


@pytest.mark.real
def test_a_pod_of_a_run_listens_on_no_port_and_another_pod_cannot_end_it(server: Cluster, tmp_path: Path) -> None:
    launched = submit(tmp_path, LONG, kind="job")
    wait_until(launched, first_trial_runs(launched))
    ports = [port for pod in server.running.values() if pod.process for port in find_open_ports(pod.process.pid)]
    for port in ports:
        post(port, "/stop")
    time.sleep(3.0)
    assert sending.poll(launched).state is JobState.RUNNING, "a request of a stranger ended the run"
    assert ports == []
    assert get_backend("k8s").cancel(launched.submission, launched.run_dir)
    assert wait_for_end(launched).state is JobState.CANCELLED


LIAR = """#!{python}
import hashlib, json, sys
if "show" in sys.argv:
    trial = {{"name": {name!r}, "size_bytes": 4, "has_ended": True}}
    print(json.dumps({{"schema": 1, "state": None, "is_sealed": False, "waits_for": "", "failure": "",
                       "bundle_bytes": None, "bundle_sha256": "", "trials": [trial]}}))
else:
    sys.stdout.buffer.write(hashlib.sha256(b"evil").digest() + b"evil")
"""


def test_a_log_name_from_a_pod_cannot_lead_to_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control_plane: ControlPlane | None
) -> None:
    """An image may lie: the names of its logs become paths on this machine."""
    liar = tmp_path / "liar"
    liar.write_text(LIAR.format(python=sys.executable, name="../../../escaped"))
    liar.chmod(0o755)
    here = RunDir(tmp_path / "runs" / "here")
    here.root.mkdir(parents=True)
    with running_server(tmp_path / "kube", monkeypatch, control_plane) as server:
        server.show("far", RunningPod(folder=tmp_path, env={**os.environ}))
        plan = with_site(plan_for(), python=str(liar))
        pod = Pod(place=Target(namespace="default"), name="far", plan=plan, run_dir=here)
        facts = pod.read_facts()
        assert facts is not None
        assert pod.read_block("trials/x", 0, 4) == b"evil"
        mirror_logs(pod, facts, here.live)
    assert not [path for path in tmp_path.rglob("*") if "escaped" in path.name]


def post(port: int, path: str) -> None:
    with (
        contextlib.suppress(OSError, http.client.HTTPException),
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection,
    ):
        connection.request("POST", path, body=b"{}")
        connection.getresponse().read()


def find_open_ports(pid: int) -> list[int]:
    """Return the ports, loopback aside, on which a process or its descendants listen."""
    held = {link for process in [pid, *find_descendants(pid)] for link in list_files(process)}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return sorted(
        int(row[1].rpartition(":")[2], 16)
        for row in rows
        if row[3] == LISTENING and f"socket:[{row[9]}]" in held and row[1].rpartition(":")[0] not in LOOPBACK
    )


def find_descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                yield child
                yield from find_descendants(child)


def list_files(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                yield str(link.readlink())
