"""The page of the first three commands: what it shows is what they print, in each of its places."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.clusters.test_k8s_sites import claim, node
from tests.support.kube.cluster import Cluster as KubeCluster
from tests.support.kube.runs import needs_kubectl, running_server
from tests.support.slurm.cluster import Cluster

Call = Callable[..., tuple[int, str, str]]
PAGE = ROOT / "docs" / "first-commands.md"
SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
CUT = "…"
ELSEWHERE = "Without a scheduler"


def read_transcripts(place: str) -> list[tuple[list[str], list[str], int]]:
    """Of each command of a section: its words, the lines that it prints, its exit code."""
    text = dict(SECTION.findall(PAGE.read_text()))[place]
    found = []
    for block in BLOCK.findall(text):
        command, *lines, last = block.splitlines()
        found.append((shlex.split(command.removeprefix("$ rlk-repro ")), lines, int(last.removeprefix("exit "))))
    return found


def require_shown(shown: list[str], out: str) -> None:
    """Each shown line is printed, in this order; ``…`` stands for the rest of a line, or for lines between."""
    rest = iter(out.splitlines())
    for line in shown:
        if line != CUT:
            wanted = re.compile(".*".join(map(re.escape, line.split(CUT))))
            assert any(wanted.fullmatch(printed) for printed in rest), (line, out)


def run_page(place: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """All three commands; a section that leaves two out says that they print what they print elsewhere."""
    monkeypatch.chdir(ROOT)
    transcripts = [*read_transcripts(place), *read_transcripts(ELSEWHERE)[1:]]
    for words, lines, exit_code in transcripts:
        code, out, err = call(*words)
        require_shown(lines, (out + err) if words[0] == "replay" else err)
        assert code == exit_code


def test_first_commands_without_a_scheduler(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    run_page(ELSEWHERE, call, monkeypatch)


@pytest.mark.real
def test_on_slurm(call: Call, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value if name != "PATH" else f"{cluster.bin}{os.pathsep}{os.environ['PATH']}")
    run_page("On Slurm", call, monkeypatch)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeCluster]:
    with running_server(tmp_path / "kube", monkeypatch, claims=(), num_nodes=0) as running:
        for number in range(2):
            running.add("nodes", node(f"n{number}"))
        running.add("persistentvolumeclaims", claim("shared", "ReadWriteMany"))
        yield running


@pytest.mark.real
@needs_kubectl
def test_on_kubernetes(call: Call, server: KubeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page("On Kubernetes", call, monkeypatch)
