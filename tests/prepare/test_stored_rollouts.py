"""Stored rollouts by their digest: from a mirror, or from archives over HTTP, whatever else those hold."""

from __future__ import annotations

import io
import json
import lzma
import os
import pickle
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk_repro.base import proc
from rlk_repro.base.errors import BundleUnreadable, EnvironmentMissing, SpecError
from rlk_repro.base.files import sha256_bytes
from rlk_repro.prepare.contents import load_contents
from rlk_repro.prepare.steps import PrepareStep, fill
from rlk_repro.prepare.stored_rollouts import Storage
from rlk_repro.refengine import random_rollouts
from rlk_repro.rundir.rollout_files import check_file
from rlk_repro.spec import StoredRollouts
from tests import ROOT
from tests.support.prepare_examples import make_rollout
from tests.support.probe_examples import write_program

NUM_FILES = 12
FILES = {f"{number}.pt": make_rollout(number) for number in range(NUM_FILES)}
DIGEST = "sha256:" + sha256_bytes("".join(f"{sha256_bytes(data)}  {name}\n" for name, data in FILES.items()).encode())


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and its address."""
    folder = tmp_path / "served"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def pack(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def fetch(tmp_path: Path, *urls: str, is_offline: bool = False) -> Path:
    stored = StoredRollouts(name="first", num_files=NUM_FILES, digest=DIGEST, made_by="a test", fetch=urls)
    storage = Storage(stored=stored, mirror=None, is_offline=is_offline)
    folder = tmp_path / "prepared" / "rollouts" / "first"
    fill(PrepareStep(kind="rollouts", folder=folder, is_wanted=lambda _: True, make=storage.run), lambda _: None)
    return folder


def test_any_archive_that_holds_them_will_do(served: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = served
    others = {"plan.json": b"{}", "trials/0/stdout.log": b"x", "rollouts/1234/stdout.log": b"x", "99.pt": b"too many"}
    pack(folder / "a.tgz", others | {f"rollouts/1234/{file}": data for file, data in FILES.items()})
    target = fetch(tmp_path, f"{url}/absent.tgz", f"{url}/a.tgz")
    assert {path.name: path.read_bytes() for path in target.iterdir()} == FILES
    contents = load_contents(target)
    assert contents is not None
    assert contents.source["digest"] == DIGEST


def test_other_rollouts_than_the_runs_are_refused(served: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = served
    pack(folder / "a.tgz", FILES | {"7.pt": b"another"})
    with pytest.raises(BundleUnreadable, match="rollouts first: differ from the files that the run names"):
        fetch(tmp_path, f"{url}/a.tgz")
    pack(folder / "a.tgz", {name: data for name, data in FILES.items() if name != "5.pt"})
    with pytest.raises(
        BundleUnreadable, match=r"differ from the files that the run names, got '5.pt', expected 0.pt to 11.pt"
    ):
        fetch(tmp_path, f"{url}/a.tgz")
    pack(folder / "a.tgz", FILES)
    fetch(tmp_path, f"{url}/a.tgz")


def test_two_sets_in_one_archive_are_no_answer(served: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = served
    pack(folder / "a.tgz", FILES | {f"1235/{file}": data for file, data in FILES.items()})
    with pytest.raises(SpecError, match=r"holds two files with the same number, got '0.pt'"):
        fetch(tmp_path, f"{url}/a.tgz")


def test_names_that_would_leave_the_folder_are_refused(served: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = served
    pack(folder / "a.tgz", FILES | {"../../13.pt": b"x"})
    with pytest.raises(BundleUnreadable, match="refused: "):
        fetch(tmp_path, f"{url}/a.tgz")
    assert not list(tmp_path.glob("*.pt"))


def test_a_truncated_archive_is_reported(served: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = served
    pack(folder / "a.tgz", FILES)
    (folder / "a.tgz").write_bytes((folder / "a.tgz").read_bytes()[:-100])
    with pytest.raises(BundleUnreadable):
        fetch(tmp_path, f"{url}/a.tgz")
    with pytest.raises(EnvironmentMissing, match="could not be fetched"):
        fetch(tmp_path, f"{url}/absent.tgz")
    with pytest.raises(EnvironmentMissing, match="rollouts first: not found"):
        fetch(tmp_path, f"{url}/a.tgz", is_offline=True)


# Stored rollouts are pure data or are refused unread.


class Call:
    """A pickle that calls a function of the stranger's choice when it is loaded."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.system, self.words


def write_rollout(path: Path, value: Any) -> Path:
    torch.save({"rollout_id": 0, "samples": [value]}, path)
    return path


