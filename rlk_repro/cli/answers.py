"""Define answers that commands print with ``--json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlk_repro.base.answer import Answer
from rlk_repro.base.findings import Finding
from rlk_repro.rundir.agreement import AgreementCheck
from rlk_repro.rundir.state import Progress


@dataclass(frozen=True, kw_only=True)
class Cancelled(Answer):
    id: str
    is_submitted: bool
    is_stopping: bool


@dataclass(frozen=True, kw_only=True)
class Collected(Answer):
    id: str
    bundle: str
    is_sealed: bool


@dataclass(frozen=True, kw_only=True)
class Status(Answer):
    id: str
    state: str | None
    reason: str
    is_sealed: bool
    progress: Progress | None


@dataclass(frozen=True, kw_only=True)
class LogAnswer(Answer):
    trial: str
    line: str


@dataclass(frozen=True, kw_only=True)
class Built(Answer):
    argv: tuple[str, ...]
    tag: str
    is_built: bool


@dataclass(frozen=True, kw_only=True)
class Environment(Answer):
    folder: str
    is_ok: bool


@dataclass(frozen=True, kw_only=True)
class Pinned(Answer):
    stack: str
    is_changed: bool
    diff: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ImageInRuntime(Answer):
    image: str
    runtime: str
    is_ok: bool
    findings: tuple[Finding, ...]


@dataclass(frozen=True, kw_only=True)
class Index(Answer):
    page: str
    bundles: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PartMissing(Answer):
    """The state of a model, data set or set of rollouts that a run needs, as ``prepare --dry-run`` reports it."""

    kind: str
    folder: str
    is_there: bool


@dataclass(frozen=True, kw_only=True)
class PrepareAnswer(Answer):
    run: str
    prepared_dir: str
    parts: tuple[dict[str, Any], ...]
    unpinned: tuple[dict[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class NewProfile(Answer):
    file: str
    profile: dict[str, Any]
    remarks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ProfileChecked(Answer):
    profile: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, kw_only=True)
class Submitted(Answer):
    id: str
    run_dir: str
    submission: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunRow(Answer):
    run: str
    lane: str
    workload: str
    purpose: str
    hardware: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SubmittedRow(Answer):
    """One row of ``runs list --submitted``."""

    id: str
    cluster: str
    job_id: str
    state: str
    reason: str
    nodes: str
    is_sealed: bool


@dataclass(frozen=True, kw_only=True)
class EnginesCompared(Answer):
    """The answer of ``agreement``; ``is_other_contract``: whether its contract differs from that of this version."""

    summary: str
    checks: tuple[AgreementCheck, ...]
    is_other_contract: bool
