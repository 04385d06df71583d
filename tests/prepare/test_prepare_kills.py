"""Kills at any moment of ``prepare``, and two of them at once: nothing partial is taken for whole, all is shared."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.base import proc
from rlk_repro.base.errors import CheckFailed
from rlk_repro.base.resources import list_names, run_folders
from rlk_repro.prepare.contents import check_contents, load_contents, record_path
from rlk_repro.spec import Run, VimeWorkload
from rlk_repro.spec.load import load_hardware, load_run, load_stack
from rlk_repro.workloads.vime import conversion
from rlk_repro.workloads.vime.conversion import ONE_PROCESS_BYTES, TOOL, Conversion
from tests import ROOT
from tests.support.prepare_examples import TINY, HubServer, argv, fill_hub, from_hub, hub_environment, serve_hub, words
from tests.support.vime_examples import patch_megatron
from tests.support.waiting import wait_until

Call = Callable[..., tuple[int, str, str]]
KIB = 1 << 10


@pytest.fixture
def hub() -> Iterator[HubServer]:
    pytest.importorskip("huggingface_hub")
    with serve_hub() as server:
        fill_hub(server, num_shards=4, shard_bytes=400 * KIB)
        yield server


def start(hub: HubServer, tmp_path: Path, prepared: Path, *more: str) -> subprocess.Popen[str]:
    return launch(hub, tmp_path, words("--cache", str(prepared), "--json", *more))


def launch(hub: HubServer, tmp_path: Path, arguments: list[str]) -> subprocess.Popen[str]:
    env, pipe = hub_environment(hub, tmp_path / "home"), subprocess.PIPE
    return subprocess.Popen(argv(*arguments), env=env, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    value: dict[str, Any] = json.loads(out)
    return value


def require_nothing_half(prepared: Path) -> int:
    """Whatever has a record is whole, byte by byte; how many have one."""
    records = [path for path in prepared.glob("*/*.json") if not path.name.startswith(".")]
    for path in records:
        folder = path.with_name(path.name.removesuffix(".json"))
        contents = load_contents(folder)
        if contents is not None:
            assert list(check_contents(folder, contents, is_full=True)) == []
    folders = [path for path in prepared.glob("*/*") if path.is_dir() and not path.name.startswith(".")]
    for folder in folders:
        assert record_path(folder).is_file() or folder.with_name(f".partial-{folder.name}").is_dir()
    return len(records)


def test_a_killed_fetch_continues_where_it_stopped_at_its_first_commit(hub: HubServer, tmp_path: Path) -> None:
    prepared = tmp_path / "prepared"
    hub.bytes_per_s = 200 * KIB
    process = start(hub, tmp_path, prepared, *from_hub(None))
    wait_until(lambda: hub.gets["model-00001.safetensors"] > 0)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    require_nothing_half(prepared)
    fill_hub(hub, "2" * 40, num_shards=4, shard_bytes=400 * KIB)
    hub.bytes_per_s = None
    answer = finish(start(hub, tmp_path, prepared, *from_hub(None)))
    assert [part["source"]["revision"] for part in answer["parts"]] == ["1" * 40, "1" * 40]
    assert hub.gets["data/train.jsonl"] == 1
    assert require_nothing_half(prepared) == 2
    assert list(prepared.rglob(".partial-*")) == []


def test_two_concurrent_prepares_share_one_result(hub: HubServer, tmp_path: Path) -> None:
    hub.bytes_per_s = 2000 * KIB
    prepared = tmp_path / "prepared"
    first, second = (start(hub, tmp_path, prepared, *from_hub()) for _ in range(2))
    assert finish(first) == finish(second)
    assert {name: number for name, number in hub.gets.items() if name.endswith((".safetensors", ".jsonl"))} == {
        **{f"model-{number:05}.safetensors": 1 for number in range(4)},
        "data/train.jsonl": 1,
    }


OWN_TOOL = """
import argparse, json, os, pathlib, time
parser = argparse.ArgumentParser()
parser.add_argument("--hf-checkpoint")
parser.add_argument("--save")
options, model = parser.parse_known_args()
print("converting", options.hf_checkpoint, flush=True)
save = pathlib.Path(options.save)
for number in range(8):
    (save / "release").mkdir(parents=True, exist_ok=True)
    (save / "release" / f"__{number}_0.distcp").write_bytes(bytes([number]) * 50000)
    time.sleep(float(pathlib.Path(__file__).with_name("mode").read_text() or 0))
