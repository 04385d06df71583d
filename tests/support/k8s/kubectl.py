"""A small ``kubectl``: objects lie in one file, and a pod's container is a process of this machine.

It proves nothing about Kubernetes.  It shows what the product sends, and lets the real agents work on a claim that is a
folder.  Every refusal, word and state of a real cluster stands in recorded answers (tests/assets/k8s).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

Object = dict[str, Any]
FOLDER = Path(os.environ["RLK_TEST_KUBECTL"])
STORE = FOLDER / "objects.json"


def matches(item: Object, kinds: list[str], words: list[str]) -> bool:
    plural = {"networkpolicy": "networkpolicies"}.get(item["kind"].lower(), item["kind"].lower() + "s")
    if not {plural, item["kind"].lower()} & set(kinds):
        return False
    selectors = [word.partition("=")[2] for word in words if word.startswith("--selector=")]
    labels = [f"{key}={value}" for key, value in item["metadata"].get("labels", {}).items()]
    names = [word for word in words if not word.startswith("-")]
    return all(selector in labels for selector in selectors) and names in ([], [item["metadata"]["name"]])


def owner_of(item: Object) -> str:
    return str(item["metadata"].get("ownerReferences", [{}])[0].get("uid"))


def send(items: list[Object], rest: list[str]) -> None:
    if "--dry-run=server" in rest:
        print("{}")
        return
    item = json.load(sys.stdin)
    item["metadata"]["uid"] = f"uid-of-{item['metadata']['name']}"
    if item["kind"] == "Pod":
        item["status"] = {"phase": "Running"}
    STORE.write_text(json.dumps([*items, item]))
    print(json.dumps(item))


def delete(items: list[Object], kinds: list[str], rest: list[str]) -> None:
    gone = [item for item in items if matches(item, kinds, rest[1:])]
    uids = [item["metadata"].get("uid") for item in gone]
    gone += [item for item in items if owner_of(item) in uids and item not in gone]
    STORE.write_text(json.dumps([item for item in items if item not in gone]))
    for item in gone:
        if pid := item["metadata"].get("annotations", {}).get("pid"):
            os.kill(int(pid), signal.SIGTERM)


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith(("--context", "--namespace", "--request-timeout"))]
    items: list[Object] = json.loads(STORE.read_text()) if STORE.is_file() else []
    verb, rest = words[0], words[1:]
    kinds = [kind.partition(".")[0] for kind in rest[0].split(",")]
    match verb:
        case "get":
            found = [item for item in items if matches(item, kinds, rest[1:])]
            print(json.dumps({"kind": "List", "items": found}) if found else "")
        case "apply" | "create":
            send(items, rest)
        case "delete":
            delete(items, kinds, rest)
        case "exec":
            os.execvp(rest[rest.index("--") + 1], rest[rest.index("--") + 1 :])
        case "logs":
            sys.stdout.write((FOLDER / f"{rest[0]}.log").read_text())
        case _:
            sys.stdout.write((FOLDER / f"{verb}.answer").read_text())


if __name__ == "__main__":
    main()
