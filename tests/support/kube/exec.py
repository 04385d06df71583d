"""``exec`` as the real kubectl speaks it: a WebSocket of the subprotocol v5.channel.k8s.io, one channel per stream.

The command runs for real, as a process of the pod.  Used by the small API server and by the kubelet of a real one.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import parse_qs, urlsplit

from tests.support.kube.kubelet import Faults, RunningPod

PROTOCOL: Final = "v5.channel.k8s.io"
GUID: Final = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
STDOUT, STDERR, ERROR = 1, 2, 3
BINARY, CLOSE, PING, PONG = 2, 8, 9, 10
PIECE: Final = 1 << 15
RAN_WITH_FAILURE: Final = "NonZeroExitCode"
PodsOf = Callable[[], tuple[Faults, Mapping[str, RunningPod]]]


class Cut(Exception):
    """The connection broke, as the test wanted."""


def serve_exec(handler: BaseHTTPRequestHandler, pod: RunningPod, faults: Faults) -> bool:
    """False, with nothing answered, for a client that wants another protocol."""
    if PROTOCOL not in handler.headers.get("Sec-WebSocket-Protocol", ""):
        return False
    command = parse_qs(urlsplit(handler.path).query)["command"]
    key = handler.headers["Sec-WebSocket-Key"] + GUID
    handler.send_response(101)
    for name, value in (
        ("Upgrade", "websocket"),
        ("Connection", "Upgrade"),
        ("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()),
        ("Sec-WebSocket-Protocol", PROTOCOL),
    ):
        handler.send_header(name, value)
    handler.end_headers()
    handler.close_connection = True
    with contextlib.suppress(OSError, Cut):
        _Session(handler, faults).run(pod.execute(command, subprocess.PIPE))
    with contextlib.suppress(OSError):
        handler.connection.shutdown(socket.SHUT_RDWR)
    return True


class _Session:
    """One command over one connection."""

    def __init__(self, handler: BaseHTTPRequestHandler, faults: Faults) -> None:
        self._handler = handler
        self._faults = faults
        self._lock = threading.Lock()

    def run(self, process: subprocess.Popen[bytes]) -> None:
        with process as running:
            assert running.stdout is not None
            assert running.stderr is not None
            threading.Thread(target=self._answer_pings, daemon=True).start()
            errors = threading.Thread(target=self._pump, args=(running.stderr, STDERR), daemon=True)
            errors.start()
            try:
                self._pump(running.stdout, STDOUT)
                errors.join()
                self._send(BINARY, bytes([ERROR]) + json.dumps(describe_end(running.wait())).encode())
                self._send(CLOSE, (1000).to_bytes(2, "big"))
            finally:
                running.kill()
                errors.join()

    def _pump(self, stream: IO[bytes], channel: int) -> None:
        with contextlib.suppress(OSError) if channel == STDERR else contextlib.nullcontext():
            while data := stream.read(PIECE):
                self._send(BINARY, bytes([channel]) + data)

    def _send(self, kind: int, data: bytes) -> None:
        size = len(data)
        length = bytes([size]) if size < 126 else bytes([126]) + size.to_bytes(2, "big")
        with self._lock:
            if kind == BINARY and self._faults.cut(size):
                self._handler.connection.shutdown(socket.SHUT_RDWR)
                raise Cut
            self._handler.wfile.write(bytes([0x80 | kind]) + length + data)

    def _answer_pings(self) -> None:
        """A client's frames are short and masked; without a stream of its own it sends nothing else."""
        with contextlib.suppress(OSError, ValueError, Cut):
            while len(head := self._handler.rfile.read(2)) == 2:
                mask = self._handler.rfile.read(4)
                data = self._handler.rfile.read(head[1] & 0x7F)
                if head[0] & 0x0F == PING:
                    self._send(PONG, bytes(byte ^ mask[place % 4] for place, byte in enumerate(data)))


def describe_end(code: int) -> dict[str, object]:
    """What the error channel says at the end."""
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    text = str(code if code > 0 else 128 - code)
    return {
        "metadata": {},
        "status": "Failure",
        "reason": RAN_WITH_FAILURE,
        "message": f"command terminated with non-zero exit code: exit status {text}",
        "details": {"causes": [{"reason": "ExitCode", "message": text}]},
    }


class KubeletServer:
    """The part of kubelets that a real API server calls: a WebSocket is passed through to who says to take it."""

    def __init__(self, folder: Path, pods: PodsOf) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                faults, running = pods()
                found = re.fullmatch(r"/exec/[^/]+/([^/]+)/[^/]+", urlsplit(self.path).path)
                pod = running.get(found[1]) if found else None
                if pod is None or faults.no_exec:
                    self.send_error(404)
                elif not serve_exec(self, pod, faults):
                    self.send_error(400)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "kubelet.crt", folder / "kubelet.key")
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()

    def describe(self) -> dict[str, object]:
        """What the status of its nodes says of it."""
        return {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._server.server_address[1]}},
            "declaredFeatures": ["ExtendWebSocketsToKubelet"],
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
