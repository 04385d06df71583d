"""A small API server on the loopback that the real ``kubectl`` speaks with.

What only a real one could show, it does not show (docs/kubernetes.md).
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import threading
import uuid
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from tests.support.kube.cluster import Cluster, make_far_pod
from tests.support.kube.exec import serve_exec
from tests.support.kube.kubelet import Faults, RunningPod
from tests.support.kube.store import RESOURCES, Gone, MemoryStore, Object, Resource, merge, now
from tests.support.kube.validate import find_errors

_PATH: Final = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+/[^/]+))(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>exec|log|status))?"
)
OPERATORS: Final = frozenset({"RayJob", "ComputeDomain", "LocalQueue"})


class KubeServer(Cluster):
    """Its controllers, scheduler and kubelets are stand-ins."""

    store: MemoryStore

    def __init__(self, folder: Path, faults: Faults | None = None, num_nodes: int = 4) -> None:
        super().__init__(folder, MemoryStore(), faults, num_nodes)
        self.without: frozenset[str] = frozenset()
        self.requests: list[str] = []
        self.server: ThreadingHTTPServer | None = None
        self.port = 0

    def start(self) -> None:
        server = self

        class Handler(_Handler):
            kube = server

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

        self.server = Server(("127.0.0.1", self.port), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.write_kubeconfig({"server": f"http://127.0.0.1:{self.port}"}, {})

    def stop(self) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None

    def locked(self) -> contextlib.AbstractContextManager[object]:
        return self.store.lock

    def add(self, plural: str, item: Object) -> None:
        self.store.put(plural, item)

    def refuse(self, kind: str) -> None:
        self.faults.refuse_create = kind

    def forbid(self, plural: str) -> None:
        self.faults.forbidden = plural

    def remove_operators(self) -> None:
        self.without = OPERATORS

    def show(self, name: str, pod: RunningPod) -> None:
        self.running[name] = pod
        self.store.put("pods", make_far_pod(name))


class _Handler(BaseHTTPRequestHandler):
    kube: KubeServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.handle_one("GET")

    def do_POST(self) -> None:
        self.handle_one("POST")

    def do_PATCH(self) -> None:
        self.handle_one("PATCH")

    def do_DELETE(self) -> None:
        self.handle_one("DELETE")

    def handle_one(self, verb: str) -> None:
        url = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        self.kube.requests.append(f"{verb} {self.path}")
        found = _PATH.fullmatch(url.path)
        special = discover(self.kube, url.path)
        if special is not None:
            self.answer(200, special)
        elif found is None:
            self.refuse(404, "NotFound", f"no {url.path}")
        elif found["sub"] == "exec":
            self.execute(found["name"] or "")
        else:
            self.serve(verb, found, query, body)

    def serve(self, verb: str, found: re.Match[str], query: Mapping[str, str], body: bytes) -> None:
        faults, store = self.kube.faults, self.kube.store
        plural, name, namespace = found["plural"], found["name"] or "", found["namespace"] or ""
        row = next((row for row in RESOURCES if row.plural == plural), None)
        if row is None or row.kind in self.kube.without:
            self.refuse(404, "NotFound", "the server could not find the requested resource")
            return
        if not row.is_namespaced:
            namespace = ""
        if plural in {faults.forbidden, "customresourcedefinitions"}:
            self.refuse(403, "Forbidden", f'{plural} is forbidden: User "me" cannot {verb.lower()} resource "{plural}"')
            return
        if plural == "selfsubjectaccessreviews":
            self.review(json.loads(body))
            return
        if verb == "GET" and not name:
            self.answer(200, self.list(row, namespace, query))
            return
        item = store.find(plural, namespace, name)
        if verb == "POST":
            self.create(row, namespace, query, json.loads(body))
        elif item is None:
            self.refuse(404, "NotFound", f'{plural} "{name}" not found', name, plural)
        elif verb == "PATCH":
            merge(item, json.loads(body))
            store.put(plural, item)
            self.answer(200, item)
        elif verb == "DELETE":
            assert not (json.loads(body) if body else {}).get("dryRun")
            with contextlib.suppress(Gone):
                store.delete(plural, item)
            self.answer(200, item)
        else:
            self.answer(200, item)

    def review(self, review: Object) -> None:
        attributes = review["spec"]["resourceAttributes"]
        wanted = "/".join(attributes[key] for key in ("resource", "subresource") if attributes.get(key))
        self.answer(201, {**review, "status": {"allowed": wanted != self.kube.faults.forbidden}})

    def create(self, row: Resource, namespace: str, query: Mapping[str, str], item: Object) -> None:
        kube, name = self.kube, item["metadata"]["name"]
        if kube.faults.refuse_create == row.kind:
            what = f'{row.plural} "{name}" is forbidden: {kube.faults.refuse_words}'
            self.refuse(403, "Forbidden", what, name, row.plural)
            return
        if row.is_namespaced and namespace != "default":
            self.refuse(404, "NotFound", f'namespaces "{namespace}" not found', namespace, "namespaces")
            return
        errors = find_errors(copy.deepcopy(item), ("1.34",)) if query.get("fieldValidation") == "Strict" else []
        if errors:
            self.refuse(400, "BadRequest", f"strict decoding error: {'; '.join(errors)}", name, row.plural)
            return
        item["metadata"]["namespace"] = namespace
        try:
            if query.get("dryRun") == "All":
                item["metadata"].update(uid=str(uuid.uuid4()), creationTimestamp=now())
            else:
                item = kube.store.create(row.plural, item)
        except Gone:
            self.refuse(409, "AlreadyExists", f'{row.plural} "{name}" already exists', name, row.plural)
            return
        self.answer(201, item)

    def list(self, row: Resource, namespace: str, query: Mapping[str, str]) -> Object:
        wanted = dict(part.split("=", 1) for part in query.get("labelSelector", "").split(",") if part)
        fields = dict(part.split("=", 1) for part in query.get("fieldSelector", "").split(",") if part)
        items = [
            item
            for item in self.kube.store.list(row.plural)
            if (not namespace or item["metadata"].get("namespace") == namespace)
            and all(item["metadata"].get("labels", {}).get(key) == value for key, value in wanted.items())
            and all(find_field(item, key) == value for key, value in fields.items())
        ]
        for item in items:
            item.update(apiVersion=row.version, kind=row.kind)
        kind = f"{row.kind}List"
        return {"apiVersion": row.version, "kind": kind, "metadata": {"resourceVersion": "1"}, "items": items}

    def execute(self, name: str) -> None:
        kube = self.kube
        pod = kube.running.get(name)
        if kube.faults.forbidden == "pods/exec":
            self.refuse(403, "Forbidden", f'pods "{name}" is forbidden: User "me" cannot create resource "pods/exec"')
        elif pod is None or kube.faults.no_exec:
            self.refuse(500, "InternalError", f"error dialing backend: no kubelet of pod {name}")
        elif not serve_exec(self, pod, kube.faults):
            self.refuse(400, "BadRequest", "unable to upgrade: WebSocket alone is spoken here")

    def refuse(self, code: int, reason: str, message: str, name: str = "", plural: str = "") -> None:
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": reason,
                  "message": message, "code": code, "details": {"name": name, "kind": plural}}  # fmt: skip
        self.answer(code, status)

    def answer(self, code: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def discover(kube: KubeServer, path: str) -> Object | None:
    """What kubectl asks before anything else: versions, groups, resources, and which of them know strict validation."""
    rows = [row for row in RESOURCES if row.kind not in kube.without]
    groups = sorted({row.version for row in rows if "/" in row.version})
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        listed = [{"groupVersion": group, "version": group.partition("/")[2]} for group in groups]
        return {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [
                {"name": item["groupVersion"].partition("/")[0], "versions": [item], "preferredVersion": item}
                for item in listed
            ],
        }
    if path == "/openapi/v3":
        paths = {f"apis/{group}": {"serverRelativeURL": f"/openapi/v3/apis/{group}"} for group in groups}
        return {"paths": {**paths, "api/v1": {"serverRelativeURL": "/openapi/v3/api/v1"}}}
    version = path.removeprefix("/openapi/v3").removeprefix("/apis/").removeprefix("/api/")
    known = [row for row in rows if row.version == version]
    if not known:
        return None
    if path.startswith("/openapi/v3"):
        return describe_paths(known)
    verbs = ["create", "delete", "get", "list", "patch", "watch"]
    resources = [
        {"name": plural, "singularName": kind.lower(), "namespaced": is_namespaced, "kind": kind, "verbs": verbs}
        for _, plural, kind, is_namespaced in known
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


def describe_paths(rows: list[Resource]) -> Object:
    paths = {}
    for version, plural, kind, _ in rows:
        if kind == "SelfSubjectAccessReview":  # nothing to patch: its fields nobody checks
            continue
        group, _, number = version.rpartition("/")
        parameters = [{"name": name, "in": "query"} for name in ("dryRun", "fieldValidation")]
        gvk = {"group": group, "version": number, "kind": kind}
        root = f"/apis/{version}" if group else "/api/v1"
        paths[f"{root}/namespaces/{{namespace}}/{plural}/{{name}}"] = {
            "patch": {"parameters": parameters, "responses": {}, "x-kubernetes-group-version-kind": gvk}
        }
    return {"openapi": "3.0.0", "info": {"title": "test", "version": "1"}, "paths": paths}


def find_field(item: Object, path: str) -> Any:
    value: Any = item
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
