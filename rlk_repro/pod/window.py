"""Serves a run directory to whoever may ask through the API server.  It reads; the one wish it takes is to stop."""

from __future__ import annotations

import math
import re
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, Self

from rlk_repro.backends.lastword import read_last_word
from rlk_repro.errors import BundleUnreadable
from rlk_repro.files import dump_json, load_json, sha256_file
from rlk_repro.k8s.window import BLOCK_BYTES, BUNDLE, FACTS, STOP, TRIALS, Facts, TrialLog, wrap_block
from rlk_repro.rundir import RunDir

# who has not asked for so long does not follow
FOLLOWER_S: Final = 30.0
_BLOCK: Final = re.compile(rf"/({BUNDLE}|{TRIALS}/([^/]+))/(\d{{1,15}})/(\d{{1,9}})")


class Window:
    """A small HTTP server in threads of its own; use as a context manager."""

    def __init__(self, run_dir: RunDir, port: int, stop: Callable[[], object]) -> None:
        self.waits_for = ""
        self.failure = ""
        self._run_dir = run_dir
        self._stop = stop
        self._lock = threading.Lock()
        self._digest: tuple[tuple[int, int], str] | None = None
        self._last_log_read = -math.inf
        self._seen_bytes: dict[str, int] = {}
        window = self

        class Handler(_Handler):
            served = window

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

            def server_bind(self) -> None:
                if self.address_family == socket.AF_INET6:
                    self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                super().server_bind()

        self._server = Server(("", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="window", daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def ask_to_stop(self) -> None:
        self._stop()

    def read_facts(self) -> Facts:
        try:
            state = load_json(self._run_dir.state)
        except BundleUnreadable:
            state = None
        has_ended = read_last_word(self._run_dir).exit_code is not None or self._run_dir.pod_end.exists()
        size_bytes, digest = self._describe_bundle() if has_ended else (None, "")
        return Facts(
            state=state,
            is_sealed=self._run_dir.is_sealed,
            waits_for=self.waits_for,
            failure=self.failure,
            bundle_bytes=size_bytes,
            bundle_sha256=digest,
            trials=self._list_logs(),
        )

    def note_log_read(self, trial: str, end: int) -> None:
        self._last_log_read = time.monotonic()
        self._seen_bytes[trial] = max(end, self._seen_bytes.get(trial, 0))

    def is_followed(self) -> bool:
        """Whether somebody reads the trials' logs as they grow, and has not all of them yet."""
        return time.monotonic() - self._last_log_read < FOLLOWER_S and any(
            self._seen_bytes.get(trial.name, 0) < trial.size_bytes for trial in self._list_logs()
        )

    def find_file(self, what: str, trial: str | None) -> Path | None:
        if what == BUNDLE:
            return self._run_dir.bundle
        known = {folder.name: folder for folder in self._run_dir.trial_dirs()}
        return known[trial].stdout if trial in known else None

    def _list_logs(self) -> tuple[TrialLog, ...]:
        return tuple(
            TrialLog(name=trial.name, size_bytes=trial.stdout.stat().st_size, has_ended=trial.exit.is_file())
            for trial in self._run_dir.trial_dirs()
            if trial.stdout.is_file()
        )

    def _describe_bundle(self) -> tuple[int | None, str]:
        """Hashed once for each bundle: it is replaced whole, or not at all."""
        with self._lock:
            try:
                found = self._run_dir.bundle.stat()
            except FileNotFoundError:
                return None, ""
            mark = (found.st_mtime_ns, found.st_size)
            if self._digest is None or self._digest[0] != mark:
                self._digest = (mark, sha256_file(self._run_dir.bundle))
            return found.st_size, self._digest[1]


class _Handler(BaseHTTPRequestHandler):
    served: Window
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self._asked() == f"/{FACTS}":
            self._answer(200, dump_json(self.served.read_facts().to_json()), "application/json")
            return
        found = _BLOCK.fullmatch(self._asked())
        path = None if found is None else self.served.find_file(found[1].partition("/")[0], found[2])
        if found is None or path is None or int(found[4]) > BLOCK_BYTES:
            self._answer(404, b"no such thing here\n")
            return
        try:
            with path.open("rb") as stream:
                stream.seek(int(found[3]))
                data = stream.read(int(found[4]))
        except OSError as error:
            self._answer(500, f"{error.strerror}\n".encode())
            return
        self._answer(200, wrap_block(data), "application/octet-stream")
        if found[2]:
            self.served.note_log_read(found[2], int(found[3]) + len(data))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self._asked() != f"/{STOP}":
            self._answer(404, b"no such thing here\n")
            return
        self.served.ask_to_stop()
        self._answer(200, b"{}\n", "application/json")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the pod's output is for what went wrong."""

    def _asked(self) -> str:
        """Without the query: kubectl says there how long it waits, and the API server's proxy passes it on."""
        return self.path.partition("?")[0]

    def _answer(self, code: int, data: bytes, kind: str = "text/plain") -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
