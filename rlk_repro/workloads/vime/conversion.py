"""Convert a model to Megatron's format with vime's own tool, at the stack's commits of vime and Megatron-LM.

The tool needs a GPU for each process.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem
from rlk_repro.base.guarded import Guarded
from rlk_repro.base.places import hide_places
from rlk_repro.prepare.contents import load_contents, record_files
from rlk_repro.prepare.steps import Made, Tell, WorkDir
from rlk_repro.probes import code
from rlk_repro.probes.code import find_package
from rlk_repro.probes.gpu import find_on_bus
from rlk_repro.rundir.manifest import Unknown
from rlk_repro.sources import MEGATRON, VIME, CodeSource
from rlk_repro.spec import Hardware, Layout, Stack, VimeModel
from rlk_repro.workloads.arguments import spell_flags

TOOL: Final = Path("tools") / "convert_hf_to_torch_dist.py"
TRACKER: Final = "latest_checkpointed_iteration.txt"
RELEASE: Final = "release"
TIME_LIMIT_S: Final = 4 * 3600.0
# Weights up to this size fit on one GPU of any supported hardware, with everything else that the conversion needs.
ONE_PROCESS_BYTES: Final = 30 << 30
AGAIN: Final = "the log names the cause; the same command begins the conversion again and keeps finished folders"
ELSEWHERE: Final = "this machine has no GPU: run the same command on a GPU node, in the stack's image"
_LOG: Final = "convert.log"
# The tool does not train.  Without this flag Megatron-LM needs an extension of apex to build the model.
_WORDS: Final = ("--no-gradient-accumulation-fusion",)
# vime's own scripts for AMD GPUs have this flag.
_ROCM_WORDS: Final = ("--attention-backend", "flash")


@dataclass(frozen=True, kw_only=True)
class Conversion:
    model: VimeModel
    folder: Path
    stack: Stack
    hardware: Hardware
    layout: Layout

    @property
    def source(self) -> dict[str, Any]:
        """The values that determine the checkpoint."""
        contents = load_contents(self.folder)
        return {
            "model": None if contents is None else contents.digest,
            "arguments": list(self.words),
            "commits": {name: pin.commit for name, pin in self.stack.pins.items() if name in {"vime", "megatron_lm"}},
        }

    @property
    def words(self) -> list[str]:
        words = [*spell_flags(self.model.arguments), *_WORDS]
        if self.hardware.platform == "rocm":
            words += _ROCM_WORDS
        return words

    def command(self, tool: Path, save: Path, num_bytes: int) -> list[str]:
        launcher = [sys.executable]
        num_processes = self.num_processes(num_bytes)
        if num_processes > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
        return [*launcher, str(tool), *self.words, "--hf-checkpoint", str(self.folder), "--save", str(save)]

    def num_processes(self, num_bytes: int) -> int:
        """Return 1 for a small model, otherwise one process per GPU of a node, but at most one per layer."""
        if num_bytes <= ONE_PROCESS_BYTES:
            return 1
        return max(1, min(self.layout.gpus_per_node, self.model.size("num-layers", 1)))

    def run(self, work: WorkDir, tell: Tell) -> Made:
        """Convert the model.

        Raises:
            EnvironmentMissing: vime or Megatron-LM was not found at the pinned commit.
            CheckFailed: vime's conversion tool failed.
        """
        vime, megatron = (_find_root(source) for source in (VIME, MEGATRON))
        commits = _require_pinned(self.stack)
        contents = load_contents(self.folder)
        num_bytes = 0 if contents is None else contents.size_bytes
        shutil.rmtree(work.files, ignore_errors=True)
        work.files.mkdir(parents=True)
        argv = self.command(vime / TOOL, work.files, num_bytes)
        tell(f"{self.folder.name}: converting with {self.num_processes(num_bytes)} process(es)")
        started_s = time.monotonic()
        _run_tool(argv, _make_env(vime, megatron), work.path / _LOG)
        _require_whole(work)
        own, prepared = str(work.path), str(self.folder.parent.parent)
        shown = [word.replace(own, "{work}").replace(prepared, "{prepared}") for word in argv]
        made = {
            "command": [hide_places(word) for word in shown],
            "commits": commits,
            "duration_s": time.monotonic() - started_s,
        }
        tell(f"{self.folder.name}: hashing the converted checkpoint")
        return Made(source=self.source, files=record_files(work.files), made=made)


def _find_root(source: CodeSource) -> Path:
    package = find_package(source, os.environ)
    root = None if isinstance(package, Unknown) else package.parent
    if root is None or (source is VIME and not (root / TOOL).is_file()):
        raise EnvironmentMissing(
            Problem(f"{source.module}: {TOOL}" if source is VIME else source.module, "was not found",
                    expected=f"a checkout of {source.title}, as the stack's image has one",
                    hint="run the same command on a GPU node in the stack's image (finished folders are kept), or set "
                         f"{source.variable} to a checkout")
        )  # fmt: skip
    return root


def _require_pinned(stack: Stack) -> dict[str, str]:
    """A source folder with the pinned tree hash counts as the pinned commit, so an unpacked archive is enough."""
    facts = code.probe()
    commits, problems = {}, []
    for source in (VIME, MEGATRON):
        pin = stack.pins.get(source.pin)  # type: ignore[call-overload]
        found = facts[source.section]
        described = found if isinstance(found, Mapping) else {}
        commit = described.get("commit")
        if pin is not None and pin.holds_tree(described.get("tree")):
            commit = pin.commit
        commits[source.pin] = str(commit)
        if pin is not None and commit != pin.commit:
            problems.append(Problem(f"code.{source.section}.commit", "differs from the stack's commit", got=str(commit),
                                    expected=pin.commit))  # fmt: skip
    if problems:
        raise EnvironmentMissing(*problems)
    return commits


def _make_env(vime: Path, megatron: Path) -> dict[str, str]:
    path = [str(megatron), str(vime), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    # vime's tool takes these from Slurm's variables and a fixed port, where two conversions on a host collide.
    # torchrun replaces them; for one process, torch takes a free port where it is given port 0.
    own |= {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(path)}


def _run_tool(argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
    with log.open("wb") as stream:
        tool = Guarded(argv, env, stream.fileno())
        try:
            until = time.monotonic() + TIME_LIMIT_S
            while (status := tool.poll(1.0)) is None and time.monotonic() < until:
                pass
        finally:
            tool.release()
    if status is None or status != 0:
        number = 0 if status is None else os.waitstatus_to_exitcode(status)
        end = f"exit code {number}" if number > 0 else signal.Signals(-number).name if number else "time limit reached"
        lines = log.read_text(errors="replace").split("\n")
        tail = " | ".join(line.strip() for line in lines if line.strip())[-600:]
        raise CheckFailed(
            Problem(str(log), f"the conversion failed ({end}): {tail}", expected="exit code 0",
                    hint=AGAIN if find_on_bus() else ELSEWHERE)
        )  # fmt: skip


def _require_whole(work: WorkDir) -> None:
    """The conversion writes the tracker file last, so this file marks a complete checkpoint."""
    tracker = work.files / TRACKER
    found = tracker.read_text().strip() if tracker.is_file() else "no such file"
    if found != RELEASE or not (work.files / RELEASE).is_dir():
        raise CheckFailed(
            Problem(f"checkpoint: content of {TRACKER}", "the conversion tool wrote no complete release checkpoint",
                    got=found, expected=f"{RELEASE}, and a folder with this name next to this file")
        )  # fmt: skip
