"""Convert a Llama model in a GGUF file to the hub's format: configuration, tokenizer, one safetensors file in bfloat16.

The package ``gguf`` turns the file's quantised weights into numbers, which differ from the published weights.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlk_repro.base.errors import BundleUnreadable, EnvironmentMissing, Problem, finish
from rlk_repro.base.files import dump_json, write_bytes
from rlk_repro.prepare.byte_tokenizer import BYTE_LEVEL, make_tokenizer
from rlk_repro.prepare.random_model import CONFIGURATION, WEIGHTS, Tensor, make_header

if TYPE_CHECKING:
    import numpy as np

RECIPE: Final = 1
"""Increase this version when the same GGUF file no longer gives the same bytes."""
_TOP: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR: Final = re.compile(r"blk\.(\d+)\.([a-z_]+)\.weight")
_CONTROL_TOKEN: Final = 3
_DATA_BYTES: Final = 700 << 20
_GROWTH: Final = 16
_CPU_S: Final = 20
_BYTES_PER_CPU_S: Final = 1 << 20
_TOKENIZER: Final = ("gpt2", "smollm")


def write_model(gguf_file: Path, folder: Path) -> None:
    """Write all files of the model; raise BundleUnreadable if ``gguf_file`` holds no supported Llama model."""
    try:
        from gguf import GGUFReader
    except (ImportError, RuntimeError) as error:  # gguf imports mistral-common, which may raise RuntimeError
        raise EnvironmentMissing(
            Problem("python module gguf", f"cannot be imported ({error})", expected="the reader of GGUF files",
                    hint="python -m pip install 'rlk-repro[gguf]'")
        ) from None  # fmt: skip
    try:
        reader = GGUFReader(gguf_file)
    except ValueError as error:
        raise BundleUnreadable(Problem(gguf_file.name, f"is not a GGUF file ({error})")) from None
    facts = {key: field.contents() for key, field in reader.fields.items()}
    _require(facts, gguf_file.name)
    names = {tensor.name: _map_name(tensor.name, gguf_file.name) for tensor in reader.tensors}
    write_bytes(folder / CONFIGURATION, dump_json(_make_config(facts, is_tied="output.weight" not in names)))
    for name, content in _tokenizer_files(facts).items():
        write_bytes(folder / name, dump_json(content))
    generation = {"do_sample": True, "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
                  "pad_token_id": facts["tokenizer.ggml.padding_token_id"]}  # fmt: skip
    write_bytes(folder / "generation_config.json", dump_json(generation))
    _write_weights(folder / WEIGHTS, reader.tensors, names, facts)


def _require(facts: Mapping[str, Any], where: str) -> None:
    tokenizer = (facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre"))
    wanted = {"general.architecture": (facts.get("general.architecture"), "llama"),
              "tokenizer.ggml": (tokenizer, _TOKENIZER)}  # fmt: skip
    problems = [
        Problem(f"{where}: {key}", "is of a kind that prepare does not convert", got=got, expected=str(expected))
        for key, (got, expected) in wanted.items()
        if got != expected
    ]
    scaling = [key for key in facts if key.startswith("llama.rope.scaling.")]
    problems += [Problem(f"{where}: {key}", "rotary scaling is not supported", got=facts[key]) for key in scaling]
    if problems:
        raise BundleUnreadable(*problems)


def _map_name(name: str, where: str) -> str:
    match = _LAYER_TENSOR.fullmatch(name)
    if match is not None and match[2] in _IN_LAYER:
        return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.weight"
    top = _TOP.get(name.removesuffix(".weight"))
    if top is None:
        raise BundleUnreadable(Problem(f"{where}: tensor {name}", "does not belong to a Llama model"))
    return f"{top}.weight"


def _make_config(facts: Mapping[str, Any], *, is_tied: bool) -> dict[str, Any]:
    """Versions 4 and 5 of transformers can read this configuration."""
    hidden, heads = facts["llama.embedding_length"], facts["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": facts["llama.feed_forward_length"],
        "max_position_embeddings": facts["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": facts["llama.block_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        # GGUF stores a float32; rounding it to six digits restores the number that the model's author wrote.
        "rms_norm_eps": float(f"{facts['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None,
        "rope_theta": float(f"{facts['llama.rope.freq_base']:.6g}"),
        "tie_word_embeddings": is_tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
    }


def _tokenizer_files(facts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Make a byte-level BPE tokenizer with one token per digit; GGUF calls this kind of tokenizer ``smollm``."""
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    pairs = enumerate(zip(tokens, kinds, strict=True))
    marks = {number: token for number, (token, kind) in pairs if kind == _CONTROL_TOKEN}
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer = make_tokenizer(
        {token: number for number, token in enumerate(tokens)},
        marks,
        list(facts["tokenizer.ggml.merges"]),
        {"type": "Sequence", "pretokenizers": [digits, BYTE_LEVEL]},
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[facts["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[facts["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[facts["tokenizer.ggml.padding_token_id"]],
        "model_max_length": facts["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": facts["tokenizer.chat_template"],
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def _write_weights(path: Path, tensors: Any, names: Mapping[str, str], facts: Mapping[str, Any]) -> None:
    from gguf.quants import dequantize

    shapes = [Tensor(name=names[item.name], shape=tuple(map(int, reversed(item.shape)))) for item in tensors]
    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    with path.open("wb") as stream:
        stream.write(make_header(shapes))
        for item, tensor in zip(tensors, shapes, strict=True):
            values = dequantize(item.data, item.tensor_type).reshape(tensor.shape)
            num_heads = heads.get(item.name.split(".")[-2])
            stream.write(_bfloat16(values if num_heads is None else _unrotate(values, num_heads)))


def _unrotate(values: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Put the first half of each head's rows before the second half; in GGUF the rows of both halves alternate."""
    rows, columns = values.shape
    return values.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _bfloat16(values: np.ndarray[Any, Any]) -> bytes:
    bits = values.astype("<f4").view("<u4").astype("<u8")
    data: bytes = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    return data


def main(argv: Sequence[str]) -> None:
    """Convert a file that may be a stranger's, with limits that follow from its size."""
    file, folder = map(Path, argv)
    size = file.stat().st_size
    for what, limit in (
        (resource.RLIMIT_DATA, _DATA_BYTES + _GROWTH * size),
        (resource.RLIMIT_FSIZE, _DATA_BYTES + _GROWTH * size),
        (resource.RLIMIT_CPU, _CPU_S + size // _BYTES_PER_CPU_S),
    ):
        resource.setrlimit(what, (limit, limit))
    try:
        write_model(file, folder)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError,
            ValueError) as error:  # fmt: skip
        raise BundleUnreadable(Problem(file.name, f"cannot be read ({type(error).__name__}: {error})")) from None


if __name__ == "__main__":
    sys.exit(finish(lambda: main(sys.argv[1:])))
