"""Downloads of ``prepare`` are limited in size and never follow a stranger to another address."""

from __future__ import annotations

import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rlk_repro.base.errors import BundleUnreadable, EnvironmentMissing
from rlk_repro.prepare.making import Order, fill
from rlk_repro.prepare.stored_rollouts import Storage
from rlk_repro.spec import StoredRollouts
from tests.support.hub_server import HubServer, serve_hub
from tests.support.prepare_examples import COMMIT, fill_hub, from_hub, words

Call = Callable[..., tuple[int, str, str]]
MIB = 1 << 20


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
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    pytest.importorskip("huggingface_hub")
    with serve_hub() as server:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        fill_hub(server)
        yield server


def fetch_rollouts(tmp_path: Path, url: str) -> None:
    wanted = StoredRollouts(name="few", num_files=2, digest="sha256:" + "0" * 64, made_by="a test", fetch=(url,))
    storage = Storage(stored=wanted, mirror=None, is_offline=False)
    folder = tmp_path / "prepared" / "rollouts" / "few"
    fill(Order(kind="rollouts", folder=folder, is_wanted=lambda _: True, make=storage.run), lambda _: None)


def left(folder: Path) -> list[str]:
    """List the files other than locks and notes."""
    found = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    return [path.name for path in found if path.suffix not in {".lock"} and path.name != "revision"]


def test_a_file_beyond_its_announced_size_is_given_up_as_it_comes(hub: HubServer, call: Call, tmp_path: Path) -> None:
    prepared = tmp_path / "prepared"
    stranger = endless()
    hub.instead = {"data/train.jsonl": stranger.give}
    code, _, error = call(*words("--cache", str(prepared), *from_hub()))
    assert stranger.num_sent < 8 * MIB
    assert code == 5
    assert f"acme/sums@{COMMIT[:12]} data/train.jsonl: is larger than allowed, got 'over " in error
    assert "expected at most 1360 bytes (1.3 KiB)" in error
    assert "hint: fetch the files by hand, and give their folder as --mirror" in error
    assert left(prepared) == []


def test_a_list_of_files_has_a_size_limit(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    stranger = endless(200)
    with serve(stranger) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        code, _, error = call(*words("--cache", str(tmp_path / "prepared"), *from_hub()))
    assert stranger.num_sent < 128 * MIB  # what the kernel's buffers took counts as sent
    assert code == 5
    assert "the file list of acme/sums: is larger than allowed" in error


@pytest.mark.parametrize("place", ["file", "list"])
def test_the_hub_cannot_redirect_to_a_plain_http_address(
    hub: HubServer, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    prepared = tmp_path / "prepared"
    stranger = Stranger()
    with serve(stranger) as elsewhere, serve(moved(f"{elsewhere}/x")) as front:
        if place == "list":
            monkeypatch.setenv("HF_ENDPOINT", front)
        hub.instead = {"data/train.jsonl": moved(f"{elsewhere}/x").give}
        code, _, error = call(*words("--cache", str(prepared), *from_hub()))
    assert stranger.requests == []
    assert code == 3
    assert f"redirected to {elsewhere}/x, expected https or the requested address" in error
    assert left(prepared) == []


def test_an_archive_server_cannot_redirect_to_a_plain_http_address(tmp_path: Path) -> None:
    stranger = Stranger()
    refused = pytest.raises(EnvironmentMissing, match=r"redirected to .*, expected https or the requested address")
    with serve(stranger) as elsewhere, serve(moved(f"{elsewhere}/x")) as front, refused:
        fetch_rollouts(tmp_path, f"{front}/a.tgz")
    assert stranger.requests == []
    assert left(tmp_path / "prepared") == []


def test_an_archive_has_a_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlk_repro.prepare.stored_rollouts.MAX_ARCHIVE_BYTES", 3 * MIB, raising=False)
    stranger = endless()
    stranger.chunk = _tar_header("0.pt", 64 * MIB).ljust(MIB, b"\0")
    with serve(stranger) as url, pytest.raises(BundleUnreadable, match=r"at most 3145728 bytes \(3.0 MiB\)"):
        fetch_rollouts(tmp_path, f"{url}/a.tar")
    assert stranger.num_sent < 32 * MIB
    assert left(tmp_path / "prepared") == []


def _tar_header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf()


@pytest.mark.parametrize(
    ("asked", "target", "is_allowed"),
    [
        ("https://93.184.216.34/a", "https://93.184.216.35/b", True),
        ("https://93.184.216.34/a", "https://93.184.216.34:443/b", True),
        ("https://93.184.216.34/a", "http://93.184.216.34/b", False),
        ("https://93.184.216.34/a", "https://127.0.0.1/b", False),
        ("https://93.184.216.34/a", "https://[::1]/b", False),
        ("https://93.184.216.34/a", "https://169.254.169.254/latest", False),
        ("https://93.184.216.34/a", "https://10.0.0.1/b", False),
        ("https://93.184.216.34/a", "https://localhost/b", False),
        ("https://93.184.216.34/a", "file:///etc/passwd", False),
        ("https://93.184.216.34/a", "ftp://93.184.216.34/b", False),
        ("http://10.0.0.1:8080/a", "http://10.0.0.1:8080/b", True),
        ("http://10.0.0.1:8080/a", "http://10.0.0.1:9090/b", False),
        ("http://10.0.0.1:8080/a", "https://10.0.0.2/b", True),
    ],
)
def test_a_redirect_may_only_lead_to_allowed_addresses(asked: str, target: str, is_allowed: bool) -> None:
    from rlk_repro.prepare.downloads import Bounds

    bounds = Bounds(asked=asked, what="a file", limit=1)
    if is_allowed:
        bounds.check_address(target)
        return
    with pytest.raises(OSError, match=r"redirected to"):
        bounds.check_address(target)


def test_a_compressed_answer_is_refused_because_its_size_is_unknown(call: Call, tmp_path: Path, hub: HubServer) -> None:
    hub.instead = {"data/train.jsonl": endless(1, **{"Content-Encoding": "gzip"}).give}
    code, _, error = call(*words("--cache", str(tmp_path / "prepared"), *from_hub()))
    assert code == 5
    assert "got 'compressed as gzip'" in error
