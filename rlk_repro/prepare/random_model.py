"""Make a Qwen3 or GLM-4 model with random weights, in the hub's format: configuration, byte tokenizer, safetensors.

The arguments and the seed determine the bytes on every machine: SHAKE-256 chooses one of 256 quantiles of a normal
distribution for each weight.  The tokenizer's tokens are the 256 bytes and three chat markers, so that it can encode
every text.

https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import signal
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final

from rlk_repro.base.errors import EnvironmentMissing, Problem, SpecError
from rlk_repro.base.files import dump_json, write_bytes
from rlk_repro.base.shares import run_shares
from rlk_repro.spec import VimeModel
from rlk_repro.spec.assets import RandomWeights

PADDING: Final = 256
START_OF_TURN: Final = 257
END_OF_TURN: Final = 258
VOCABULARY: Final = 259
_MARKS: Final = {PADDING: "<|endoftext|>", START_OF_TURN: "<|im_start|>", END_OF_TURN: "<|im_end|>"}
_BYTE_LEVEL: Final[Mapping[str, Any]] = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

RECIPE: Final = 1
"""Increase this version when the same settings no longer give the same bytes."""
WEIGHTS: Final = "model.safetensors"
CONFIGURATION: Final = "config.json"
_BLOCK: Final = 4 << 20
_WORTH_A_PROCESS: Final = 256 << 20
_BYTES_PER_WEIGHT: Final = 2
_MODEL_TYPES: Final = {"Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe", "Glm4ForCausalLM": "glm4"}
_FLAGS: Final = {
    "num_layers": "num-layers",
    "hidden_size": "hidden-size",
    "intermediate_size": "ffn-hidden-size",
    "num_heads": "num-attention-heads",
    "vocab_size": "vocab-size",
}
_GLM_FLAGS: Final = {"rotary-percent": 0.5, "add-qkv-bias": True}
_EXPERT_FLAGS: Final = {
    "num_experts": "num-experts",
    "expert_size": "moe-ffn-hidden-size",
    "num_experts_per_token": "moe-router-topk",
}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """The weights of one tensor: 1 in a norm, otherwise random."""

    name: str
    shape: tuple[int, ...]
    is_norm: bool = False

    @property
    def num_bytes(self) -> int:
        return _BYTES_PER_WEIGHT * math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_groups: int
    head_dim: int
    vocab_size: int
    norm_epsilon: float
    rotary_base: float
    is_tied: bool
    num_experts: int = 0
    expert_size: int = 0
    num_experts_per_token: int = 0
    is_glm: bool = False

    @classmethod
    def of(cls, model: VimeModel) -> Sizes:
        """Read the sizes; raise SpecError if a size is missing or the vocabulary is too small for the tokenizer."""
        arguments = model.arguments
        architecture = model.source.architecture if isinstance(model.source, RandomWeights) else None
        has_experts = architecture == "Qwen3MoeForCausalLM"
        flags = _FLAGS | _EXPERT_FLAGS if has_experts else _FLAGS
        problems = [
            Problem(f"workload.model.arguments.{flag}", "missing", expected="a size of the random model")
            for flag in flags.values()
            if not model.size(flag)
        ]
        if model.size("vocab-size", VOCABULARY) < VOCABULARY:
            problems.append(Problem("workload.model.arguments.vocab-size", "is too small for the byte tokenizer",
                                    got=model.size("vocab-size"), expected=f"{VOCABULARY} or more"))  # fmt: skip
        if architecture == "Glm4ForCausalLM":
            problems += [
                Problem(
                    f"workload.model.arguments.{flag}",
                    "does not fit GLM-4",
                    got=arguments.get(flag),
                    expected=str(value),
                )
                for flag, value in _GLM_FLAGS.items()
                if arguments.get(flag) != value
            ]
        if problems:
            raise SpecError(*problems)
        sizes = {name: model.size(flag) for name, flag in (_FLAGS | _EXPERT_FLAGS).items()}
        if not has_experts:
            sizes["num_experts"] = 0
        return cls(
            **sizes,
            head_dim=model.size("kv-channels", sizes["hidden_size"] // sizes["num_heads"]),
            is_glm=architecture == "Glm4ForCausalLM",
            num_groups=model.size("num-query-groups", sizes["num_heads"]),
            norm_epsilon=_number(arguments, "norm-epsilon", 1e-6),
            rotary_base=_number(arguments, "rotary-base", 10000.0),
            is_tied=not arguments.get("untie-embeddings-and-output-weights", False),
        )


def _number(arguments: Mapping[str, Any], flag: str, default: float) -> float:
    value = arguments.get(flag, default)
    return float(value) if isinstance(value, int | float) else default


def list_tensors(sizes: Sizes) -> Iterator[Tensor]:
    """Yield the tensors in the order of the file; shapes are [out, in], as in torch's Linear."""
    hidden, heads = sizes.hidden_size, sizes.num_heads * sizes.head_dim
    yield Tensor(name="model.embed_tokens.weight", shape=(sizes.vocab_size, hidden))
    for index in range(sizes.num_layers):
        prefix = f"model.layers.{index}"
        if sizes.is_glm:
            yield from _list_glm_layer(prefix, sizes)
            continue
        attention, groups = f"{prefix}.self_attn", sizes.num_groups * sizes.head_dim
        yield Tensor(name=f"{prefix}.input_layernorm.weight", shape=(hidden,), is_norm=True)
        yield Tensor(name=f"{attention}.q_proj.weight", shape=(heads, hidden))
        yield Tensor(name=f"{attention}.k_proj.weight", shape=(groups, hidden))
        yield Tensor(name=f"{attention}.v_proj.weight", shape=(groups, hidden))
        yield Tensor(name=f"{attention}.o_proj.weight", shape=(hidden, heads))
        yield Tensor(name=f"{attention}.q_norm.weight", shape=(sizes.head_dim,), is_norm=True)
        yield Tensor(name=f"{attention}.k_norm.weight", shape=(sizes.head_dim,), is_norm=True)
        yield Tensor(name=f"{prefix}.post_attention_layernorm.weight", shape=(hidden,), is_norm=True)
        if not sizes.num_experts:
            yield from _list_mlp(f"{prefix}.mlp", hidden, sizes.intermediate_size)
            continue
        yield Tensor(name=f"{prefix}.mlp.gate.weight", shape=(sizes.num_experts, hidden))
        for expert in range(sizes.num_experts):
            yield from _list_mlp(f"{prefix}.mlp.experts.{expert}", hidden, sizes.expert_size)
    yield Tensor(name="model.norm.weight", shape=(hidden,), is_norm=True)
    if not sizes.is_tied:
        yield Tensor(name="lm_head.weight", shape=(sizes.vocab_size, hidden))


