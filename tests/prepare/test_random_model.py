"""The random model, its tokenizer and the sums: the same bytes everywhere, and what libraries make of them."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlk_repro.base.errors import EnvironmentMissing, SpecError
from rlk_repro.base.files import sha256_bytes, sha256_file
from rlk_repro.prepare import made_data
from rlk_repro.prepare.contents import load_contents
from rlk_repro.prepare.made_data import BYTES_PER_PROMPT, RandomRollouts, write_prompts
from rlk_repro.prepare.random_model import END_OF_TURN, Sizes, list_tensors, weights_bytes, write_model, write_weights
from rlk_repro.refengine import random_rollouts as program
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.rollout_files import check_file
from rlk_repro.spec import ArithmeticData, VimeModel, VimeWorkload
from rlk_repro.workloads import WORKLOADS
from tests.support.prepare_examples import words
from tests.support.run_plans import make_run_plan

DENSE: dict[str, Any] = {
    "num-layers": 2,
    "hidden-size": 64,
    "ffn-hidden-size": 128,
    "num-attention-heads": 4,
    "num-query-groups": 2,
    "kv-channels": 16,
    "vocab-size": 512,
    "norm-epsilon": 1e-6,
    "rotary-base": 1000000,
}
MOE: dict[str, Any] = {**DENSE, "num-experts": 4, "moe-ffn-hidden-size": 32, "moe-router-topk": 2,
                       "untie-embeddings-and-output-weights": True}  # fmt: skip
GLM: dict[str, Any] = {**DENSE, "post-mlp-layernorm": True, "untie-embeddings-and-output-weights": True,
                       "rotary-percent": 0.5, "add-qkv-bias": True}  # fmt: skip
del GLM["kv-channels"]


def make(arguments: dict[str, Any], seed: int = 1234) -> VimeModel:
    kind = "Qwen3MoeForCausalLM" if "num-experts" in arguments else "Qwen3ForCausalLM"
    if "post-mlp-layernorm" in arguments:
        kind = "Glm4ForCausalLM"
    source = {"kind": "random", "architecture": kind, "seed": seed}
    return VimeModel.model_validate({"title": "x", "source": source, "arguments": arguments})


def written(arguments: dict[str, Any], folder: Path, seed: int = 1234) -> dict[str, str]:
    folder.mkdir()
    write_model(make(arguments, seed), folder)
    return {path.name: sha256_file(path)[:16] for path in sorted(folder.iterdir())}


def test_the_bytes_are_these_on_every_machine(tmp_path: Path) -> None:
    tokenizer = {"tokenizer.json": "def482faae189372", "tokenizer_config.json": "fccc77e18c7a53da"}
    assert written(DENSE, tmp_path / "dense") == {
        **tokenizer,
        "config.json": "902f4eb90f34dc83",
        "generation_config.json": "4677db3aea04a0b8",
        "model.safetensors": "895ad56ebb41d567",
    }
    assert written(MOE, tmp_path / "moe") == {
        **tokenizer,
        "config.json": "f7262c3c5ea3641f",
        "generation_config.json": "4677db3aea04a0b8",
        "model.safetensors": "cde9ae605e8ab7b6",
    }
    assert written(GLM, tmp_path / "glm") == {
        **tokenizer,
        "config.json": "de60d8c2016a0086",
        "generation_config.json": "4677db3aea04a0b8",
        "model.safetensors": "3bdb3415e273c52e",
    }


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """By the format's own description, with torch for the numbers."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    end = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        raw = bytearray(data[8 + length + start : 8 + length + end])
        tensors[name] = torch.frombuffer(raw, dtype=torch.bfloat16).reshape(entry["shape"])
    assert (8 + length) % 8 == 0
    assert 8 + length + end == len(data)
    return tensors


