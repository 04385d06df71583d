"""Scripts of each kind; a few of them are in ``slurm/examples``.

The tests run one of them: ``smoke.cpu.podman.two-nodes``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rlk_repro.base.resources import data_dir, profile_folders
from rlk_repro.plan import Plan, make_plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import ContainerSettings, Profile, Run, SlurmSettings, Stack
from rlk_repro.spec.load import load_bytes, load_hardware, load_profile, load_run, load_stack, parse_overrides
from tests.support.images.container_image import REFERENCE, make_image

EXAMPLES = data_dir("slurm") / "examples"
HARDWARE = ("a100", "h200", "gb200", "mi300x")
RUNTIMES = ("pyxis", "apptainer", "podman", "docker")
RUN_ID = "20261120T120000Z-0123abcd-4567"
IMAGE_DIR = "/shared/rlk-repro/images"
TWO_NODES = "smoke.cpu.podman.two-nodes"
TWO_NODES_SETTINGS = (
    "layouts.cpu.num_nodes=2", "measure.pairs=2", "measure.warmup_steps=1", "measure.scored_steps=3",
    "workload.grpo.rollout_batch_size=2", "workload.model.hidden_size=32",
)  # fmt: skip
TWO_NODES_PROFILE = b"""\
schema: 1
profile: two-nodes
cluster: slurm
hardware: cpu
slurm: {gres: none}
container: {runtime: podman}
preflight: {min_free_disk_gib: 0.01, min_free_memory_gib: 0.01}
"""
TWO_NODES_STACK = f"""\
schema: 1
stack: two-nodes
purpose: The image of the tests.
images: {{cpu: {{reference: {REFERENCE}, digest: "{make_image().digest}"}}}}
""".encode()
HOSTILE = ("with space", "a'; touch pwned", 'double"quote', "$(touch pwned)", "`touch pwned`", "back\\slash \\", "a,b",
           "ünïcødé", "# no comment", "-rf", "{{ run_dir }}", "*", "new\nline; touch pwned", "100%j")  # fmt: skip


@cache
def plan_for(
    run: str = "smoke",
    hardware: str = "h200",
    *,
    stack: str | None = None,
    settings: tuple[str, ...] = (),
    is_exploratory: bool = False,
) -> Plan:
    """A run on one hardware with the site profile that is shipped for it."""
    overrides = parse_overrides(settings)
    loaded = load_run(run, overrides)
    return make_plan(
        run=loaded,
        stack=load_stack(stack or loaded.model.find_stack(hardware)),
        hardware=load_hardware(hardware),
        profile=load_profile(f"generic-{hardware}", profile_folders("slurm")),
        overrides=overrides,
        is_exploratory=is_exploratory,
    )


def with_site(
    plan: Plan,
    *,
    slurm: dict[str, Any] | None = None,
    container: dict[str, Any] | None = None,
    profile: Profile | None = None,
    stack: Stack | None = None,
    run: Run | None = None,
) -> Plan:
    """The same plan with other values in its profile, or another profile, stack or run."""
    profile = profile or plan.profile
    parts: list[tuple[str, type[BaseModel], dict[str, Any] | None]] = [
        ("slurm", SlurmSettings, slurm),
        ("container", ContainerSettings, container),
    ]
    changed = {
        name: model.model_validate_json(json.dumps({**_dump(getattr(profile, name)), **(values or {})}))
        for name, model, values in parts
    }
    return dataclasses.replace(
        plan, profile=profile.model_copy(update=changed), stack=stack or plan.stack, run=run or plan.run
    )


def _dump(part: BaseModel | None) -> dict[str, Any]:
    return {} if part is None else part.model_dump(mode="json", by_alias=True)


def run_dir_of(plan: Plan) -> RunDir:
    return RunDir(Path("/shared/runs") / plan.run.run / RUN_ID)


def list_plans() -> Iterator[tuple[str, Plan]]:
    """File name and plan of every example."""
    for run, hardware in (("smoke", "h200"), ("qwen3-4b", "a100"), ("qwen3-30b-a3b", "mi300x")):
        yield f"{run}.{hardware}", plan_for(run, hardware)
    for hardware in ("h200", "mi300x"):
        plan = plan_for("smoke", hardware, stack="example")
        for runtime in RUNTIMES:
            yield f"smoke.{hardware}.{runtime}", with_site(plan, container={"runtime": runtime, "image_dir": IMAGE_DIR})
    for hardware in ("h200", "gb200"):
        settings = (f"layouts.{hardware}={{num_nodes: 2, gpus_per_node: {8 if hardware == 'h200' else 4}}}",)
        yield f"smoke.{hardware}.two-nodes", plan_for("smoke", hardware, stack="example", settings=settings)
    yield TWO_NODES, make_two_nodes_plan()


def make_two_nodes_plan() -> Plan:
    """Two nodes without GPUs and an image that the tests can build: the example that runs."""
    overrides = parse_overrides(TWO_NODES_SETTINGS)
    return make_plan(
        run=load_run("smoke", overrides),
        stack=load_bytes(Stack, "stack.yaml", TWO_NODES_STACK),
        hardware=load_hardware("cpu"),
        profile=load_bytes(Profile, "profile.yaml", TWO_NODES_PROFILE),
        overrides=overrides,
        is_exploratory=True,
    )


# Slurm's clients as small scripts that answer what a test put down and note how they were called.


_SCRIPT = """\
#!/bin/sh
name=$(basename "$0")
{{ printf '%s' "$name"; for part; do printf '\\037%s' "$part"; done; printf '\\036'; }} >> {folder}/calls
env | grep -E '^(SBATCH|SLURM|SQUEUE)_' >> {folder}/env
case " $* " in *" --test-only "*) name=$name-test;; *" config "*) name=config;; *" topology "*) name=topology;; esac
[ -f {folder}/$name.err ] && cat {folder}/$name.err >&2
[ -f {folder}/$name.out ] && cat {folder}/$name.out
exit "$(cat {folder}/$name.rc 2>/dev/null || echo 0)"
"""
CLIENTS = ("sbatch", "squeue", "sacct", "scancel", "scontrol", "sinfo")


class FakeSlurm:
    """Answers are kept by client; ``sbatch-test`` is sbatch with ``--test-only``, ``config`` is scontrol's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        binaries = folder / "bin"
        binaries.mkdir(parents=True)
        for name in CLIENTS:
            tool = binaries / name
            tool.write_text(_SCRIPT.format(folder=folder))
            tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{binaries}{os.pathsep}{os.environ['PATH']}")
        self.answer("sinfo", "slurm-wlm 22.05.8\n")
        self.answer("config", "Configuration data as of today\nClusterName             = test\n"
                              "SLURM_VERSION           = 22.05.8\n")  # fmt: skip
        self.answer("sacct", error="Slurm accounting storage is disabled\n", code=1)

    def answer(self, name: str, text: str = "", *, error: str = "", code: int = 0) -> None:
        (self.folder / f"{name}.out").write_text(text)
        (self.folder / f"{name}.err").write_text(error)
        (self.folder / f"{name}.rc").write_text(str(code))

    def queue(self, *rows: str) -> None:
        self.answer("squeue", "".join(f"{row}\n" for row in rows))

    @property
    def calls(self) -> list[list[str]]:
        path = self.folder / "calls"
        return [call.split("\x1f") for call in path.read_text().split("\x1e")[:-1]] if path.exists() else []

    def count(self, name: str) -> int:
        return sum(call[0] == name for call in self.calls)

    @property
    def seen_env(self) -> str:
        return (self.folder / "env").read_text()
