"""The only place that knows a file name inside a run directory or a bundle (layout: docs/results-directory.md)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

RUNS_VARIABLE: Final = "RLK_REPRO_RUNS"
TRIALS: Final = "trials"
NODES: Final = "nodes"
OPS_SUFFIX: Final = ".jsonl"
LIBRARIES_SUFFIX: Final = ".json"
STDOUT: Final = "stdout.log"
_RANK: Final = re.compile("0|[1-9][0-9]{0,6}")
_POD_JOIN: Final = ".pod-join-"


@dataclass(frozen=True)
class TrialDir:
    """One trial's folder, ``trials/<nn>-<pair>-<variant>``."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def command(self) -> Path:
        return self.path / "command.json"

    @property
    def env(self) -> Path:
        return self.path / "env.json"

    @property
    def stdout(self) -> Path:
        return self.path / STDOUT

    @property
    def exit(self) -> Path:
        return self.path / "exit.json"

    @property
    def ops(self) -> Path:
        return self.path / "ops"

    def ops_file(self, rank: int) -> Path:
        return ops_file(self.ops, rank)

    def ops_files(self) -> dict[int, Path]:
        """The ops files that are there, by rank."""
        return _by_rank(self.ops, OPS_SUFFIX)

    @property
    def libraries(self) -> Path:
        return self.path / "libraries"

    def libraries_file(self, rank: int) -> Path:
        return libraries_file(self.libraries, rank)

    def libraries_files(self) -> dict[int, Path]:
        """The records of loaded libraries that are there, by rank."""
        return _by_rank(self.libraries, LIBRARIES_SUFFIX)

    @property
    def traces(self) -> Path:
        """What a profiler wrote, in runs that have one."""
        return self.path / "traces"


@dataclass(frozen=True)
class NodeDir:
    """What one node's agent wrote."""

    path: Path

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def preflight(self) -> Path:
        return self.path / "preflight.json"

    @property
    def telemetry(self) -> Path:
        return self.path / "telemetry.jsonl"

    @property
    def ray(self) -> Path:
        return self.path / "ray"

    def ray_logs(self, use: str) -> Path:
        """What Ray wrote on this node for one trial, by its name, or for stored rollouts (``rollouts-<seed>``)."""
        return self.ray / use

    @property
    def earlier(self) -> Path:
        """What this node's agents of earlier allocations wrote, in folders ``1``, ``2``, …."""
        return self.path / "earlier"

    def earlier_dirs(self) -> list[NodeDir]:
        return [NodeDir(path) for path in _folders(self.earlier)]


@dataclass(frozen=True)
class RolloutDir:
    """The stored rollouts of one seed, and the log of the command that made them."""

    path: Path

    @property
    def template(self) -> str:
        """How trainers are told the files; ``{rollout_id}`` is theirs to fill in."""
        return str(self.path.absolute() / "{rollout_id}.pt")

    def file(self, rollout_id: int) -> Path:
        return self.path / f"{rollout_id}.pt"

    @property
    def stdout(self) -> Path:
        return self.path / STDOUT