def test_weights_are_normal_and_norms_are_ones(tmp_path: Path) -> None:
    written({**DENSE, "vocab-size": 4096}, tmp_path / "m")
    tensors = read_safetensors(tmp_path / "m" / "model.safetensors")
    sizes = Sizes.of(make({**DENSE, "vocab-size": 4096}))
    assert list(tensors) == [tensor.name for tensor in list_tensors(sizes)]
    assert sum(2 * math.prod(tensor.shape) for tensor in tensors.values()) == weights_bytes(sizes)
    embedding = tensors["model.embed_tokens.weight"].float()
    assert embedding.std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(embedding.mean().item()) < 1e-4
    assert len(set(embedding.flatten().tolist())) == 256
    assert tensors["model.layers.1.self_attn.q_norm.weight"].tolist() == [1.0] * 16
    assert not torch.equal(tensors["model.layers.0.mlp.up_proj.weight"], tensors["model.layers.1.mlp.up_proj.weight"])


def test_transformers_loads_it_and_finds_every_weight(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name, arguments in (("dense", DENSE), ("moe", MOE), ("glm", GLM)):
        written(arguments, tmp_path / name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(info.values())
        text = tokenizer.apply_chat_template([{"role": "user", "content": "3 + 4? ünï 名"}], tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.eos_token_id == END_OF_TURN
        with torch.no_grad():
            assert model(torch.tensor([ids])).logits.isfinite().all()


def test_sums_are_right_and_the_same_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    write_prompts(ArithmeticData(kind="arithmetic", num_prompts=200, max_operand=99), path)
    assert sha256_file(path)[:16] == "417c3522b1027727"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        words = line["prompt"].removeprefix("What is ").partition("?")[0].split()
        assert int(words[0]) + int(words[2]) == int(line["label"])
    assert len({line["prompt"] for line in lines}) > 150
    assert path.stat().st_size <= 200 * BYTES_PER_PROMPT


# Rollouts made from a seed: real files by the real command, read as the trainer reads them.


Call = Callable[..., tuple[int, str, str]]
MADE = RandomRollouts(seed=1, num_files=2, num_samples=6, prompt_len=5, response_len=11, vocab_size=1000)
WITH_EXPERTS = replace(MADE, num_layers=2, num_experts=16, num_experts_per_token=4)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts are written in this process, as one of their own takes seconds to import torch."""

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        program.main(command[3:])
        return SimpleNamespace(is_ok=True)

    monkeypatch.setattr("rlk_repro.base.proc.run", run)


def load(folder: Path, number: int) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = torch.load(folder / f"{number}.pt", weights_only=True)["samples"]
    return samples


def test_values_follow_from_the_recipe_alone(here: None, tmp_path: Path) -> None:
    MADE.write(tmp_path)
    samples = [sample for number in range(2) for sample in load(tmp_path, number)]
    values = [(sample["index"], sample["tokens"], sample["reward"]) for sample in samples]
    assert sha256_bytes(repr(values).encode()) == "7b2013c12149d274e7222d4e247c25c7e7fa3089609bdb0f55817ccfa105a6ff"
    assert [sample["index"] for sample in samples] == list(range(12))
    assert not any("rollout_log_probs" in sample for sample in samples)
    for path in tmp_path.iterdir():
        check_file(path)


def test_samples_grow_from_rollout_to_rollout_and_the_last_ones_have_full_length(here: None, tmp_path: Path) -> None:
    growing = replace(MADE, num_files=3, growth=4)
    growing.write(tmp_path)
    lengths = [
        {(len(item["tokens"]), item["response_length"]) for item in load(tmp_path, number)} for number in range(3)
    ]
    assert lengths == [{(8, 3)}, {(12, 7)}, {(16, 11)}]
    assert [growing.find_response_len(number) for number in range(3)] == [3, 7, 11]
    assert growing.recipe == {**MADE.recipe, "num_files": 3, "growth": 4}
    assert growing.num_bytes == 6 * (8 + 12 + 16) * 5


def test_each_token_goes_to_distinct_experts(here: None, tmp_path: Path) -> None:
    WITH_EXPERTS.write(tmp_path)
    experts = load(tmp_path, 1)[3]["rollout_routed_experts"]
    assert (experts.dtype, experts.shape) == (torch.int32, (15, 2, 4))
    assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 16 for row in experts.view(-1, 4).tolist())


def test_several_processes_write_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(2))
    folders = [tmp_path / name for name in ("one", "two")]
    for folder, worth in zip(folders, (1 << 30, 0), strict=True):
        folder.mkdir()
        monkeypatch.setattr(made_data, "_WORTH_PROCESSES", worth)
        replace(WITH_EXPERTS, num_files=3).write(folder)
    one, two = ([(path.name, path.read_bytes()) for path in sorted(folder.iterdir())] for folder in folders)
    assert one == two
    assert len(one) == 3


def test_without_torch_the_error_says_where_to_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_data, "MODULE", "rlk_repro.no_such_module")
    with pytest.raises(
        EnvironmentMissing, match=r"No module named rlk_repro.no_such_module\), expected a Python with torch"
    ):
        MADE.write(tmp_path)


@pytest.mark.parametrize("run", ["qwen3-4b-random", "qwen3-30b-a3b-random-12l"])
def test_a_run_with_a_seed_stores_nothing_and_trains_on_them(tmp_path: Path, run: str) -> None:
    plan = make_run_plan(run, "h200")
    run_dir = RunDir(tmp_path / "runs" / run / "id")
    assert WORKLOADS["vime"].rollout_commands(plan, run_dir) == {}
    command = WORKLOADS["vime"].trainer_command(plan, plan.trials[0], run_dir)
    assert command.stored is not None
    assert command.stored.path.parent == tmp_path / "runs" / "prepared" / "rollouts"
    assert isinstance(plan.run.workload, VimeWorkload)
    made = RandomRollouts.of(plan.run, plan.run.workload)
    assert made is not None
    assert made.num_files == plan.run.measure.num_stored
    assert bool(made.num_experts) is (run == "qwen3-30b-a3b-random-12l")


def test_prepare_makes_them_and_no_prompts(tmp_path: Path, call: Call) -> None:
    asked = words("--set", "lane=train-only", "--set", "workload.rollouts_seed=7", "--set", "measure.pairs=2")
    asked += ["--set", "measure.warmup_steps=1", "--set", "measure.scored_steps=2"]
    asked += ["--set", "workload.grpo.rollout_max_response_len=8"]
    code, out, err = call(*asked)
    assert code == 0, err
    assert "measure.scored_steps: submit needs --exploratory for this setting, which changes a measurement rule" in err
    assert "dataset" not in out
    folders = list(tmp_path.glob("**/rollouts/random-*"))
    contents = [load_contents(folder) for folder in folders if folder.is_dir()]
    assert [sorted(item.files) for item in contents if item is not None] == [["0.pt", "1.pt", "2.pt"]]


def test_named_rollouts_and_a_seed_exclude_each_other() -> None:
    named = f"workload.rollouts={{name: a, num_files: 40, digest: 'sha256:{'0' * 64}', made_by: a test}}"
    with pytest.raises(
        SpecError, match=r"workload\.rollouts_seed: contradicts the key `rollouts`, which is also set, got 1234"
    ):
        make_run_plan("qwen3-4b-random", "h200", named)


def test_the_bytes_are_those_of_any_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger than one piece, so that several processes write parts of one tensor."""
    sizes = Sizes.of(make({**DENSE, "vocab-size": 70_000}))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(3))
    for worth in (1 << 40, 1 << 20):
        monkeypatch.setattr("rlk_repro.prepare.random_model._WORTH_A_PROCESS", worth)
        write_weights(tmp_path / str(worth), sizes, seed=7, std=0.02)
    assert len({sha256_file(path) for path in tmp_path.iterdir()}) == 1
