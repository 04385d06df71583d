"""What each command prints with ``--json``; ``manifests/schema/answers.schema.json`` has it by the command's words.

Nothing imports this to run: it is the contract that scripts read, and the tests hold every command to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from pydantic import ConfigDict

from rlk_repro.agent.preflight.doctor import Diagnosis
from rlk_repro.base.findings import Finding
from rlk_repro.claims.files import Claim
from rlk_repro.claims.results import ClaimsCheck
from rlk_repro.images.stacks import StackRow
from rlk_repro.plan import PlanRecord
from rlk_repro.replay.gate import DiffGate
from rlk_repro.report.record import ReportRecord
from rlk_repro.rundir.state import Progress
from rlk_repro.spec import Run
from rlk_repro.wording.lint import Offence


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A key that is not listed is an error."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


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
class SavedProgress(Progress):
    schema: int


@dataclass(frozen=True, kw_only=True)
class Status(Answer):
    id: str
    state: str | None
    reason: str
    is_sealed: bool
    progress: SavedProgress | None


@dataclass(frozen=True, kw_only=True)
class LogAnswer(Answer):
    trial: str
    line: str


@dataclass(frozen=True, kw_only=True)
class ComparisonAnswer(Answer):
    level: str
    is_ok: bool
    headline: str
    margin_pct: float
    recorded_verdict: str
    new_verdict: str
    obstacles: tuple[str, ...]
    details: tuple[str, ...]
    num_blocking_drift: int
    unidentified: tuple[str, ...]
    cautions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DiffAnswer(Answer):
    findings: tuple[Finding, ...]
    unsealed: tuple[str, ...]
    comparison: ComparisonAnswer | None


@dataclass(frozen=True, kw_only=True)
class GateAnswer(DiffGate, Answer):
    """The answer of ``diff --gate``."""


@dataclass(frozen=True, kw_only=True)
class Doctor(Answer):
    checks: tuple[Diagnosis, ...]
    manifest: dict[str, Any]


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
class Images(Answer):
    images: tuple[StackRow, ...]


@dataclass(frozen=True, kw_only=True)
class Pinned(Answer):
    stack: str
    is_changed: bool
    diff: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Archive(Answer):
    """The answer for an image that was exported, imported or checked as an archive; the check adds ``is_ok``."""

    digest: str
    platform: str
    size_bytes: int
    stack: str | None
    commits: dict[str, Any] | None
    findings: tuple[Finding, ...]
    is_ok: bool | None = None


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
class LintedSentence(Offence, Answer):
    file: str


@dataclass(frozen=True, kw_only=True)
class PartMissing(Answer):
    """A missing part, of ``prepare --dry-run``."""

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
class JobShown(Answer):
    files: dict[str, str]
    command: tuple[str, ...]
    env: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class DryRun(Answer):
    plan: PlanRecord
    summary: dict[str, Any]
    job: JobShown


@dataclass(frozen=True, kw_only=True)
class Submitted(Answer):
    id: str
    run_dir: str
    submission: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Finished(Answer):
    """The answer of ``submit --wait``."""

    verdict: str
    headline: str
    bundle: str
    bundle_id: str
    report: str
    is_ok: bool


@dataclass(frozen=True, kw_only=True)
class Reanalysis(Answer):
    level: str
    is_ok: bool
    is_reworded: bool
    bundle_id: str
    verdict: str
    headline: str


@dataclass(frozen=True, kw_only=True)
class Need(Answer):
    where: str
    problem: str
    next: str


@dataclass(frozen=True, kw_only=True)
class Rerun(Answer):
    is_done: bool
    needs: tuple[Need, ...]


@dataclass(frozen=True, kw_only=True)
class ReplayStopped(Answer):
    """The re-analysis holds, and something stands in the way of running the experiment again."""

    reanalysis: Reanalysis
    rerun: Rerun


@dataclass(frozen=True, kw_only=True)
class Replayed(ComparisonAnswer):
    reanalysis: Reanalysis
    rerun: Rerun


@dataclass(frozen=True, kw_only=True)
class ReplayDryRun(DryRun):
    drift: tuple[Finding, ...] | None
    parts: tuple[Finding, ...]
    missing: tuple[Finding, ...]
    what_runs: dict[str, str]
    replay_of: str
    reanalysis: Reanalysis
    rerun: Rerun


@dataclass(frozen=True, kw_only=True)
class RunRow(Answer):
    run: str
    lane: str
    workload: str
    purpose: str
    hardware: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SubmittedRow(Answer):
    """A row of ``runs list --submitted``."""

    id: str
    cluster: str
    job_id: str
    state: str
    reason: str
    nodes: str
    is_sealed: bool


@dataclass(frozen=True, kw_only=True)
class Verified(Answer):
    is_ok: bool
    bundle_id: str | None
    findings: tuple[Finding, ...]
    claimed_id: str | None = None


ANSWERS: Final[Mapping[str, Any]] = {
    "cancel": Cancelled,
    "claims check": ClaimsCheck,
    "claims lint": list[LintedSentence],
    "claims list": list[Claim],
    "collect": Collected,
    "diff": DiffAnswer | GateAnswer,
    "doctor": Doctor,
    "env check": Environment,
    "env create": Environment,
    "env export": Environment,
    "images build": Built,
    "images check": Archive | ImageInRuntime,
    "images export": Archive,
    "images import": Archive,
    "images list": Images,
    "images pin": Pinned,
    "images pull": ImageInRuntime,
    "index": Index,
    "inspect": dict[str, Any],
    "list": dict[str, dict[str, str]],
    "logs": LogAnswer,
    "prepare": PrepareAnswer | list[PartMissing],
    "profile check": ProfileChecked,
    "profile init": NewProfile,
    "profile show": dict[str, Any],
    "replay": Reanalysis | ReplayStopped | Replayed | ReplayDryRun,
    "report": list[ReportRecord],
    "runs list": list[RunRow] | list[SubmittedRow],
    "runs show": Run,
    "status": Status,
    "submit": Submitted | Finished | DryRun,
    "verify": Verified,
}
"""The answers by the words of the command; each line of ``logs`` is one answer."""
