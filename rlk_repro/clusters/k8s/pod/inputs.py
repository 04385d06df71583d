"""Copy the staged files into the run directory."""

from __future__ import annotations

from pathlib import Path

from rlk_repro.base.disk import writing
from rlk_repro.base.errors import EnvironmentMissing, Problem
from rlk_repro.base.files import write_bytes
from rlk_repro.rundir.paths import RunDir


def bring_in(run_dir: RunDir, inputs: Path) -> None:
    """Copy the staged files, and remove the bundle, the state and the notes of an earlier submission."""
    with writing(run_dir.root, hint="can the pod's user write to the volume claim?"):
        run_dir.root.mkdir(parents=True, exist_ok=True)
        for source in sorted(inputs.rglob("*")):
            name = source.relative_to(inputs)
            # names of the kubelet's own folders in a ConfigMap's mount begin with two dots
            if source.is_file() and not any(part.startswith("..") for part in name.parts):
                write_bytes(run_dir.root / name, source.read_bytes())
        for earlier in (run_dir.state, run_dir.bundle, run_dir.pod_end, run_dir.pod_note, run_dir.pod_read):
            earlier.unlink(missing_ok=True)
    if not run_dir.plan.is_file():
        raise EnvironmentMissing(Problem(str(inputs), "holds no plan", expected="the ConfigMap of this run"))
