"""Define every file name inside a run directory or a bundle; no other module does (docs/results-directory.md)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

RUNS_VARIABLE: Final = "RLK_REPRO_RUNS"
FIND_BUNDLE: Final = "rlk-repro runs list --submitted shows your runs; rlk-repro collect ID brings the bundle of one"
TRIALS: Final = "trials"
NODES: Final = "nodes"
OPS_SUFFIX: Final = ".jsonl"
LIBRARIES_SUFFIX: Final = ".json"
STDOUT: Final = "stdout.log"
_RANK: Final = re.compile("0|[1-9][0-9]{0,6}")
_POD_JOIN: Final = ".pod-join-"


class Within:
    """A path with a fixed name inside the folder that a class stands for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: TrialDir | NodeDir | RolloutDir | RunDir, _: type) -> Path:
        return (owner.root if isinstance(owner, RunDir) else owner.path) / self._name


@dataclass(frozen=True)
class TrialDir:
    """One trial's folder, ``trials/<nn>-<pair>-<variant>``."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    command = Within("command.json")
    env = Within("env.json")
    stdout = Within(STDOUT)
    exit = Within("exit.json")
    ops = Within("ops")

    def ops_file(self, rank: int) -> Path:
        return ops_file(self.ops, rank)

    def ops_files(self) -> dict[int, Path]:
        """The existing ops files, by rank."""
        return _by_rank(self.ops, OPS_SUFFIX)

    engines = Within("engines")
    """What each engine computed of the same tokens, in runs that ask whether engines agree."""

    def engines_files(self) -> dict[int, Path]:
        """The existing records of engines, by rank."""
        return _by_rank(self.engines, OPS_SUFFIX)

    libraries = Within("libraries")

    def libraries_file(self, rank: int) -> Path:
        return libraries_file(self.libraries, rank)

    def libraries_files(self) -> dict[int, Path]:
        """The existing records of loaded libraries, by rank."""
        return _by_rank(self.libraries, LIBRARIES_SUFFIX)

    traces = Within("traces")
    """A profiler's traces, in runs that use a profiler."""


@dataclass(frozen=True)
class NodeDir:
    """The files that one node's agent wrote."""

    path: Path

    manifest = Within("manifest.json")
    preflight = Within("preflight.json")
    telemetry = Within("telemetry.jsonl")
    all_reduce_log = Within("all-reduce.log")
    ray = Within("ray")

    def ray_logs(self, use: str) -> Path:
        """Return the folder of this node's Ray logs for one trial, or for stored rollouts (``rollouts-<seed>``)."""
        return self.ray / use

    earlier = Within("earlier")
    """The files of this node's agents from earlier allocations, in folders ``1``, ``2``, …."""

    def earlier_dirs(self) -> list[NodeDir]:
        return [NodeDir(path) for path in _folders(self.earlier)]


@dataclass(frozen=True)
class RolloutDir:
    """The stored rollouts of one seed, and the log of the command that made them."""

    path: Path

    stdout = Within(STDOUT)

    @property
    def template(self) -> str:
        """The files' path as trainers get it; the trainer fills in ``{rollout_id}``."""
        return str(self.path.absolute() / "{rollout_id}.pt")

    def file(self, rollout_id: int) -> Path:
        return self.path / f"{rollout_id}.pt"


