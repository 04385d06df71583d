"""Stored rollouts by their digest: from a mirror, or from archives over HTTP, whatever else those hold."""

from __future__ import annotations

import io
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rlk_repro.base.errors import BundleUnreadable, EnvironmentMissing, SpecError
from rlk_repro.base.files import sha256_bytes
from rlk_repro.prepare.contents import load_contents
from rlk_repro.prepare.making import Order, fill
from rlk_repro.prepare.stored_rollouts import Storage
from rlk_repro.spec import StoredRollouts
from tests.support.prepare_examples import make_rollout

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


def pack(path: Path, files: dict[str, bytes], mode: str = "w:gz") -> None:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def fetch(
    tmp_path: Path, *urls: str, digest: str = DIGEST, is_offline: bool = False, mirror: Path | None = None
) -> Path:
    stored = StoredRollouts(name="first", num_files=NUM_FILES, digest=digest, made_by="a test", fetch=urls)
    storage = Storage(stored=stored, mirror=mirror, is_offline=is_offline)
    folder = tmp_path / "prepared" / "rollouts" / "first"
    fill(Order(kind="rollouts", folder=folder, is_wanted=lambda _: True, make=storage.run), lambda _: None)
    return folder


@pytest.mark.parametrize(("name", "mode"), [("a.tar", "w"), ("b.tgz", "w:gz"), ("c.tar.xz", "w:xz")])
def test_any_archive_that_holds_them_will_do(served: tuple[Path, str], tmp_path: Path, name: str, mode: str) -> None:
    folder, url = served
    others = {"plan.json": b"{}", "trials/0/stdout.log": b"x", "rollouts/1234/stdout.log": b"x", "99.pt": b"too many"}
    pack(folder / name, others | {f"rollouts/1234/{file}": data for file, data in FILES.items()}, mode)
    target = fetch(tmp_path, f"{url}/absent.tgz", f"{url}/{name}")
    assert {path.name: path.read_bytes() for path in target.iterdir()} == FILES
    contents = load_contents(target)
    assert contents is not None
    assert contents.source["digest"] == DIGEST


def test_names_that_would_leave_the_folder_stay_in_it(served: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = served
    pack(folder / "a.tgz", {f"../../{file}" if file == "3.pt" else f"/{file}": data for file, data in FILES.items()})
    target = fetch(tmp_path, f"{url}/a.tgz")
    assert {path.name for path in target.iterdir()} == FILES.keys()
    assert not list(tmp_path.glob("*.pt"))


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


def test_a_truncated_archive_is_reported(served: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = served
    pack(folder / "a.tar", {name: data * 1000 for name, data in FILES.items()}, "w")
    (folder / "a.tar").write_bytes((folder / "a.tar").read_bytes()[:30000])
    with pytest.raises((EnvironmentMissing, BundleUnreadable)):
        fetch(tmp_path, f"{url}/a.tar")
    with pytest.raises(EnvironmentMissing, match="could not be fetched"):
        fetch(tmp_path, f"{url}/absent.tgz")


def test_offline_makes_no_request(served: tuple[Path, str], tmp_path: Path) -> None:
    folder, url = served
    pack(folder / "a.tgz", FILES)
    with pytest.raises(EnvironmentMissing, match="rollouts first: not found"):
        fetch(tmp_path, f"{url}/a.tgz", is_offline=True)
