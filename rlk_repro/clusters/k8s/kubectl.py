"""Ask a cluster through ``kubectl``, with the user's own authentication."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from rlk_repro.base import proc
from rlk_repro.base.errors import EnvironmentMissing, Problem, SchedulerRefused
from rlk_repro.clusters.asking import quote_answer

TIMEOUT_S: Final = 60.0
SEND_TIMEOUT_S: Final = 300.0
REQUEST_S: Final = 20
SIDES: Final = ("client", "server")
LAST_BYTES: Final = 2000

_UNREACHABLE: Final = re.compile(
    r"connection refused|was refused|i/o timeout|no such host|TLS handshake|connection reset|EOF|deadline exceeded"
    r"|ServiceUnavailable|TooManyRequests|too many requests|network is unreachable|no route to host|Unable to connect",
    re.IGNORECASE,
)
# kubectl's prefixes, and its log of a retry, such as ``E1122 01:00:00.000000  123 memcache.go:265] …``
_NOISE: Final = r"^(?:error: |Error from server(?: \([A-Za-z]+\))?: |Error: )+|^[EWI]\d{4} \d\d:\d\d:.*"
# a line of a trial's log, which the leading agent prints behind the trial's name
_TRIAL: Final = re.compile(r"[0-9]+-[^ :]+: ")


class Unreachable(SchedulerRefused):
    """The API server did not answer; a later attempt may succeed."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A namespace of a cluster; an empty ``context`` means kubectl's current context."""

    namespace: str
    context: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        context = (f"--context={self.context}",) if self.context else ()
        return (*context, f"--namespace={self.namespace}")

    def run(self, *words: str, timeout_s: float = TIMEOUT_S, stdin: bytes = b"") -> proc.Completed:
        command = ("kubectl", *self.options, f"--request-timeout={int(timeout_s)}s", *words)
        return proc.run(command, timeout_s=timeout_s + REQUEST_S, stdin=stdin)

    @contextmanager
    def stream(self, *words: str) -> Iterator[BinaryIO]:
        """Yield the output of a long command, which ends with the block; raise as ``require`` does if it fails."""
        command = ("kubectl", *self.options, *words)
        reader, writer = os.pipe()
        with os.fdopen(reader, "rb") as stream, tempfile.TemporaryFile() as errors:
            try:
                process = proc.start(command, output_fd=writer, error_fd=errors.fileno())
            finally:
                os.close(writer)
            try:
                yield stream
                code = process.wait()
            finally:
                proc.signal_group(process.pid, signal.SIGKILL)
                process.wait()
            errors.seek(0)
            require(proc.Completed(argv=command, returncode=code, stdout="", stderr=errors.read().decode()))

    def get(self, kinds: str, *words: str) -> list[dict[str, Any]]:
        """Return the matching objects; raise Unreachable or SchedulerRefused if kubectl fails."""
        done = require(self.run("get", kinds, *words, "--ignore-not-found", "--output=json"))
        if not done.stdout.strip():
            return []
        value: Any = json.loads(done.stdout)
        return list(value["items"]) if value.get("kind", "").endswith("List") else [value]

    def send(self, verb: str, objects: bytes, *options: str) -> proc.Completed:
        """Call ``apply`` or ``create``; the server refuses unknown fields."""
        words = (verb, "--filename=-", "--validate=strict", "--output=json", *options)
        return self.run(*words, timeout_s=SEND_TIMEOUT_S, stdin=objects)

    def probe_versions(self) -> dict[str, str]:
        """Return the versions of client and server; if the server does not answer, only the client's."""
        done = self.run("version", "--output=json")
        try:
            value: Any = json.loads(done.stdout)
        except ValueError:
            return {}
        return {side: str(value[key]["gitVersion"]) for side in SIDES if (key := f"{side}Version") in value}

    def require_server(self) -> str:
        """Return the server's version; raise EnvironmentMissing if no cluster answers."""
        version = self.probe_versions().get("server")
        if version is None:
            raise EnvironmentMissing(Problem("kubernetes", "no cluster answers", hint="kubectl config get-contexts"))
        return version


def find_current_place() -> Target:
    """Return the context and namespace that kubectl uses by default; raise EnvironmentMissing if none is set."""
    done = proc.run(("kubectl", "config", "view", "--minify", "--output=json"), timeout_s=TIMEOUT_S)
    if not done.is_ok:
        raise EnvironmentMissing(Problem("kubectl", quote_words(done), hint="kubectl config use-context NAME"))
    value: Any = json.loads(done.stdout)
    contexts = value.get("contexts") or [{}]
    namespace = (contexts[0].get("context") or {}).get("namespace") or "default"
    return Target(namespace=namespace, context=str(value.get("current-context", "")))


def require(done: proc.Completed) -> proc.Completed:
    """Return kubectl's answer; if kubectl failed, raise Unreachable or SchedulerRefused with kubectl's message."""
    if done.is_ok:
        return done
    # search stderr, because quote_words removes the server's reason, such as (ServiceUnavailable)
    if done.is_timeout or _UNREACHABLE.search(done.stderr):
        raise Unreachable(Problem("kubernetes", f'did not answer: "{quote_words(done)}"'))
    raise SchedulerRefused(Problem("kubernetes", f'refused: "{quote_words(done)}"'))


def quote_words(done: proc.Completed) -> str:
    return quote_answer(done, _NOISE)


def quote_last_lines(text: str) -> str:
    """Join the last two lines that are no trial's: those of this tool's errors name the problem and the next step.

    Kubernetes keeps only the last bytes of a failed container's log, so its first line may be cut.
    """
    lines = text.splitlines()[1 if len(text) >= LAST_BYTES else 0 :]
    words = [" ".join(line.split()) for line in lines if not _TRIAL.match(line)]
    return "; ".join(words[-2:])