ranks = [os.environ[name] for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT")]
(save / "release" / "words.json").write_text(
    json.dumps([model, os.environ["PYTHONPATH"].split(os.pathsep)[:2], ranks]))
(save / "latest_checkpointed_iteration.txt").write_text("release")
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checkouts of a vime and a Megatron-LM, and a stack that pins them; the tool writes what upstream's would."""
    stack = "schema: 1\nstack: own\npurpose: a test\npins:\n"
    for name, module, variable in (("vime", "vime", "VIME_SRC"), ("megatron_lm", "megatron", "MEGATRON_SRC")):
        folder = tmp_path / "sources" / name
        (folder / module).mkdir(parents=True)
        (folder / module / "__init__.py").write_text("")
        if name == "vime":
            (folder / "tools").mkdir()
            (folder / "tools" / "convert_hf_to_torch_dist.py").write_text(OWN_TOOL)
            (folder / ".gitignore").write_text("mode\n")
            (folder / "tools" / "mode").write_text("")
        git = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@y"]
        for words_ in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
            subprocess.run([*git, *words_], check=True)
        commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
        stack += f"  {name}: {{repository: 'https://git.example/x', commit: '{commit}'}}\n"
        monkeypatch.setenv(variable, str(folder))
    (tmp_path / "own.yaml").write_text(stack)
    return tmp_path / "sources" / "vime" / "tools" / "mode"


def convert(tmp_path: Path) -> list[str]:
    places = ("--stack", str(tmp_path / "own.yaml"), "--cache", str(tmp_path / "prepared"))
    return ["prepare", "vime-smoke", "--hardware", "h200", *TINY, *places, "--json"]


def test_a_conversion_is_recorded_with_its_command_and_commits(
    tmp_path: Path, tool: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setenv("MASTER_PORT", "12355")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    code, out, error = call(*convert(tmp_path))
    assert code == 0, error
    part = json.loads(out)["parts"][-1]
    assert (part["kind"], part["num_files"]) == ("checkpoint", 10)
    folder = Path(part["folder"])
    model, path, ranks = json.loads((folder / "release" / "words.json").read_text())
    assert model[:4] == ["--swiglu", "--num-layers", "2", "--hidden-size"]
    assert path == [str(tmp_path / "sources" / name) for name in ("megatron_lm", "vime")]
    assert ranks == ["1", "0", "0", "0"], "one process on a free port, whatever Slurm has"
    contents = load_contents(folder)
    assert contents is not None
    assert contents.source["arguments"] == model
    assert contents.made["commits"] == contents.source["commits"]
    assert contents.made["command"][-2:] == ["--save", "{work}/files"]
    assert str(tmp_path) not in json.dumps(contents.to_json())
    assert call(*convert(tmp_path))[1] == out


def test_a_killed_conversion_leaves_no_process_and_is_begun_again(
    hub: HubServer, tmp_path: Path, tool: Path, call: Call
) -> None:
    tool.write_text("0.2")
    process = launch(hub, tmp_path, convert(tmp_path))
    checkpoints = tmp_path / "prepared" / "checkpoints"
    wait_until(lambda: any(checkpoints.glob(".partial-*/files/release/__1_0.distcp")))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    time.sleep(0.3)
    before = sorted(checkpoints.rglob("*.distcp"))
    time.sleep(0.5)
    assert sorted(checkpoints.rglob("*.distcp")) == before
    require_nothing_half(tmp_path / "prepared")
    tool.write_text("")
    assert json.loads(call(*convert(tmp_path))[1])["parts"][-1]["num_files"] == 10


def test_another_vime_than_the_pinned_one_does_not_convert(tmp_path: Path, tool: Path, call: Call) -> None:
    stack, another = tmp_path / "own.yaml", "0" * 40
    stack.write_text(re.sub(r"(vime: .*commit: )'\w{40}'", rf"\g<1>'{another}'", stack.read_text()))
    code, _, error = call(*convert(tmp_path))
    assert (code, "code.vime.commit: differs from the stack's commit" in error) == (3, True)


# Conversion commands of every shipped run through the parser of vime's own tool.  Needs VIME_SRC and MEGATRON_SRC,
# and a Python with torch and triton: this one, or VIME_PYTHON.


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
    made = make_conversion(run, hardware)
    assert made.num_processes(ONE_PROCESS_BYTES) == 1
    many = made.num_processes(ONE_PROCESS_BYTES + 1)
    assert many == min(run.layouts[hardware].gpus_per_node, made.model.size("num-layers"))
    words = made.command(Path("tool.py"), Path("/out"), ONE_PROCESS_BYTES + 1)
    assert ("--nproc-per-node" in words) is (many > 1)
    assert words[-4:] == ["--hf-checkpoint", "/models/x", "--save", "/out"]


@pytest.mark.parametrize(("gpus", "hint"), [([], "run the same command on a GPU node"), (["nvidia"], "the log names")])
def test_a_failed_tool_sends_only_a_machine_without_gpus_elsewhere(
    gpus: list[str], hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "find_on_bus", lambda: gpus)
    with pytest.raises(CheckFailed, match=r"the conversion failed \(exit code 1\): no GPU") as caught:
        conversion._run_tool([sys.executable, "-c", "raise SystemExit('no GPU')"], {}, tmp_path / "log")
    assert hint in str(caught.value)


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
    paths = [str(ROOT), os.environ["VIME_SRC"], megatron, os.environ.get("PYTHONPATH", "")]
    found = proc.run(
        [python, "-m", "tests.support.conversion_parser"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        timeout_s=250,
        stdin=json.dumps({"tool": str(tool), "lists": lists}).encode(),
    )
    assert found.is_ok, found.stderr[-3000:]
    answers = json.loads(found.stdout.splitlines()[-1])
    assert answers.pop("with a typing error").endswith("unrecognized arguments: --num-layer-s 3")
    assert answers == dict.fromkeys(answers, "")
    assert len(answers) == len(CONVERTED)
