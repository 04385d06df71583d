"""The way from a real API server to the pods: an egress proxy, as where nodes lie in another network.

An API server dials neither loopback nor link-local addresses, and all pods want the same port.  So pods have addresses
of no machine, the API server asks this proxy for them (``CONNECT``), and it knows the process behind each.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.kube_kubelet import Faults, RunningPod

PIECE = 1 << 16
PodsOf = Callable[[], tuple[Faults, Mapping[str, RunningPod]]]


class Tunnel:
    """``pods`` says who is there now, and what is wrong."""

    def __init__(self, pods: PodsOf) -> None:
        tunnel = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                request = self.rfile.readline().decode()
                while self.rfile.readline().strip():
                    pass
                tunnel.connect(self.connection, request)

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True

        self._pods = pods
        self._folder = tempfile.TemporaryDirectory(prefix="rlk-repro-")  # the path of a socket must be short
        self.path = Path(self._folder.name) / "egress"
        self._server = Server(str(self.path), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._folder.cleanup()

    def connect(self, near: socket.socket, request: str) -> None:
        """``CONNECT 10.244.0.7:8640 HTTP/1.1`` and headers, then whatever both ends say."""
        address = request.split(" ")[1].rpartition(":")[0]
        faults, pods = self._pods()
        pod = next((pod for pod in pods.values() if pod.address == address), None)
        if pod is None or faults.no_proxy:
            near.sendall(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
            return
        try:
            far = socket.create_connection(("127.0.0.1", pod.port), timeout=60)
        except OSError:  # its window is not open yet
            near.sendall(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
            return
        with far:
            near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            back = threading.Thread(target=relay, args=(far, near, faults), daemon=True)
            back.start()
            relay(near, far, None)
            back.join()


def relay(source: socket.socket, target: socket.socket, faults: Faults | None) -> None:
    """Until one end is silent for good; faults cut it."""
    with contextlib.suppress(OSError):
        while (data := source.recv(PIECE)) and not (faults is not None and faults.cut(len(data))):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
