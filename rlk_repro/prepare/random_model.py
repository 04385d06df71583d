"""Make a Qwen3 model with random weights in the hub's format: configuration, byte tokenizer, one safetensors file.

The arguments and the seed determine the bytes on every machine: SHAKE-256 chooses one of 256 quantiles of a normal
distribution for each weight.  Each piece of a tensor is drawn alone, so several processes can write one file.

https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import signal
import struct
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final

from rlk_repro.base.disk import writing
from rlk_repro.base.errors import EnvironmentMissing, Problem, SpecError
from rlk_repro.base.files import dump_json, write_bytes
from rlk_repro.base.guard import PR_SET_PDEATHSIG
from rlk_repro.base.proc import isolate
from rlk_repro.prepare.byte_tokenizer import END_OF_TURN, PADDING, VOCABULARY, tokenizer_files
from rlk_repro.spec import VimeModel
from rlk_repro.spec.assets import RandomWeights

RECIPE: Final = 1
"""Increase this version when the same settings no longer give the same bytes."""
WEIGHTS: Final = "model.safetensors"
CONFIGURATION: Final = "config.json"
_BLOCK: Final = 4 << 20
_BYTES_PER_WEIGHT: Final = 2
# Starting a process takes as long as drawing this many bytes of weights in one process.
_WORTH_A_PROCESS: Final = 64 << 20
_LOCKS: Final = Path("/dev/shm")  # noqa: S108  (there the processes' locks are; named in errors only)
_MOST_PROCESSES: Final = 32
_MODEL_TYPES: Final = {"Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe"}


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

    @classmethod
    def of(cls, model: VimeModel) -> Sizes:
        """Read the sizes; raise SpecError if a size is missing or the vocabulary is too small for the tokenizer."""
        arguments = model.arguments
        has_experts = isinstance(model.source, RandomWeights) and model.source.architecture == "Qwen3MoeForCausalLM"
        needed = ["num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "kv-channels", "vocab-size"]
        needed += ["num-experts", "moe-ffn-hidden-size", "moe-router-topk"] if has_experts else []
        problems = [
            Problem(f"workload.model.arguments.{flag}", "missing", expected="a size of the random model")
            for flag in needed
            if not model.size(flag)
        ]
        if model.size("vocab-size", VOCABULARY) < VOCABULARY:
            problems.append(Problem("workload.model.arguments.vocab-size", "is too small for the byte tokenizer",
                                    got=model.size("vocab-size"), expected=f"{VOCABULARY} or more"))  # fmt: skip
        if problems:
            raise SpecError(*problems)
        return cls(
            num_layers=model.size("num-layers"),
            hidden_size=model.size("hidden-size"),
            intermediate_size=model.size("ffn-hidden-size"),
            num_heads=model.size("num-attention-heads"),
            num_groups=model.size("num-query-groups", model.size("num-attention-heads")),
            head_dim=model.size("kv-channels"),
            vocab_size=model.size("vocab-size"),
            norm_epsilon=_number(arguments, "norm-epsilon", 1e-6),
            rotary_base=_number(arguments, "rotary-base", 10000.0),
            is_tied=not arguments.get("untie-embeddings-and-output-weights", False),
            num_experts=model.size("num-experts") if has_experts else 0,
            expert_size=model.size("moe-ffn-hidden-size"),
            num_experts_per_token=model.size("moe-router-topk"),
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


def _list_mlp(prefix: str, hidden: int, intermediate: int) -> Iterator[Tensor]:
    for name in ("gate_proj", "up_proj"):
        yield Tensor(name=f"{prefix}.{name}.weight", shape=(intermediate, hidden))
    yield Tensor(name=f"{prefix}.down_proj.weight", shape=(hidden, intermediate))


def weights_bytes(sizes: Sizes) -> int:
    return sum(tensor.num_bytes for tensor in list_tensors(sizes))


def recipe(model: VimeModel) -> dict[str, Any]:
    assert isinstance(model.source, RandomWeights)
    return {"recipe": RECIPE, **model.source.model_dump(), "sizes": Sizes.of(model).__dict__}


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


@dataclass(frozen=True)
class Piece:
    tensor: Tensor
    number: int
    size: int
    offset: int


def write_weights(path: Path, sizes: Sizes, *, seed: int, std: float, num_processes: int | None = None) -> None:
    """Write a safetensors file; raise EnvironmentMissing if a process that generates weights ended early."""
    start = make_header(list_tensors(sizes))
    path.write_bytes(start)
    write = partial(_write_piece, path, seed, _quantile_tables(std))
    pieces = list(_list_pieces(sizes, len(start)))
    most = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES, weights_bytes(sizes) // _WORTH_A_PROCESS)
    if (num_processes or most) < 2:
        for piece in pieces:
            write(piece)
        return
    os.environ.update(isolate(os.environ))  # the workers of multiprocessing inherit it
    try:
        with writing(_LOCKS, hint="make it writable, or use one processor: taskset --cpu-list 0 rlk-repro prepare …"):
            made = ProcessPoolExecutor(num_processes or most, get_context("spawn"), _end_with, (os.getpid(),))
        with made as pool:
            for _ in pool.map(write, pieces, chunksize=8):
                pass
    except BrokenProcessPool:
        raise EnvironmentMissing(
            Problem(str(path), "a process that generates weights ended early", expected="40 MiB of memory for each CPU",
                    hint="read the messages above, or prepare the model on a machine with more memory")
        ) from None  # fmt: skip


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


def _end_with(parent: int) -> None:
    """Let this worker end with its parent, and let it ignore SIGINT, which the parent handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before this call
        os._exit(1)


def _list_pieces(sizes: Sizes, offset: int) -> Iterator[Piece]:
    for tensor in list_tensors(sizes):
        num_weights = math.prod(tensor.shape)
        for number, first in enumerate(range(0, num_weights, _BLOCK)):
            piece = Piece(tensor, number, min(_BLOCK, num_weights - first), offset)
            yield piece
            offset += _BYTES_PER_WEIGHT * piece.size


def _write_piece(path: Path, seed: int, tables: tuple[bytes, bytes], piece: Piece) -> None:
    with path.open("r+b") as stream:
        stream.seek(piece.offset)
        stream.write(_draw(piece, seed, tables))


def _draw(piece: Piece, seed: int, tables: tuple[bytes, bytes]) -> bytes:
    if piece.tensor.is_norm:
        return _bfloat16(1.0) * piece.size
    levels = hashlib.shake_256(f"{seed}/{piece.tensor.name}/{piece.number}".encode()).digest(piece.size)
    drawn = bytearray(_BYTES_PER_WEIGHT * piece.size)
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
