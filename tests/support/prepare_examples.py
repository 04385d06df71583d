"""Runs for ``prepare`` with small parts: the smoke run of vime with its model and data replaced by ``--set``."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

from tests import ROOT

COMMIT = "1" * 40
LATER = "2" * 40
TINY = tuple(
    word
    for size in ("num-layers=2", "hidden-size=64", "ffn-hidden-size=128", "num-attention-heads=4", "kv-channels=16",
                 "num-query-groups=2", "vocab-size=512")
    for word in ("--set", f"workload.model.arguments.{size}")
)  # fmt: skip
BRIDGE = ("--set", "workload.model.checkpoint=bridge")


def words(*more: str) -> list[str]:
    """``prepare`` of the smoke run without conversion; by itself it needs no hub."""
    return ["prepare", "vime-smoke", "--hardware", "h200", *TINY, *BRIDGE, *more]


def from_hub(revision: str | None = COMMIT) -> list[str]:
    """The same with model and data from a hub."""
    pin = f", revision: '{revision}'" if revision else ""
    return [
        *("--set", f"workload.model.source={{kind: hub, repository: acme/tiny{pin}}}"),
        *("--set", f"workload.data.source={{kind: hub, repository: acme/sums, file: data/train.jsonl{pin}}}"),
    ]


def fill_hub(hub: HubServer, commit: str = COMMIT, *, num_shards: int = 3, shard_bytes: int = 200_000) -> None:
    """A model of several shards and what else lies in such a repository, and a data set."""
    shards = {f"model-{n:05}.safetensors": make_safetensors(f"{commit}{n}", shard_bytes) for n in range(num_shards)}
    files = {
        "config.json": json.dumps({"model_type": "qwen3", "from": commit}).encode(),
        "tokenizer.json": b"{}" * 50,
        "model.safetensors.index.json": json.dumps({"weight_map": {name: name for name in shards}}).encode(),
        "pytorch_model.bin": b"\0" * 100,
        "original/consolidated.safetensors": b"\0" * 100,
        "README.md": b"# tiny",
    }
    hub.add("models", "acme/tiny", commit, {**files, **shards})
    hub.add("datasets", "acme/sums", commit, {"data/train.jsonl": b'{"prompt": "1 + 1", "label": "2"}\n' * 40,
                                              "data/test.jsonl": b"{}\n"})  # fmt: skip


def make_safetensors(seed: str, num_bytes: int) -> bytes:
    header = json.dumps({"x": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    import random

    return struct.pack("<Q", len(header)) + header + random.Random(seed).randbytes(num_bytes)


def hub_environment(hub: HubServer, home: Path) -> dict[str, str]:
    """For a process that is to ask this hub and no other, with nothing cached."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {**kept, **own, "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)}


def argv(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rlk_repro", *arguments]


# Stored rollouts as vime writes them.


@cache
def make_rollout(number: int) -> bytes:
    """The bytes of a file of ``--save-debug-rollout-data``."""
    sample = {"tokens": [number, 1, 2], "reward": 0.5, "rollout_log_probs": torch.zeros(3)}
    stream = io.BytesIO()
    torch.save({"rollout_id": number, "samples": [sample]}, stream)
    return stream.getvalue()


# A hub on loopback: what its client asks of the API, and files, as slowly as a test wants.


LARGE_BYTES = 10_000  # beyond it a file is stored by its sha256, as with git-lfs
_PATH = re.compile(r"/(?P<kind>datasets/)?(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<file>.+)")
_API = re.compile(
    r"/api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+?)(/(?P<what>revision|tree)/(?P<rev>[^/?]+))?(\?.*)?"
)


@dataclass
class HubServer:
    """What is served: ``repositories[kind/name][commit][file]``, the last commit being the branch's."""

    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    bytes_per_s: float | None = None
    damaged: set[str] = field(default_factory=set)
    gets: Counter[str] = field(default_factory=Counter)
    url: str = ""

    def add(self, kind: str, name: str, commit: str, files: dict[str, bytes]) -> None:
        self.repositories.setdefault(f"{kind}/{name}", {})[commit] = files

    def find(self, kind: str, name: str, revision: str | None) -> tuple[str, dict[str, bytes]] | None:
        commits = self.repositories.get(f"{kind}/{name}")
        if not commits:
            return None
        commit = revision if revision not in {None, "main"} else list(commits)[-1]
        return (commit, commits[commit]) if commit in commits else None


def describe(name: str, data: bytes) -> dict[str, object]:
    """One file in the words of the API and of the API's tree."""
    found: dict[str, object] = {"size": len(data), "rfilename": name, "blobId": git_hash(data)}
    found |= {"type": "file", "path": name, "oid": git_hash(data)}
    if len(data) > LARGE_BYTES:
        sha256 = hashlib.sha256(data).hexdigest()
        found["lfs"] = {"size": len(data), "sha256": sha256, "oid": sha256, "pointerSize": 130}
    return found


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def _answer(self, *, is_head: bool) -> None:
        api, file = _API.fullmatch(self.path), _PATH.fullmatch(self.path)
        if api is not None:
            self._describe(api)
            return
        kind = "datasets" if file and file["kind"] else "models"
        found = file and self.hub.find(kind, file["repo"], file["rev"])
        if not file or not found or file["file"] not in found[1]:
            self._refuse("EntryNotFound")
            return
        self._send_file(found[0], file["file"], found[1][file["file"]], is_head=is_head)

    def _describe(self, api: re.Match[str]) -> None:
        if self.hub.find(api["kind"], api["repo"], None) is None:
            self._refuse("RepoNotFound")
            return
        found = self.hub.find(api["kind"], api["repo"], api["rev"])
        if found is None:
            self._refuse("RevisionNotFound")
            return
        files = [describe(name, data) for name, data in found[1].items()]
        answer = files if api["what"] == "tree" else {"id": api["repo"], "sha": found[0], "siblings": files, "tags": []}
        body = json.dumps(answer).encode()
        self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _refuse(self, code: str) -> None:
        self._head(404, {"X-Error-Code": code, "Content-Length": "0"})

    def _send_file(self, commit: str, name: str, data: bytes, *, is_head: bool) -> None:
        etag = hashlib.sha256(data).hexdigest() if len(data) > LARGE_BYTES else git_hash(data)
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        headers = {"Content-Length": str(len(data) - start), "X-Repo-Commit": commit, "ETag": f'"{etag}"'}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._head(206 if start else 200, headers)
        if not is_head:
            self.hub.gets[name] += 1
            self._trickle((data[::-1] if name in self.hub.damaged else data)[start:])

    def _trickle(self, data: bytes) -> None:
        speed = self.hub.bytes_per_s
        step = max(1, len(data) if speed is None else int(speed / 20))
        try:
            for start in range(0, len(data), step):
                self.wfile.write(data[start : start + step])
                time.sleep(0 if speed is None else 1 / 20)
        except OSError:  # the client was killed
            self.close_connection = True

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


@contextmanager
def serve_hub() -> Iterator[HubServer]:
    hub = HubServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