def _list_glm_layer(prefix: str, sizes: Sizes) -> Iterator[Tensor]:
    """Yield the tensors of transformers' Glm4DecoderLayer: biases in attention, norms on both sides of each part."""
    hidden, heads, groups = sizes.hidden_size, sizes.num_heads * sizes.head_dim, sizes.num_groups * sizes.head_dim
    for norm in ("input", "post_attention", "post_self_attn", "post_mlp"):
        yield Tensor(name=f"{prefix}.{norm}_layernorm.weight", shape=(hidden,), is_norm=True)
    for name, size in (("q", heads), ("k", groups), ("v", groups)):
        yield Tensor(name=f"{prefix}.self_attn.{name}_proj.weight", shape=(size, hidden))
        yield Tensor(name=f"{prefix}.self_attn.{name}_proj.bias", shape=(size,))
    yield Tensor(name=f"{prefix}.self_attn.o_proj.weight", shape=(hidden, heads))
    yield Tensor(name=f"{prefix}.mlp.gate_up_proj.weight", shape=(2 * sizes.intermediate_size, hidden))
    yield Tensor(name=f"{prefix}.mlp.down_proj.weight", shape=(hidden, sizes.intermediate_size))


def _list_mlp(prefix: str, hidden: int, intermediate: int) -> Iterator[Tensor]:
    for name in ("gate_proj", "up_proj"):
        yield Tensor(name=f"{prefix}.{name}.weight", shape=(intermediate, hidden))
    yield Tensor(name=f"{prefix}.down_proj.weight", shape=(hidden, intermediate))


def weights_bytes(sizes: Sizes) -> int:
    return sum(tensor.num_bytes for tensor in list_tensors(sizes))


def recipe(model: VimeModel) -> dict[str, Any]:
    assert isinstance(model.source, RandomWeights)
    sizes = {name: value for name, value in Sizes.of(model).__dict__.items() if name != "is_glm"}
    return {"recipe": RECIPE, **model.source.model_dump(), "sizes": sizes}


def write_model(model: VimeModel, folder: Path) -> None:
    source, sizes = model.source, Sizes.of(model)
    assert isinstance(source, RandomWeights)
    for name, content in tokenizer_files().items():
        write_bytes(folder / name, dump_json(content))
    write_bytes(folder / CONFIGURATION, dump_json(make_config(source, sizes)))
    generation = {"do_sample": True, "eos_token_id": END_OF_TURN, "pad_token_id": PADDING}
    write_bytes(folder / "generation_config.json", dump_json(generation))
    write_weights(folder / WEIGHTS, sizes, seed=source.seed, std=source.initializer_range)


