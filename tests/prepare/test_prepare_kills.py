"""Kills at any moment of ``prepare``, and two of them at once: nothing partial is taken for whole, all is shared."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.prepare.contents import check_contents, load_contents, record_path
from tests.support.prepare_examples import TINY, HubServer, argv, fill_hub, from_hub, hub_environment, serve_hub, words
from tests.support.waiting import wait_until

KIB = 1 << 10


@pytest.fixture
def hub() -> Iterator[HubServer]:
    pytest.importorskip("huggingface_hub")
    with serve_hub() as server:
        fill_hub(server, num_shards=4, shard_bytes=400 * KIB)
        yield server


def start(hub: HubServer, tmp_path: Path, prepared: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        argv(*words("--cache", str(prepared), "--json", *more)),
        env=hub_environment(hub, tmp_path / "home"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    value: dict[str, Any] = json.loads(out)
    return value


def digests(answer: dict[str, Any]) -> list[str]:
    return [part["digest"] for part in answer["parts"]]


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


def kill_and_finish(hub: HubServer, tmp_path: Path, kills: int, more: list[str], seed: int = 1) -> None:
    reference = finish(start(hub, tmp_path, tmp_path / "reference", *more))
    hub.bytes_per_s = 600 * KIB
    prepared, generator = tmp_path / "prepared", random.Random(seed)
    num_early = 0
    for _ in range(kills):
        process = start(hub, tmp_path, prepared, *more)
        time.sleep(generator.uniform(0.3, 4.0))
        num_early += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        require_nothing_half(prepared)
    hub.bytes_per_s = None
    answer = finish(start(hub, tmp_path, prepared, *more))
    assert digests(answer) == digests(reference)
    assert num_early
    assert [path.name for path in prepared.rglob(".partial-*")] == []
    finish(start(hub, tmp_path, prepared, *more, "--offline", "--verify"))


def test_a_killed_fetch_continues_where_it_stopped(hub: HubServer, tmp_path: Path) -> None:
    kill_and_finish(hub, tmp_path, 3, from_hub())


def test_files_fetched_before_a_kill_are_not_fetched_again(hub: HubServer, tmp_path: Path) -> None:
    prepared = tmp_path / "prepared"
    hub.bytes_per_s = 200 * KIB
    process = start(hub, tmp_path, prepared, *from_hub())
    wait_until(lambda: hub.gets["model-00001.safetensors"] > 0)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    hub.bytes_per_s = None
    finish(start(hub, tmp_path, prepared, *from_hub()))
    assert hub.gets["model-00000.safetensors"] == 1
    assert hub.gets["model-00001.safetensors"] == 2


def test_an_unpinned_fetch_ends_at_the_commit_it_began_with(hub: HubServer, tmp_path: Path) -> None:
    prepared = tmp_path / "prepared"
    hub.bytes_per_s = 200 * KIB
    process = start(hub, tmp_path, prepared, *from_hub(None))
    wait_until(lambda: hub.gets["model-00001.safetensors"] > 0)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    fill_hub(hub, "2" * 40, num_shards=4, shard_bytes=400 * KIB)
    hub.bytes_per_s = None
    answer = finish(start(hub, tmp_path, prepared, *from_hub(None)))
    assert [part["source"]["revision"] for part in answer["parts"]] == ["1" * 40, "1" * 40]


def test_two_concurrent_prepares_share_one_result(hub: HubServer, tmp_path: Path) -> None:
    hub.bytes_per_s = 2000 * KIB
    prepared = tmp_path / "prepared"
    first, second = (start(hub, tmp_path, prepared, *from_hub()) for _ in range(2))
    assert finish(first) == finish(second)
    assert {name: number for name, number in hub.gets.items() if name.endswith((".safetensors", ".jsonl"))} == {
        **{f"model-{number:05}.safetensors": 1 for number in range(4)},
        "data/train.jsonl": 1,
    }


TOOL = """
import argparse, json, os, pathlib, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--hf-checkpoint")
parser.add_argument("--save")
options, model = parser.parse_known_args()
print("converting", options.hf_checkpoint, flush=True)
if "--fail" in pathlib.Path(__file__).with_name("mode").read_text():
    sys.exit("RuntimeError: No CUDA GPUs are available")
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
            (folder / "tools" / "convert_hf_to_torch_dist.py").write_text(TOOL)
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


def convert(hub: HubServer, tmp_path: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        argv("prepare", "vime-smoke", "--hardware", "h200", *TINY, "--stack", str(tmp_path / "own.yaml"), "--cache",
             str(tmp_path / "prepared"), "--json", *more),
        env=hub_environment(hub, tmp_path / "home"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True)  # fmt: skip


def test_a_conversion_is_recorded_with_its_command_and_commits(
    hub: HubServer, tmp_path: Path, tool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "12355")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    answer = finish(convert(hub, tmp_path))
    part = answer["parts"][-1]
    assert (part["kind"], part["num_files"]) == ("checkpoint", 10)
    folder = Path(part["folder"])
    model, path, ranks = json.loads((folder / "release" / "words.json").read_text())
    assert model[:4] == ["--swiglu", "--num-layers", "2", "--hidden-size"]
    assert path == [str(tmp_path / "sources" / name) for name in ("megatron_lm", "vime")]
    assert ranks == ["1", "0", "0", "0"], "one process on a free port, whatever Slurm or another conversion has"
    contents = load_contents(folder)
    assert contents is not None
    assert contents.source["arguments"] == model
    assert contents.made["commits"] == contents.source["commits"]
    assert contents.made["command"][-2:] == ["--save", "{work}/files"]
    assert str(tmp_path) not in json.dumps(contents.to_json())
    assert digests(finish(convert(hub, tmp_path))) == digests(answer)


def test_a_failed_conversion_quotes_the_tool(hub: HubServer, tmp_path: Path, tool: Path) -> None:
    tool.write_text("--fail")
    process = convert(hub, tmp_path)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "the conversion failed (exit code 1)" in error
    assert "No CUDA GPUs are available" in error
    assert "run the same command on a GPU node" in error
    tool.write_text("")
    finish(convert(hub, tmp_path))


def test_a_killed_conversion_leaves_no_process_and_is_begun_again(hub: HubServer, tmp_path: Path, tool: Path) -> None:
    tool.write_text("0.3")
    process = convert(hub, tmp_path)
    checkpoints = tmp_path / "prepared" / "checkpoints"
    wait_until(lambda: any(checkpoints.glob(".partial-*/files/release/__1_0.distcp")))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    time.sleep(1.0)
    before = sorted(checkpoints.rglob("*.distcp"))
    time.sleep(1.0)
    assert sorted(checkpoints.rglob("*.distcp")) == before
    require_nothing_half(tmp_path / "prepared")
    tool.write_text("")
    answer = finish(convert(hub, tmp_path))
    assert answer["parts"][-1]["num_files"] == 10


def test_another_vime_than_the_pinned_one_does_not_convert(hub: HubServer, tmp_path: Path, tool: Path) -> None:
    stack = tmp_path / "own.yaml"
    stack.write_text(re.sub(r"(vime: .*commit: )'[0-9a-f]{40}'", rf"\g<1>'{'0' * 40}'", stack.read_text()))
    process = convert(hub, tmp_path)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 3, error
    assert "code.vime.commit: differs from the stack's commit" in error