@dataclass(frozen=True)
class RunDir:
    """Every path of one submission, from its root."""

    root: Path

    @property
    def run_id(self) -> str:
        """The name by which commands find the run; the plan file keeps it when the folder is moved (plan.py)."""
        return self.root.absolute().name

    # The author's bytes.
    run_yaml = Within("run.yaml")
    stack_yaml = Within("stack.yaml")
    hardware_yaml = Within("hardware.yaml")
    profile_yaml = Within("profile.yaml")
    plan = Within("plan.json")
    job = Within("job")
    submission = Within("submission.json")
    scheduler = Within("scheduler")

    def scheduler_file(self, topic: str) -> Path:
        """The scheduler's own words on one topic, such as ``config``."""
        return self.scheduler / f"{topic}.txt"

    accounting_fields = Within("scheduler/accounting-fields.txt")
    """Names of sacct's fields to query inside the job, separated by commas; empty without accounting."""
    own_patch = Within("rlk-repro.patch")
    """The changes of rlk-repro's checkout, where it was not its commit."""
    prepared = Within("prepared.json")
    image = Within("image.json")
    rollouts = Within("rollouts")

    def rollouts_of(self, seed: int) -> RolloutDir:
        return RolloutDir(self.rollouts / str(seed))

    def session_rollouts(self, trial: str) -> RolloutDir:
        """The stored rollouts by number of a session's rollout; never packed, because they follow from the plan."""
        return RolloutDir(self.root / f".rollouts-{trial}")

    nodes = Within(NODES)

    def node(self, name: str) -> NodeDir:
        return NodeDir(self.nodes / name)

    def node_dirs(self) -> list[NodeDir]:
        return [NodeDir(path) for path in _folders(self.nodes)]

    trials = Within(TRIALS)

    def trial(self, name: str) -> TrialDir:
        return TrialDir(self.trials / name)

    def trial_dirs(self) -> list[TrialDir]:
        """The existing trial folders, in plan order."""
        found = [path for path in _folders(self.trials) if path.name.partition("-")[0].isdecimal()]
        return [TrialDir(path) for path in sorted(found, key=lambda path: int(path.name.partition("-")[0]))]

    interrupted = Within("interrupted")
    """Trials that ``--resume`` set aside, in folders ``1``, ``2``, …; kept as evidence, never counted."""

    def interrupted_trial(self, attempt: int, name: str) -> TrialDir:
        return TrialDir(self.interrupted / str(attempt) / name)

    agent_log = Within("agent.jsonl")
    analysis = Within("analysis/analysis.json")
    checksums = Within("SHA256SUMS")

    # These files lie beside the sealed tree and are never packed.
    bundle = Within("bundle.tgz")
    report = Within("report")
    lock = Within(".lock")
    reserve = Within(".reserve")
    """A file that reserves disk space; on a full disk the leading agent removes it to write its last message."""
    state = Within(".state.json")
    """Live progress for ``status``; not part of the evidence."""
    agent_output = Within(".agent.log")
    """The output of a local agent itself; it is empty unless the agent crashes."""
    cancelled = Within(".cancelled")
    """The time at which a user asked the scheduler to end the job."""

    def job_output(self, job_id: str) -> Path:
        """Output of the batch script and Slurm's own tools; sbatch names it, so ``%j`` stands for an unknown id."""
        return self.root / f".slurm-{job_id}.log"

    roster = Within(".roster.json")
    """The pods that take part in a job on Kubernetes."""

    def pod_join(self, pod: str) -> Path:
        """Return a file that changes as long as this pod asks to take part."""
        return self.root / f"{_POD_JOIN}{pod}"

    def pod_joins(self) -> list[Path]:
        return sorted(self.root.glob(f"{_POD_JOIN}*"))

    pod_end = Within(".pod-end.json")
    """The exit code of the leading pod's work."""
    pod_note = Within(".pod.json")
    """Messages of the first process of the leading pod, or of the pod that serves a run afterwards."""
    pod_read = Within(".pod-read.json")
    """The amount of the trials' logs that was read from outside the cluster, with the time."""
    kubernetes_record = Within(".kubernetes.json")
    """The cluster's facts about job and pods when the run was collected; they are known after sealing, so never packed.
    """

    @property
    def live(self) -> RunDir:
        """Return this machine's facts about a run whose directory is on another machine, until it is collected."""
        return RunDir(self.root / ".live")

    def partial_bundle(self, digest: str) -> Path:
        """The received part of a bundle, named by the bundle's checksum, so that parts of two bundles never mix."""
        return self.root / f".bundle-{digest}.part"

    canary = Within(".canary")
    """The allocation whose leader wrote this file; a node that sees it shares the leader's file system."""

    def pulse(self, node: str) -> Path:
        """Return a file that changes as long as this node's agent lives."""
        return self.root / f".pulse-{node}"

    all_reduce_order = Within(".all-reduce.json")
    """The leading agent's order to begin the all-reduce before the trials."""
    all_reduce_result = Within(".all-reduce-result.json")
    """The result of the all-reduce, before it is in the manifests."""
    ray_order = Within(".ray.json")
    """The leading agent's order to Ray on all nodes."""

    def ray_report(self, node: str) -> Path:
        """Return the file with the state of Ray on this node."""
        return self.root / f".ray-{node}.json"

    ray_token = Within(".ray-token")
    """The token by which processes of one Ray cluster authenticate; a secret of this allocation."""

    again = Within(".again")
    """The name of an allocation that ended after complete pairs; another allocation continues the run."""
    lost = Within(".lost")
    """The name of an allocation that ended because it lost nodes; an allocation with other nodes may continue."""

    def end_marker(self, node: str) -> Path:
        """Return the file that names the allocation which this node's agent has finished."""
        return self.root / f".ended-{node}"

    @property
    def is_sealed(self) -> bool:
        return self.checksums.is_file()

    def is_packed(self, relative: str) -> bool:
        """Tell whether a file, named by its path relative to the root, goes into the bundle."""
        first = relative.split("/", 1)[0]
        return not (first.startswith(".") or first in {"bundle.tgz", "report"} or "/.partial-" in f"/{relative}")


# A trainer knows these two folders from its environment, but not the trial's folder.
def ops_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}{OPS_SUFFIX}"


def libraries_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}{LIBRARIES_SUFFIX}"


def libraries_beside(ops_folder: Path) -> Path:
    return TrialDir(ops_folder.parent).libraries


def traces_beside(ops_folder: Path) -> Path:
    return TrialDir(ops_folder.parent).traces


def runs_root() -> Path:
    """The folder of run directories: ``$RLK_REPRO_RUNS``, else ``./runs``."""
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
