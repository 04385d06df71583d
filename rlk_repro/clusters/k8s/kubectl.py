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
from rlk_repro.spec import KubernetesSettings

TIMEOUT_S: Final = 60.0
SEND_TIMEOUT_S: Final = 300.0
REQUEST_S: Final = 20
LAST_BYTES: Final = 2000

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

    @classmethod
    def of(cls, settings: KubernetesSettings) -> Target:
        return cls(namespace=settings.namespace, context=settings.context or "")

    @property
    def options(self) -> tuple[str, ...]:
        context = (f"--context={self.context}",) if self.context else ()
        return (*context, f"--namespace={self.namespace}")

    def run(self, *words: str, timeout_s: float = TIMEOUT_S, stdin: bytes = b"") -> proc.Completed:
        command = ("kubectl", *self.options, f"--request-timeout={int(timeout_s)}s", *words)
        call = proc.ask if words[0] == "get" else proc.run
        return call(command, timeout_s=timeout_s + REQUEST_S, stdin=stdin)

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
        """Return the matching objects; raise Unreachable or SchedulerRefused if kubectl fails, also the second time."""
        done = require(self.run("get", kinds, *words, "--ignore-not-found", "--output=json"))
        if not done.stdout.strip():
            return []
        value: Any = json.loads(done.stdout)
        return list(value.get("items", [value]))

    def get_allowed(self, kinds: str) -> list[dict[str, Any]] | None:
        """Return the objects; None if this user may not list them, or if there is no such kind."""
        try:
            return self.get(kinds)
        except Unreachable as error:
            raise EnvironmentMissing(*error.problems) from None
        except SchedulerRefused:
            return None

    def send(self, verb: str, objects: bytes, *options: str) -> proc.Completed:
        """Call ``apply`` or ``create``; the server refuses unknown fields."""
        words = (verb, "--filename=-", "--validate=strict", "--output=json", *options)
        return self.run(*words, timeout_s=SEND_TIMEOUT_S, stdin=objects)

    def require_server(self) -> str:
        """Return the server's version; raise EnvironmentMissing if no cluster answers."""
        done = self.run("version", "--output=json")
        if '"serverVersion"' not in done.stdout:
            hint = "kubectl config get-contexts"
            raise EnvironmentMissing(Problem("kubernetes", "no cluster answers", hint=hint))
        return str(json.loads(done.stdout)["serverVersion"]["gitVersion"])


def find_current_place() -> Target:
    """Return the context and namespace that kubectl uses by default; raise EnvironmentMissing if none is set."""
    path = "{.current-context} {.contexts[0].context.namespace}"
    words = ("kubectl", "config", "view", "--minify", f"--output=jsonpath={path}")
    done = proc.run(words, timeout_s=TIMEOUT_S)
    if not done.is_ok:
        what, hint = quote_words(done), "kubectl config use-context NAME"
        if "current-context" in done.stderr:
            what = "selects no cluster: no context is set"
        raise EnvironmentMissing(Problem("kubectl", what, hint=hint))
    context, _, namespace = done.stdout.partition(" ")
    return Target(namespace=namespace.strip() or "default", context=context)


def require(done: proc.Completed) -> proc.Completed:
    """Return kubectl's answer; if kubectl failed, raise Unreachable or SchedulerRefused with kubectl's message."""
    if done.is_ok:
        return done
    if done.is_outage:
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
