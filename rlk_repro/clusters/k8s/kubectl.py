"""Ask a cluster through ``kubectl``, with the user's own authentication."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from rlk_repro.base import proc
from rlk_repro.base.errors import EnvironmentMissing, Problem, SchedulerRefused
from rlk_repro.base.files import dump_json
from rlk_repro.clusters.asking import quote_answer

TIMEOUT_S: Final = 60.0
SEND_TIMEOUT_S: Final = 300.0
REQUEST_S: Final = 20

_NOT_FOUND: Final = re.compile(r"\(NotFound\)|could not find the requested resource|doesn't have a resource type")
_UNREACHABLE: Final = re.compile(
    r"connection refused|was refused|i/o timeout|no such host|TLS handshake|connection reset|EOF|deadline exceeded"
    r"|ServiceUnavailable|TooManyRequests|too many requests|network is unreachable|no route to host|Unable to connect",
    re.IGNORECASE,
)
_PREFIX: Final = r"^(?:error: |Error from server(?: \([A-Za-z]+\))?: |Error: )+"
# kubectl's log of a retry, such as ``E1122 01:00:00.000000  123 memcache.go:265] …``
_RETRY: Final = r"^[EWI]\d{4} \d\d:\d\d:.*"


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
        """Yield the output of a command that runs for a long time; the end of the block also ends the command."""
        reader, writer = os.pipe()
        try:
            process = proc.start(("kubectl", *self.options, *words), output_fd=writer, is_quiet=True)
        finally:
            os.close(writer)
        with os.fdopen(reader, "rb") as stream:
            try:
                yield stream
            finally:
                proc.signal_group(process.pid, signal.SIGKILL)
                process.wait()

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

    def delete(self, kinds: str, selector: str, *options: str) -> proc.Completed:
        return self.run("delete", kinds, f"--selector={selector}", "--ignore-not-found", "--wait=false", *options)


class Unreachable(SchedulerRefused):
    """The API server did not answer; a later attempt may succeed."""


def find_obstacle() -> str | None:
    """Return why kubectl can send nothing from this machine, or None; no cluster is contacted."""
    try:
        done = proc.run(("kubectl", "version", "--client", "--output=json"), timeout_s=TIMEOUT_S)
    except EnvironmentMissing as error:
        return str(error)
    return None if done.is_ok else f"kubectl is not usable ({quote_words(done)})"


def find_current_place() -> Target:
    """Return the context and namespace that kubectl uses by default; raise EnvironmentMissing if none is set."""
    done = proc.run(("kubectl", "config", "view", "--minify", "--output=json"), timeout_s=TIMEOUT_S)
    if not done.is_ok:
        words = quote_words(done)
        raise EnvironmentMissing(Problem("kubectl", words, hint="kubectl config use-context NAME"))
    value: Any = json.loads(done.stdout)
    contexts = value.get("contexts") or [{}]
    namespace = (contexts[0].get("context") or {}).get("namespace") or "default"
    return Target(namespace=namespace, context=str(value.get("current-context", "")))


def probe_versions(place: Target) -> dict[str, str]:
    """Return the versions of client and server; if the server does not answer, only the client's."""
    done = place.run("version", "--output=json")
    try:
        value: Any = json.loads(done.stdout)
    except ValueError:
        return {}
    names = {"client": "clientVersion", "server": "serverVersion"}
    return {name: str(value[key]["gitVersion"]) for name, key in names.items() if isinstance(value.get(key), Mapping)}


def require_server(place: Target) -> str:
    """Return the server's version; raise EnvironmentMissing if no cluster answers."""
    obstacle = find_obstacle()
    versions = {} if obstacle else probe_versions(place)
    if "server" not in versions:
        words = obstacle or "no cluster answers"
        raise EnvironmentMissing(Problem("kubernetes", words, hint="kubectl config get-contexts"))
    return versions["server"]


def explain(done: proc.Completed) -> SchedulerRefused:
    words = quote_words(done)
    # search stderr, because quote_words removes the server's reason, such as (ServiceUnavailable)
    if done.is_timeout or _UNREACHABLE.search(done.stderr):
        return Unreachable(Problem("kubernetes", f'did not answer: "{words}"'))
    return SchedulerRefused(Problem("kubernetes", f'refused: "{words}"'))


def require(done: proc.Completed) -> proc.Completed:
    """Return kubectl's answer; if kubectl failed, raise Unreachable or SchedulerRefused with kubectl's message."""
    if not done.is_ok:
        raise explain(done)
    return done


def is_not_found(done: proc.Completed) -> bool:
    return not done.is_ok and _NOT_FOUND.search(done.stderr) is not None


def quote_words(done: proc.Completed) -> str:
    return quote_answer(done, f"{_PREFIX}|{_RETRY}")


def join_lines(text: str, num_last: int = 2) -> str:
    """Join the last lines of a pod's output or message."""
    return "; ".join(" ".join(line.split()) for line in text.splitlines()[-num_last:])


def make_config_map(name: str, namespace: str, labels: Mapping[str, str], owner: Mapping[str, Any],
                    files: Mapping[str, bytes]) -> bytes:  # fmt: skip
    value = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": dict(labels),
            "ownerReferences": [make_owner(owner)],
        },
        "data": {key: data.decode() for key, data in files.items()},
    }
    return dump_json(value)


def make_owner(item: Mapping[str, Any]) -> dict[str, str]:
    metadata = item["metadata"]
    return {
        "apiVersion": str(item["apiVersion"]),
        "kind": str(item["kind"]),
        "name": str(metadata["name"]),
        "uid": str(metadata["uid"]),
    }
