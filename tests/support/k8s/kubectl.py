"""A small ``kubectl``: objects lie in one file, and a pod's container is a process of this machine.

It proves nothing about Kubernetes.  It shows what the product sends, and lets the real agents work on a claim that is a
folder.  Every refusal, word and state of a real cluster stands in recorded answers (tests/assets/k8s).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

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


def start(pod: Object) -> None:
    """Run the pod's init container to its end, as a kubelet does before the pod is running."""
    answer = FOLDER / "termination-log"
    words = [
        str(answer) if word == "/dev/termination-log" else word for word in pod["spec"]["initContainers"][0]["command"]
    ]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    ended = {"exitCode": done.returncode, "message": answer.read_text() if answer.is_file() else done.stderr}
    phase = "Failed" if done.returncode else "Running"
    pod["status"] = {"phase": phase, "initContainerStatuses": [{"state": {"terminated": ended}}]}


def send(items: list[Object], rest: list[str]) -> None:
    sent = list(yaml.safe_load_all(sys.stdin.read()))
    for item in sent:
        item["metadata"]["uid"] = f"uid-of-{item['metadata']['name']}"
        if item["kind"] == "Pod":
            start(item)
    if "--dry-run=server" not in rest:
        STORE.write_text(json.dumps(items + sent))
    print(json.dumps({"kind": "List", "items": sent} if len(sent) > 1 else sent[0]))


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
        case "patch":
            item = next(item for item in items if matches(item, kinds, rest[1:2]))
            item["metadata"] |= json.loads(rest[-1].partition("=")[2])["metadata"]
            STORE.write_text(json.dumps(items))
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
