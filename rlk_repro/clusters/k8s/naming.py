"""Name and label the objects of a run; by the labels, rlk-repro finds and removes these objects."""

from __future__ import annotations

import hashlib
import re
from typing import Final

from rlk_repro.base.escapes import printable
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir

IN_AGENT: Final = "--container=agent"
OBJECTS: Final = "objects.yaml"

ID: Final = "rlk-repro/id"
ROLE: Final = "app.kubernetes.io/component"
AGENT: Final = "agent"
COLLECTOR: Final = "collector"
QUEUE: Final = "kueue.x-k8s.io/queue-name"
RUN_ID: Final = "rlk-repro/run-id"
PLAN_HASH: Final = "rlk-repro/plan-hash"
NETWORKS: Final = "k8s.v1.cni.cncf.io/networks"

# a pod's name is longer than its job's by an index and a suffix, and has at most 63 characters
MAX_NAME: Final = 40
_PREFIX: Final = "rlk-"
_RUN_ID: Final = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{8}-[0-9a-f]{4}")
_NOT_PLAIN: Final = re.compile(r"[^a-z0-9]+")
_HASH_LENGTH: Final = 8


def make_name(run_dir: RunDir) -> str:
    """Make the DNS-1035 name of a run's objects; an id of unusual form is shortened, and the id's hash is appended."""
    run_id = run_dir.run_id
    plain = _NOT_PLAIN.sub("-", run_id.lower()).strip("-")
    if _RUN_ID.fullmatch(run_id):
        return _PREFIX + plain
    digest = hashlib.sha256(run_id.encode(errors="surrogateescape")).hexdigest()[:_HASH_LENGTH]
    room = MAX_NAME - len(_PREFIX) - _HASH_LENGTH - 1
    return _PREFIX + "-".join(part for part in (plain[:room].strip("-"), digest) if part)


def make_labels(plan: Plan, name: str, role: str | None = None) -> dict[str, str]:
    labels = {
        "app.kubernetes.io/name": "rlk-repro",
        "app.kubernetes.io/managed-by": "rlk-repro",
        ID: name,
        "rlk-repro/run": plan.run.run,
    }
    return labels if role is None else {**labels, ROLE: role}


def make_annotations(plan: Plan, run_dir: RunDir) -> dict[str, str]:
    return {RUN_ID: printable(run_dir.run_id), PLAN_HASH: plan.plan_hash}