@dataclass(frozen=True)
class RunDir:
    """Every path of one submission, from its root."""

    root: Path

    @property
    def run_id(self) -> str:
        """The name by which commands find it; a folder that was moved keeps the recorded one inside (plan.py)."""
        return self.root.absolute().name

    # the author's bytes
    @property
    def run_yaml(self) -> Path:
        return self.root / "run.yaml"

    @property
    def stack_yaml(self) -> Path:
        return self.root / "stack.yaml"

    @property
    def hardware_yaml(self) -> Path:
        return self.root / "hardware.yaml"

    @property
    def profile_yaml(self) -> Path:
        return self.root / "profile.yaml"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def job(self) -> Path:
        return self.root / "job"

    @property
    def submission(self) -> Path:
        return self.root / "submission.json"

    @property
    def scheduler(self) -> Path:
        return self.root / "scheduler"

    def scheduler_file(self, topic: str) -> Path:
        """The scheduler's own words on one topic, such as ``config``."""
        return self.scheduler / f"{topic}.txt"

    @property
    def accounting_fields(self) -> Path:
        """What sacct is to be asked for inside the job: names with commas between, nothing without accounting."""
        return self.scheduler_file("accounting-fields")

    @property
    def prepared(self) -> Path:
        return self.root / "prepared.json"

    @property
    def image(self) -> Path:
        return self.root / "image.json"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    def rollouts_of(self, seed: int) -> RolloutDir:
        return RolloutDir(self.rollouts / str(seed))

    def session_rollouts(self, trial: str) -> RolloutDir:
        """The stored rollouts again, by number of a session's rollout; never packed, as it follows from the plan."""
        return RolloutDir(self.root / f".rollouts-{trial}")

    @property
    def nodes(self) -> Path:
        return self.root / NODES

    def node(self, name: str) -> NodeDir:
        return NodeDir(self.nodes / name)

    def node_dirs(self) -> list[NodeDir]:
        return [NodeDir(path) for path in _folders(self.nodes)]

    @property
    def trials(self) -> Path:
        return self.root / TRIALS

    def trial(self, name: str) -> TrialDir:
        return TrialDir(self.trials / name)

    def trial_dirs(self) -> list[TrialDir]:
        """Those that are there, in plan order."""
        found = [path for path in _folders(self.trials) if path.name.partition("-")[0].isdecimal()]
        return [TrialDir(path) for path in sorted(found, key=lambda path: int(path.name.partition("-")[0]))]

    @property
    def interrupted(self) -> Path:
        """Trials set aside by ``--resume``, in folders ``1``, ``2``, …; kept as evidence, never counted."""
        return self.root / "interrupted"

    def interrupted_trial(self, attempt: int, name: str) -> TrialDir:
        return TrialDir(self.interrupted / str(attempt) / name)

    @property
    def agent_log(self) -> Path:
        return self.root / "agent.jsonl"

    @property
    def analysis_dir(self) -> Path:
        return self.root / "analysis"

    @property
    def analysis(self) -> Path:
        return self.analysis_dir / "analysis.json"

    @property
    def checksums(self) -> Path:
        return self.root / "SHA256SUMS"

    # beside the sealed tree: never packed
    @property
    def bundle(self) -> Path:
        return self.root / "bundle.tgz"

    @property
    def report(self) -> Path:
        return self.root / "report"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    @property
    def reserve(self) -> Path:
        """Room that the leading agent gives up when the disk is full, so that its last words fit."""
        return self.root / ".reserve"

    @property
    def state(self) -> Path:
        """Live progress for ``status``; not part of the evidence."""
        return self.root / ".state.json"

    @property
    def agent_output(self) -> Path:
        """What a local agent itself prints: nothing, unless it breaks."""
        return self.root / ".agent.log"

    @property
    def cancelled(self) -> Path:
        """Holds the time at which somebody asked a scheduler to end the job."""
        return self.root / ".cancelled"

    def job_output(self, job_id: str) -> Path:
        """What a batch script and Slurm's own tools print; named by sbatch, so ``%j`` stands for an unknown id."""
        return self.root / f".slurm-{job_id}.log"

    @property
    def roster(self) -> Path:
        """Which pods take part in a job on Kubernetes."""
        return self.root / ".roster.json"

    def pod_join(self, pod: str) -> Path:
        """Changes as long as this pod asks to take part."""
        return self.root / f"{_POD_JOIN}{pod}"

    def pod_joins(self) -> list[Path]:
        return sorted(self.root.glob(f"{_POD_JOIN}*"))

    @property
    def pod_end(self) -> Path:
        """Holds the exit code with which the leading pod's work ended."""
        return self.root / ".pod-end.json"

    @property
    def pod_note(self) -> Path:
        """What the first process of the pod that leads, or that serves a run afterwards, says of itself."""
        return self.root / ".pod.json"

    @property
    def pod_read(self) -> Path:
        """How much of the trials' logs was read from outside the cluster, and when."""
        return self.root / ".pod-read.json"

    @property
    def kubernetes_record(self) -> Path:
        """What the cluster said of job and pods when the run was collected: known after sealing, so never packed."""
        return self.root / ".kubernetes.json"

    @property
    def live(self) -> RunDir:
        """What this machine has seen of a run whose directory lies elsewhere, until it is collected."""
        return RunDir(self.root / ".live")

    def partial_bundle(self, digest: str) -> Path:
        """The part of a bundle that has arrived, by the checksum of the whole: parts of two never mix."""
        return self.root / f".bundle-{digest}.part"

    @property
    def canary(self) -> Path:
        """Holds the allocation whose leader wrote it; a node that sees it shares the leader's file system."""
        return self.root / ".canary"

    def pulse(self, node: str) -> Path:
        """Changes as long as this node's agent lives."""
        return self.root / f".pulse-{node}"

    @property
    def ray_order(self) -> Path:
        """What the leading agent wants of Ray on all nodes."""
        return self.root / ".ray.json"

    def ray_report(self, node: str) -> Path:
        """What has become of Ray on this node."""
        return self.root / f".ray-{node}.json"

    @property
    def ray_token(self) -> Path:
        """By which the processes of one Ray cluster know each other; a secret of this allocation."""
        return self.root / ".ray-token"

    @property
    def again(self) -> Path:
        """Holds the allocation whose time was over after whole pairs had come in: another one goes on."""
        return self.root / ".again"

    def end_marker(self, node: str) -> Path:
        """Holds the allocation that this node's agent has finished."""
        return self.root / f".ended-{node}"

    @property
    def is_sealed(self) -> bool:
        return self.checksums.is_file()

    def is_packed(self, relative: str) -> bool:
        """Whether a file, by its path relative to the root, belongs into the bundle."""
        first = relative.split("/", 1)[0]
        return not (first.startswith(".") or first in {"bundle.tgz", "report"} or "/.partial-" in f"/{relative}")


# a trainer knows the two folders from its environment, not the trial's
def ops_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}{OPS_SUFFIX}"


def libraries_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}{LIBRARIES_SUFFIX}"


def libraries_beside(ops_folder: Path) -> Path:
    return TrialDir(ops_folder.parent).libraries


def runs_root() -> Path:
    """Where run directories go: ``$RLK_REPRO_RUNS``, else ``./runs``."""
    return Path(os.environ.get(RUNS_VARIABLE) or "runs")


def next_number(parent: Path) -> int:
    """The number of the next folder in ``earlier`` or ``interrupted``."""
    return max((int(path.name) for path in _folders(parent) if path.name.isdecimal()), default=0) + 1


def _folders(parent: Path) -> list[Path]:
    if not parent.is_dir():
        return []
    return sorted(path for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))


def _by_rank(folder: Path, suffix: str) -> dict[int, Path]:
    files = folder.glob(f"*{suffix}") if folder.is_dir() else ()
    found = {int(path.stem): path for path in files if _RANK.fullmatch(path.stem) and path.is_file()}
    return dict(sorted(found.items()))
