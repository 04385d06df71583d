"""Conversion commands of every shipped run through the parser of vime's own tool, which is Megatron-LM's.

Needs VIME_SRC and MEGATRON_SRC, and a Python with torch and triton: this one, or VIME_PYTHON.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from rlk_repro.base import proc
from rlk_repro.base.errors import CheckFailed
from rlk_repro.base.resources import list_names, run_folders
from rlk_repro.spec import Run, VimeWorkload
from rlk_repro.spec.load import load_hardware, load_run, load_stack
from rlk_repro.workloads.vime import conversion as conversion_module
from rlk_repro.workloads.vime.conversion import ONE_PROCESS_BYTES, TOOL, Conversion
from tests import ROOT

REPOSITORY = ROOT
RUNS = [load_run(name).model for name in list_names(run_folders())]
CONVERTED = [
    (run, hardware)
    for run in RUNS
    if isinstance(run.workload, VimeWorkload) and run.workload.model.checkpoint == "torch_dist"
    for hardware in run.layouts
]


def make_conversion(run: Run, hardware: str) -> Conversion:
    assert isinstance(run.workload, VimeWorkload)
    return Conversion(
        model=run.workload.model,
        folder=Path("/models/x"),
        stack=load_stack(run.stack).model,
        hardware=load_hardware(hardware).model,
        layout=run.layouts[hardware],
    )


@pytest.mark.parametrize(("run", "hardware"), CONVERTED, ids=lambda item: item if isinstance(item, str) else item.run)
def test_processes_are_as_many_as_the_weights_need_and_the_tool_takes(run: Run, hardware: str) -> None:
    conversion = make_conversion(run, hardware)
    assert conversion.num_processes(ONE_PROCESS_BYTES) == 1
    many = conversion.num_processes(ONE_PROCESS_BYTES + 1)
    assert many == min(run.layouts[hardware].gpus_per_node, conversion.model.size("num-layers"))
    words = conversion.command(Path("tool.py"), Path("/out"), ONE_PROCESS_BYTES + 1)
    assert ("--nproc-per-node" in words) is (many > 1)
    assert words[-4:] == ["--hf-checkpoint", "/models/x", "--save", "/out"]


@pytest.mark.parametrize(("gpus", "hint"), [([], "run the same command on a GPU node"), (["nvidia"], "the log names")])
def test_a_failed_tool_sends_only_a_machine_without_gpus_elsewhere(
    gpus: list[str], hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion_module, "find_on_bus", lambda: gpus)
    with pytest.raises(CheckFailed, match="the conversion failed") as caught:
        conversion_module._run_tool([sys.executable, "-c", "raise SystemExit(2)"], {}, tmp_path / "log")
    assert hint in str(caught.value)


def patch_megatron(folder: Path) -> Path:
    """Megatron-LM with vime's patch, as images have it: some models' arguments are the patch's own."""
    source, patch = (
        Path(os.environ["MEGATRON_SRC"]),
        Path(os.environ["VIME_SRC"]) / "docker/patch/latest/megatron.patch",
    )
    if proc.run(["git", "apply", "--reverse", "--check", str(patch)], cwd=source).is_ok:
        return source
    shutil.copytree(source / "megatron", folder / "megatron")
    applied = proc.run(["git", "apply", str(patch)], cwd=folder)
    assert applied.is_ok, applied.stderr
    return folder


@pytest.mark.skipif(not {"VIME_SRC", "MEGATRON_SRC"} <= os.environ.keys(), reason="VIME_SRC or MEGATRON_SRC unset")
def test_the_tools_own_parser_takes_every_command(tmp_path: Path) -> None:
    python = os.environ.get("VIME_PYTHON") or sys.executable
    if not proc.run([python, "-c", "import torch, triton"], timeout_s=120).is_ok:
        pytest.skip(f"{python} has no triton, which Megatron-LM imports: set VIME_PYTHON")
    tool = Path(os.environ["VIME_SRC"]) / TOOL
    lists = {
        f"{run.run} {hardware}": make_conversion(run, hardware).command(tool, Path("/out"), 0)[2:]
        for run, hardware in CONVERTED
    }
    lists["with a typing error"] = [*lists["vime-smoke h200"], "--num-layer-s", "3"]
    megatron = str(patch_megatron(tmp_path))
    paths = [str(REPOSITORY), os.environ["VIME_SRC"], megatron, os.environ.get("PYTHONPATH", "")]
    found = proc.run(
        [python, "-m", "tests.support.conversion_parser"],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        timeout_s=250,
        stdin=json.dumps({"tool": str(tool), "lists": lists}).encode(),
    )
    assert found.is_ok, found.stderr[-3000:]
    answers = json.loads(found.stdout.splitlines()[-1])
    assert answers.pop("with a typing error").endswith("unrecognized arguments: --num-layer-s 3")
    assert answers == dict.fromkeys(answers, "")
    assert len(answers) == len(CONVERTED)