def make_config(source: RandomWeights, sizes: Sizes) -> dict[str, Any]:
    config = {
        "architectures": [source.architecture],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": PADDING,
        "eos_token_id": END_OF_TURN,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden_size,
        "initializer_range": source.initializer_range,
        "intermediate_size": sizes.intermediate_size,
        "max_position_embeddings": 32768,
        "model_type": _MODEL_TYPES[source.architecture],
        "num_attention_heads": sizes.num_heads,
        "num_hidden_layers": sizes.num_layers,
        "num_key_value_heads": sizes.num_groups,
        "rms_norm_eps": sizes.norm_epsilon,
        "rope_scaling": None,
        "rope_theta": sizes.rotary_base,
        "sliding_window": None,
        "tie_word_embeddings": sizes.is_tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": sizes.vocab_size,
    }
    if sizes.is_glm:
        config |= {"attention_bias": True, "partial_rotary_factor": 0.5, "pad_token_id": PADDING}
    if sizes.num_experts:
        config |= {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": sizes.expert_size,
            "norm_topk_prob": True,
            "num_experts": sizes.num_experts,
            "num_experts_per_tok": sizes.num_experts_per_token,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.0,
        }
    return config


def write_weights(path: Path, sizes: Sizes, *, seed: int, std: float) -> None:
    """Write a safetensors file, with a process on each processor, of which each writes every n-th piece."""
    header, tables = make_header(list_tensors(sizes)), _quantile_tables(std)
    path.write_bytes(header)
    number = max(1, min(len(os.sched_getaffinity(0)), weights_bytes(sizes) // _WORTH_A_PROCESS))

    def write_share(share: int) -> int:
        try:
            with path.open("r+b") as stream:
                for tensor, piece, size, offset in itertools.islice(_list_pieces(sizes), share, None, number):
                    stream.seek(len(header) + offset)
                    stream.write(_draw(tensor, piece, size, seed, tables))
        except OSError as error:
            return error.errno or 1
        return 0

    if code := next(filter(None, run_shares(number, write_share)), 0):
        got = os.strerror(code) if code > 0 else signal.Signals(-code).name
        raise EnvironmentMissing(Problem(str(path), "not all weights were written", got=got))


def _list_pieces(sizes: Sizes) -> Iterator[tuple[Tensor, int, int, int]]:
    """Yield for each piece its tensor, its number there, its number of weights, and its offset in bytes."""
    offset = 0
    for tensor in list_tensors(sizes):
        num_weights = math.prod(tensor.shape)
        for piece, first in enumerate(range(0, num_weights, _BLOCK)):
            yield tensor, piece, min(_BLOCK, num_weights - first), offset + _BYTES_PER_WEIGHT * first
        offset += tensor.num_bytes


def make_header(tensors: Iterable[Tensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        header[tensor.name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _draw(tensor: Tensor, number: int, size: int, seed: int, tables: tuple[bytes, bytes]) -> bytes:
    if tensor.is_norm:
        return _bfloat16(1.0) * size
    levels = hashlib.shake_256(f"{seed}/{tensor.name}/{number}".encode()).digest(size)
    drawn = bytearray(_BYTES_PER_WEIGHT * size)
    drawn[0::2], drawn[1::2] = (levels.translate(table) for table in tables)
    return bytes(drawn)


def _quantile_tables(std: float) -> tuple[bytes, bytes]:
    """Each of the 256 possible weights is the middle of one of 256 equally probable parts of a normal distribution."""
    normal = NormalDist(sigma=std)
    values = [_bfloat16(normal.inv_cdf((level + 0.5) / 256)) for level in range(256)]
    return bytes(value[0] for value in values), bytes(value[1] for value in values)


def _bfloat16(value: float) -> bytes:
    """Return little-endian bfloat16, rounded to nearest; ties go to the even number."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    bits += 0x7FFF + ((bits >> 16) & 1)
    return struct.pack("<H", bits >> 16)


def tokenizer_files() -> dict[str, dict[str, Any]]:
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    vocabulary |= {text: token_id for token_id, text in _MARKS.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _MARKS[END_OF_TURN],
        "pad_token": _MARKS[PADDING],
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
        "chat_template": _TEMPLATE,
    }
    return {"tokenizer.json": _make_tokenizer(vocabulary), "tokenizer_config.json": config}


def _make_tokenizer(vocabulary: Mapping[str, int]) -> dict[str, Any]:
    flags = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token_id, "content": text, **flags} for token_id, text in _MARKS.items()],
        "normalizer": None,
        "pre_tokenizer": _BYTE_LEVEL,
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    """Return the character for each byte, as in https://github.com/openai/gpt-2/blob/master/src/encoder.py."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters = []
    num_others = 0
    for byte in range(256):
        characters.append(chr(byte if byte in printable else 256 + num_others))
        num_others += byte not in printable
    return characters
