"""A real API server as the store of stand-ins: plain requests, with an administrator's token."""

from __future__ import annotations

import http.client
import json
import queue
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from tests.support.kube.store import RESOURCES, Gone, Object, Resource

TIMEOUT_S: Final = 30.0
JSON: Final = "application/json"
MERGE: Final = "application/merge-patch+json"
# merges conditions by their type; servers do it for kinds of their own alone
STRATEGIC: Final = "application/strategic-merge-patch+json"
MORE: Final = (
    Resource("v1", "persistentvolumes", "PersistentVolume", is_namespaced=False),
    Resource("v1", "resourcequotas", "ResourceQuota"),
    Resource("v1", "serviceaccounts", "ServiceAccount"),
    Resource("rbac.authorization.k8s.io/v1", "roles", "Role"),
    Resource("rbac.authorization.k8s.io/v1", "rolebindings", "RoleBinding"),
    Resource("rbac.authorization.k8s.io/v1", "clusterroles", "ClusterRole", is_namespaced=False),
    Resource("rbac.authorization.k8s.io/v1", "clusterrolebindings", "ClusterRoleBinding", is_namespaced=False),
)
ROWS: Final = {row.plural: row for row in (*RESOURCES, *MORE)}
CUSTOM: Final = frozenset({"rayjobs", "computedomains"})


class Refused(Exception):
    """With the server's own words."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(f"{code}: {words}")
        self.code = code


class Client:
    """Connections are kept, as one costs more than what is asked over it."""

    def __init__(self, port: int, token: str, ca: Path) -> None:
        self._port = port
        self._headers = {"Authorization": f"Bearer {token}", "Accept": JSON}
        self._context = ssl.create_default_context(cafile=str(ca))
        self._idle: queue.SimpleQueue[http.client.HTTPSConnection] = queue.SimpleQueue()

    def ask(self, verb: str, path: str, body: Object | None = None, kind: str = JSON) -> Any:
        """Raises Refused; OSError or HTTPException where nobody answers, or not yet."""
        data = None if body is None else json.dumps(body)
        status, answer = self._send(verb, path, data, {**self._headers, "Content-Type": kind})
        value = json.loads(answer) if answer.startswith(b"{") else {"message": answer.decode()}
        if status >= 500 or status == 429:  # it restarts
            raise ConnectionError(f"{status}: {value.get('message')}")
        if status >= 400:
            raise Refused(status, str(value.get("message")))
        return value

    def close(self) -> None:
        while not self._idle.empty():
            self._idle.get().close()

    def _send(self, verb: str, path: str, data: str | None, headers: Mapping[str, str]) -> tuple[int, bytes]:
        while True:
            is_kept = not self._idle.empty()
            connection = self._take()
            try:
                connection.request(verb, path, body=data, headers=headers)
                response = connection.getresponse()
                answer = response.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                if is_kept:  # its server is not there any more; another one may be
                    continue
                raise
            self._idle.put(connection)
            return response.status, answer

    def _take(self) -> http.client.HTTPSConnection:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return http.client.HTTPSConnection("127.0.0.1", self._port, timeout=TIMEOUT_S, context=self._context)


class ApiStore:
    """tests/support/kube/store.py's ``Store`` over a client."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def list(self, plural: str) -> list[Object]:
        try:
            items: list[Object] = self.client.ask("GET", path_of(ROWS[plural]))["items"]
            return items
        except Refused as error:
            if error.code == 404:  # a custom resource that is not installed
                return []
            raise

    def find(self, plural: str, namespace: str, name: str) -> Object | None:
        try:
            found: Object = self.client.ask("GET", path_of(ROWS[plural], namespace, name))
        except Refused as error:
            if error.code == 404:
                return None
            raise
        return found

    def create(self, plural: str, item: Object) -> Object:
        row = ROWS[plural]
        path = path_of(row, item["metadata"].get("namespace", ""))
        made: Object = self._ask("POST", path, {"apiVersion": row.version, "kind": row.kind, **item})
        return made

    def patch_status(self, plural: str, item: Object, status: Object) -> None:
        known = (item.get("status") or {}).get("conditions") or ()
        if plural in CUSTOM and "conditions" in status:
            conditions = [*known, *status["conditions"]]
            status = {**status, "conditions": [*{each["type"]: each for each in conditions}.values()]}
        self.patch(plural, item, {"status": status}, "/status")

    def patch(self, plural: str, item: Object, change: Object, part: str = "") -> None:
        metadata = item["metadata"]
        path = path_of(ROWS[plural], metadata.get("namespace", ""), metadata["name"]) + part
        if "uid" in metadata:
            change = {**change, "metadata": {**change.get("metadata", {}), "uid": metadata["uid"]}}
        self._ask("PATCH", path, change, MERGE if plural in CUSTOM else STRATEGIC)

    def replace(self, plural: str, item: Object) -> None:
        """Of the version that was read."""
        row, metadata = ROWS[plural], item["metadata"]
        path = path_of(row, metadata.get("namespace", ""), metadata["name"])
        self._ask("PUT", path, {"apiVersion": row.version, "kind": row.kind, **item})

    def delete_all(self, plural: str, namespace: str, selector: str = "") -> None:
        options = {"gracePeriodSeconds": 0, "propagationPolicy": "Background"}
        self._ask("DELETE", f"{path_of(ROWS[plural], namespace)}?labelSelector={quote(selector)}", options)

    def bind(self, pod: Object, node: str) -> None:
        metadata = pod["metadata"]
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": metadata["name"]}, "target": target}
        self._ask("POST", path_of(ROWS["pods"], metadata["namespace"], metadata["name"]) + "/binding", body)
        pod["spec"]["nodeName"] = node

    def delete(self, plural: str, item: Object, grace_s: int | None = None) -> None:
        metadata = item["metadata"]
        options: Object = {"propagationPolicy": "Background"}
        if "uid" in metadata:
            options["preconditions"] = {"uid": metadata["uid"]}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        self._ask("DELETE", path_of(ROWS[plural], metadata.get("namespace", ""), metadata["name"]), options)

    def _ask(self, verb: str, path: str, body: Object, kind: str = JSON) -> Any:
        try:
            return self.client.ask(verb, path, body, kind)
        except Refused as error:
            if error.code in {404, 409}:
                raise Gone(str(error)) from None
            raise


def path_of(row: Resource, namespace: str = "", name: str = "") -> str:
    root = f"/api/{row.version}" if "/" not in row.version else f"/apis/{row.version}"
    space = f"/namespaces/{namespace}" if row.is_namespaced and namespace else ""
    return f"{root}{space}/{row.plural}" + (f"/{name}" if name else "")
