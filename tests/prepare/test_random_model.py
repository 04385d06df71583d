"""The random model, its tokenizer and the sums: the same bytes everywhere, and what libraries make of them."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk_repro.base.disk import Unwritable
from rlk_repro.base.files import sha256_file
from rlk_repro.prepare.arithmetic import BYTES_PER_PROMPT, write_prompts
from rlk_repro.prepare.byte_tokenizer import END_OF_TURN, VOCABULARY, tokenizer_files
from rlk_repro.prepare.random_model import Sizes, list_tensors, weights_bytes, write_model, write_weights
from rlk_repro.spec import ArithmeticData, VimeModel

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


def make(arguments: dict[str, Any], seed: int = 1234) -> VimeModel:
    kind = "Qwen3MoeForCausalLM" if "num-experts" in arguments else "Qwen3ForCausalLM"
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


def test_the_bytes_are_those_of_any_number_of_processes(tmp_path: Path) -> None:
    """Larger than one piece, so that both processes write parts of one tensor."""
    sizes = Sizes.of(make({**DENSE, "vocab-size": 70_000}))
    for number in (1, 2, 3):
        write_weights(tmp_path / f"{number}", sizes, seed=7, std=0.02, num_processes=number)
    assert (tmp_path / "1").stat().st_size > 2 * (4 << 20)
    assert len({sha256_file(tmp_path / name) for name in "123"}) == 1


def test_a_write_error_is_reported_from_any_process(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        write_weights(tmp_path, Sizes.of(make(DENSE)), seed=7, std=0.02, num_processes=2)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_weights(tmp_path / "x", Sizes.of(make({**DENSE, "vocab-size": 70_000})), seed=7, std=0.02,
                          num_processes=2)  # fmt: skip
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_a_read_only_folder_of_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("rlk_repro.prepare.random_model.ProcessPoolExecutor", refuse)
    with pytest.raises(Unwritable, match=r"/dev/shm: cannot be written \(Read-only file system"):
        write_weights(tmp_path / "x", Sizes.of(make(DENSE)), seed=7, std=0.02, num_processes=2)


def test_another_seed_gives_other_weights_and_the_same_rest(tmp_path: Path) -> None:
    first, second = written(DENSE, tmp_path / "a"), written(DENSE, tmp_path / "b", seed=1)
    assert {name for name in first if first[name] != second[name]} == {"model.safetensors"}


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
    for name, arguments in (("dense", DENSE), ("moe", MOE)):
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


def test_the_tokenizer_has_a_token_for_every_byte() -> None:
    model = tokenizer_files()["tokenizer.json"]["model"]
    assert sorted(model["vocab"].values()) == list(range(VOCABULARY))
    assert {model["vocab"][character] for character in "aZ09 !".replace(" ", "Ġ")} == set(b"aZ09 !")
    assert model["merges"] == []


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
