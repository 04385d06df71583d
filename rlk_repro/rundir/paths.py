"""Define all file names inside a run directory or a bundle (docs/formats.md)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

RUNS_VARIABLE: Final = "RLK_REPRO_RUNS"
FIND_BUNDLE: Final = "rlk-repro runs list --submitted shows your runs; rlk-repro collect ID brings a run's bundle"
TRIALS: Final = "trials"
NODES: Final = "nodes"
OPS_SUFFIX: Final = ".jsonl"
LIBRARIES_SUFFIX: Final = ".json"
STDOUT: Final = "stdout.log"
_RANK: Final = re.compile("0|[1-9][0-9]{0,6}")


class Within:
    """The value of this descriptor is a path with a fixed name inside the object's own folder."""

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
        return _by_rank(self.ops, OPS_SUFFIX)

    engines = Within("engines")

    def engines_files(self) -> dict[int, Path]:
        return _by_rank(self.engines, OPS_SUFFIX)

    libraries = Within("libraries")

    def libraries_file(self, rank: int) -> Path:
        return libraries_file(self.libraries, rank)

    def libraries_files(self) -> dict[int, Path]:
        return _by_rank(self.libraries, LIBRARIES_SUFFIX)

    traces = Within("traces")


@dataclass(frozen=True)
class NodeDir:
    path: Path

    manifest = Within("manifest.json")
    preflight = Within("preflight.json")
    telemetry = Within("telemetry.jsonl")
    ray = Within("ray")

    def ray_logs(self, use: str) -> Path:
        """Return the folder of this node's Ray logs for a trial, or for stored rollouts (``rollouts-<seed>``)."""
        return self.ray / use

    earlier = Within("earlier")
    """The folder holds files of this node's agents from earlier allocations, in subfolders ``1``, ``2``, …."""

    def earlier_dirs(self) -> list[NodeDir]:
        return [NodeDir(path) for path in _folders(self.earlier)]


@dataclass(frozen=True)
class RolloutDir:
    path: Path

    stdout = Within(STDOUT)

    @property
    def template(self) -> str:
        """The path of a stored rollout; the trainer replaces ``{rollout_id}`` by a number."""
        return str(self.path.absolute() / "{rollout_id}.pt")

    def file(self, rollout_id: int) -> Path:
        return self.path / f"{rollout_id}.pt"


@dataclass(frozen=True)
class RunDir:
    root: Path

    @property
    def run_id(self) -> str:
        return self.root.absolute().name

    # The YAML files are byte-for-byte copies of the definitions that the plan was made from.
    run_yaml = Within("run.yaml")
    stack_yaml = Within("stack.yaml")
    hardware_yaml = Within("hardware.yaml")
    profile_yaml = Within("profile.yaml")
    plan = Within("plan.json")
    job = Within("job")
    submission = Within("submission.json")
    scheduler = Within("scheduler")

    def scheduler_file(self, topic: str) -> Path:
        return self.scheduler / f"{topic}.txt"

    """The file holds the names of sacct's fields that the job queries; empty without accounting."""
    own_patch = Within("rlk-repro.patch")
    prepared = Within("prepared.json")
    image = Within("image.json")
    rollouts = Within("rollouts")

    def rollouts_of(self, seed: int) -> RolloutDir:
        return RolloutDir(self.rollouts / str(seed))

    def session_rollouts(self, trial: str) -> RolloutDir:
        """Return a folder whose rollouts are never packed, because the plan determines them."""
        return RolloutDir(self.work / f"rollouts-{trial}")

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
    """The folder holds trials that ``--resume`` set aside, in subfolders ``1``, ``2``, …."""

    def interrupted_trial(self, attempt: int, name: str) -> TrialDir:
        return TrialDir(self.interrupted / str(attempt) / name)

    agent_log = Within("agent.jsonl")
    analysis = Within("analysis/analysis.json")
    checksums = Within("SHA256SUMS")

    # These files are neither sealed nor packed.
    bundle = Within("bundle.tgz")
    report = Within("report")
    lock = Within(".lock")
    work = Within(".work")
    """The folder holds what the agents of a running job share; nothing in it is needed once they have ended."""
    reserve = Within(".work/reserve")
    """The file reserves disk space: on a full disk the leading agent removes it to write its last message."""
    token = Within(".token")
    """The file holds random text by which its user recognises the run directory."""
    state = Within(".state.json")
    agent_output = Within(".agent.log")
    """The file holds the output of the agent on the cluster ``local``; empty unless the agent crashes."""
    cancelled = Within(".cancelled")
    """The file holds the time at which a user asked the scheduler to end the job."""

    def job_output(self, job_id: str) -> Path:
        """Return the path of the file with the output of the batch script and of Slurm's tools.

        Slurm replaces ``%j`` by the job's id, so ``%j`` stands for an id that is not known yet.
        """
        return self.root / f".slurm-{job_id}.log"

    roster = Within(".work/roster.json")
    """On Kubernetes, the leading pod calls in this file for an allocation, and then lists the nodes of all pods."""

    def pod_answer(self, index: int) -> Path:
        """Return the file in which the pod with this index of a Job answers the leading pod's call."""
        return self.work / f"pod-{index}.json"

    claim = Within(".work/claim")
    """The file names an agent that waits for the lock: one of a later allocation of the same job."""
    step = Within(".work/step.json")
    """With this file the leading agent tells the other nodes which command runs now."""

    def report_of(self, node: str) -> Path:
        """Return the file in which this node's agent tells the leading one how its step ended."""
        return self.work / f"node-{node}.json"

    ray_token = Within(".work/ray-token")
    """The file holds the secret token by which processes of one Ray cluster recognize each other."""

    again = Within(".again")
    """The file names an allocation whose time ran out after some pairs; the next one continues the run."""
    lost = Within(".work/lost")
    """The file names an allocation that ended because it lost nodes; another one may continue the run."""

    @property
    def is_sealed(self) -> bool:
        return self.checksums.is_file()

    def is_packed(self, relative: str) -> bool:
        """Tell whether a file goes into the bundle; ``relative`` is its path in the run directory."""
        first = relative.split("/", 1)[0]
        return not (first.startswith(".") or first in {"bundle.tgz", "report"} or "/.partial-" in f"/{relative}")


# A trainer knows the folders of ops files and of libraries from its environment, but not the trial's folder.
def ops_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}{OPS_SUFFIX}"


def libraries_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}{LIBRARIES_SUFFIX}"


def runs_root() -> Path:
    return Path(os.environ.get(RUNS_VARIABLE) or "runs")


def next_number(parent: Path) -> int:
    """Return the number that names the next folder in ``earlier`` or ``interrupted``."""
    return max((int(path.name) for path in _folders(parent) if path.name.isdecimal()), default=0) + 1


def _folders(parent: Path) -> list[Path]:
    if not parent.is_dir():
        return []
    return sorted(path for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))


def _by_rank(folder: Path, suffix: str) -> dict[int, Path]:
    files = folder.glob(f"*{suffix}") if folder.is_dir() else ()
    found = {int(path.stem): path for path in files if _RANK.fullmatch(path.stem) and path.is_file()}
    return dict(sorted(found.items()))