def write_members(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


# Pickles by what they do when they are loaded.
PICKLES = {
    "global": b"cos\nsystem\n(Vtrue\ntR.",
    "instance": b"(Vtrue\nios\nsystem\n.",
    "stack": b"\x80\x04\x8c\x05posix\x8c\x06system\x93(Vtrue\ntR.",
    "build": b"ccollections\nOrderedDict\n(tR}V__reduce__\ncos\nsystem\nsb.",
    "named": b"cnumpy\nndarray\n(Vx\ntR.",
    "dotted": b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.fromkeys\x93(tR.",
    "cut": b"\x80\x02}q",
    "extension": b"\x80\x02\x82\x01.",
    "bomb": b"c__builtin__\nbytearray\n(J\xff\xff\xff\x7ftR.",
    "state": b"ctorch._utils\n_rebuild_tensor_v2\n(tR}b.",
    "item": b"ccollections\nOrderedDict\n(tRVx\nVy\ns.",
    # with this state numpy takes an array's bytes for pointers to objects
    "dtype": b"cnumpy\ndtype\n(VO8\ntR(K\x03V|\nNNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb.",
}


def hostile_rollouts(folder: Path, mark: Path) -> Iterator[Path]:
    """Write files that run something in torch.load, or that torch reads as more than data."""
    evil = Call(f'touch "{mark}"')
    yield write_rollout(folder / "call.pt", {"tokens": [1], "metadata": evil})
    (folder / "bare.pt").write_bytes(pickle.dumps(evil))
    yield folder / "bare.pt"
    torch.save(evil, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    yield folder / "legacy.pt"
    with zipfile.ZipFile(write_rollout(folder / "good", {"tokens": [1]})) as archive:
        members = [(item.filename, archive.read(item)) for item in archive.infolist()]
    # torch takes this one for a compiled program
    yield write_members(folder / "program.pt", [*members, ("good/constants.pkl", b"\x80\x02).")])
    for name, data in PICKLES.items():
        changed = [(member, data if member.endswith("data.pkl") else content) for member, content in members]
        yield write_members(folder / f"{name}.pt", changed)
    theirs = pickle.dumps(evil)
    yield write_members(folder / "twice.pt", [("good/data.pkl", theirs), *members])
    yield write_members(folder / "last.pt", [*members, ("other/data.pkl", theirs)])
    yield write_members(folder / "capitals.pt", [("good/DATA.PKL", theirs), *members])


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_rollout_that_is_more_than_data_is_refused_unread(tmp_path: Path) -> None:
    _, mark = write_program(tmp_path)
    for path in hostile_rollouts(tmp_path, mark):
        with pytest.raises(BundleUnreadable, match=rf"stored rollout {path.name}: "):
            check_file(path)
    assert not mark.exists()
    with pytest.raises(
        BundleUnreadable, match=r"stored rollout call.pt: cannot be read as plain data \(it names posix.system\)"
    ):
        check_file(tmp_path / "call.pt")


START_EACH = """
import json, os, runpy, sys
import torch
for argv in json.loads(sys.argv[1]):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        sys.argv[1:] = argv
        runpy.run_module("rlk_repro.integration.start_vime", run_name="__main__", alter_sys=True)
        sys.exit(0)
    print("exit", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
"""Each start in a process of its own, of which torch is loaded once."""


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_vime_is_not_started_on_a_hostile_rollout(tmp_path: Path) -> None:
    """Torch's own archive reader checks the file, in the process that would become vime's."""
    _, mark = write_program(tmp_path)
    checkout = tmp_path / "vime checkout"
    (checkout / "vime").mkdir(parents=True)
    (checkout / "vime" / "__init__.py").touch()
    (checkout / "train.py").write_text("print('trains')\n")
    paths = [tmp_path / "call.pt", tmp_path / "program.pt"]
    assert set(paths) < set(hostile_rollouts(tmp_path, mark))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(checkout), str(ROOT)])}
    starts, expected = [], []
    for number, path in enumerate((*paths, tmp_path / "good")):
        folder = tmp_path / str(number)
        folder.mkdir()
        path.rename(folder / "0.pt")
        flag = ("--load-debug-rollout-data", "--load-forge-rollout-data")[number % 2]
        starts.append(["--num-rollout", "1", flag, str(folder / "{rollout_id}.pt")])
        expected += ["trains", "exit 0"] if path.name == "good" else ["exit 5"]
    done = proc.run([sys.executable, "-c", START_EACH, json.dumps(starts)], env=env, timeout_s=120)
    assert done.stdout.splitlines() == expected, done.stderr
    assert not mark.exists()


def test_prepare_refuses_a_hostile_rollout(tmp_path: Path) -> None:
    _, mark = write_program(tmp_path)
    folder = tmp_path / "mirror" / "rollouts" / "theirs"
    folder.mkdir(parents=True)
    data = write_rollout(folder / "0.pt", {"metadata": Call(f'touch "{mark}"')}).read_bytes()
    digest = "sha256:" + sha256_bytes(f"{sha256_bytes(data)}  0.pt\n".encode())
    stored = StoredRollouts(name="theirs", num_files=1, digest=digest, made_by="a stranger")
    storage = Storage(stored=stored, mirror=tmp_path / "mirror", is_offline=True)
    target = tmp_path / "prepared" / "rollouts" / "theirs"
    with pytest.raises((BundleUnreadable, EnvironmentMissing), match=r"it names posix\.system"):
        fill(PrepareStep(kind="rollouts", folder=target, is_wanted=lambda _: True, make=storage.run), lambda _: None)
    assert not mark.exists()
    assert not target.exists()


@pytest.mark.parametrize("name", ["vime-r3", "vime-tp2"])
def test_a_rollout_that_vime_stored_on_a_gpu_is_data(tmp_path: Path, name: str) -> None:
    path = tmp_path / "0.pt"
    path.write_bytes(lzma.decompress((ROOT / "tests" / "assets" / "rollouts" / f"{name}.pt.xz").read_bytes()))
    check_file(path)


def test_tensors_and_plain_values_are_data(tmp_path: Path) -> None:
    kinds = (torch.bfloat16, torch.int32, torch.bool)
    tensors = {str(kind): torch.zeros(2, dtype=kind) for kind in kinds}
    value = {"tokens": [1, 2], "text": "ünï", "pair": (1.5, None), "deep": {"done": True}, **tensors}
    check_file(write_rollout(tmp_path / "0.pt", value))
    random_rollouts.main(
        ["--seed=1", "--num-samples=2", "--prompt-len=2", "--vocab-size=9", "--num-layers=2", "--num-experts=4",
         "--num-experts-per-token=2", "--response-lens", "3", "--", str(tmp_path)]
    )  # fmt: skip
    check_file(tmp_path / "0.pt")
