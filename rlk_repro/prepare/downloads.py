"""Limit a download, because a server could redirect to any address or send data without end."""

from __future__ import annotations

import ipaddress
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPMessage
from importlib import import_module
from typing import IO, Any, Final, NoReturn, cast
from urllib.parse import urlsplit

from rlk_repro.base.errors import BundleUnreadable, EnvironmentMissing, Problem
from rlk_repro.base.units import format_bytes

TIMEOUT_S: Final = 60.0
_PORTS: Final = {"http": 80, "https": 443}
_PLAIN: Final = frozenset({"", "identity"})


@dataclass(frozen=True, kw_only=True)
class Bounds:
    asked: str
    what: str
    limit: int

    def check_address(self, url: str) -> None:
        """Raise OSError if a redirect may not lead to this address."""
        if _origin(url) == _origin(self.asked):
            return
        if urlsplit(url).scheme != "https":
            raise OSError(f"redirected to {url}, expected https or the requested address")
        if _is_inside(url) and not _is_inside(self.asked):
            raise OSError(f"redirected to {url}, an address of this machine or its network")

    def check_size(self, num_bytes: int) -> None:
        if num_bytes > self.limit:
            self._refuse(f"over {format_bytes(num_bytes)}")

    def check_headers(self, headers: Any) -> None:
        """Raise BundleUnreadable if a response is too large or compressed."""
        packing = headers.get("content-encoding") or ""
        if packing.lower() not in _PLAIN:
            self._refuse(f"compressed as {packing}")
        length = headers.get("content-length") or ""
        self.check_size(int(length) if length.isdecimal() else 0)

    def count(self, pieces: Any) -> Iterator[bytes]:
        total = 0
        for piece in pieces:
            total += len(piece)
            self.check_size(total)
            yield piece

    def _refuse(self, got: str) -> NoReturn:
        expected = f"at most {self.limit} bytes ({format_bytes(self.limit)})"
        raise BundleUnreadable(Problem(self.what, "is larger than allowed", got=got, expected=expected,
                                       hint="fetch the files by hand, and give their folder as --mirror"))  # fmt: skip


@contextmanager
def open_url(bounds: Bounds) -> Iterator[IO[bytes]]:
    """Open the requested address (``bounds.asked``) as a stream; a read beyond the limit raises BundleUnreadable."""
    opener = urllib.request.build_opener(_Redirects(bounds))
    with opener.open(bounds.asked, timeout=TIMEOUT_S) as answer:
        bounds.check_headers(answer.headers)
        yield cast("IO[bytes]", _Counted(answer, bounds))


@contextmanager
def guarded(session: Any, bounds: Bounds) -> Iterator[None]:
    """Inside the ``with`` block, limit all requests of huggingface_hub's client, which must be 1.0 or newer."""
    before = getattr(session, "event_hooks", None)
    if before is None:
        where = "python module huggingface_hub"
        raise EnvironmentMissing(Problem(where, "is too old", expected="version 1.0 or newer"))

    def see_request(request: Any) -> None:
        bounds.check_address(str(request.url))
        request.headers["accept-encoding"] = "identity"

    def see_response(response: Any) -> None:
        if response.request.method == "HEAD":
            return
        bounds.check_headers(response.headers)
        response.stream = _count_stream(response, bounds)

    session.event_hooks = {
        "request": [*before["request"], see_request],
        "response": [*before["response"], see_response],
    }
    try:
        yield
    finally:
        session.event_hooks = before


class _Redirects(urllib.request.HTTPRedirectHandler):
    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        self._bounds.check_address(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Counted:
    def __init__(self, stream: IO[bytes], bounds: Bounds) -> None:
        self._stream = stream
        self._bounds = bounds
        self._total = 0

    def read(self, size: int = -1) -> bytes:
        piece = self._stream.read(size)
        self._total += len(piece)
        self._bounds.check_size(self._total)
        return piece


def _count_stream(response: Any, bounds: Bounds) -> Any:
    # The client needs a stream class of the HTTP library that it uses, httpx or httpx2.
    base: Any = import_module(type(response).__module__.partition(".")[0]).SyncByteStream
    inner = response.stream
    kind = type("Counted", (base,), {"__iter__": lambda _: bounds.count(inner), "close": lambda _: inner.close()})
    return kind()


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)


def _is_inside(url: str) -> bool:
    """Whether a URL's host is this machine or in a private network; False if the host's name cannot be resolved."""
    host = urlsplit(url).hostname or ""
    try:
        found = {item[4][0] for item in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return any(not ipaddress.ip_address(str(address).partition("%")[0]).is_global for address in found)
