"""The settings of the workload ``vime``: vime's own ``train.py``, end to end.

A field that sets one flag of vime has the flag's name; ``arguments`` holds further flags.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field

from rlk_repro.spec.assets import Checkpoint, DataSource, ModelSource, StoredRollouts
from rlk_repro.spec.layers import is_layer_pattern
from rlk_repro.spec.values import (
    UNSEEN,
    Count,
    EnvValue,
    Lane,
    Model,
    Name,
    NonNegative,
    PathProblem,
    PinName,
    Positive,
    Seed,
    Text,
    Word,
)
from rlk_repro.spec.workloads import AnyWorkload, PolicyLoss

Flag: TypeAlias = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=80)]
"""A flag without its dashes, such as ``num-layers``."""
ArgumentText: TypeAlias = Annotated[str, Field(pattern=rf"^([^-{UNSEEN}]|-[0-9.])[^{UNSEEN}]*$", max_length=2000)]
"""A value of a flag; a value may begin with a dash only if it is a number."""
Scalar: TypeAlias = bool | int | float | ArgumentText
Arguments: TypeAlias = dict[Flag, Scalar | tuple[Scalar, ...]]
"""Flags and values: True is a bare flag, a list is a flag with several values.  To switch a flag off, leave it out."""
DottedPath: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$", max_length=200)]
Fraction: TypeAlias = Annotated[float, Field(gt=0, lt=1)]


class VimeModel(Model):
    """A model: where it comes from and the arguments that build it in Megatron (upstream's ``scripts/models``)."""

    title: Text = Field(description="name of the model, for reports")
    source: ModelSource
    checkpoint: Checkpoint = "torch_dist"
    recipe: Annotated[str, Field(pattern=r"^scripts/[\w./-]+\.sh$", max_length=200)] | None = Field(
        None, description="file of vime from whose MODEL_ARGS the arguments are copied"
    )
    arguments: Arguments

    def size(self, flag: str, default: int = 0) -> int:
        """Return the whole number that follows this flag in the arguments, otherwise ``default``."""
        value = self.arguments.get(flag, default)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    @property
    def num_experts(self) -> int:
        return self.size("num-experts")


class VimeData(Model):
    """Prompts and the reward that scores their answers."""

    source: DataSource
    input_key: Word = "prompt"
    label_key: Word = "label"
    apply_chat_template: bool = True
    rm_type: Name | None = Field(None, description="name of one of vime's own rewards")
    custom_rm_path: DottedPath | None = Field(
        None, description="path of a Python function that computes the reward, instead of rm_type"
    )


class VimeGrpo(PolicyLoss):
    """GRPO settings, named like vime's flags."""

    advantage_estimator: Literal["grpo", "gspo", "cispo"] = "grpo"
    rollout_batch_size: Count = Field(description="prompts per rollout")
    n_samples_per_prompt: Annotated[int, Field(ge=2, le=10**6)] = Field(description="samples per prompt")
    global_batch_size: Count = Field(description="samples per optimizer step")
    rollout_max_prompt_len: Count = Field(1024, description="prompts longer than this are left out of the data set")
    rollout_max_response_len: Count
    rollout_top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    use_tis: bool = False
    use_unbiased_kl: bool = False
    use_rollout_routing_replay: bool = Field(False, description="whether both variants use routing replay (R3)")
    lr: Positive = 1e-6
    weight_decay: NonNegative = 0.1
    adam_beta1: Fraction = 0.9
    adam_beta2: Fraction = 0.98
    clip_grad: NonNegative = 1.0

    @property
    def num_samples(self) -> int:
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def max_sample_len(self) -> int:
        return self.rollout_max_prompt_len + self.rollout_max_response_len


class Placement(Model):
    """How a run uses one kind of hardware; the run's layout has the number of nodes and most parallel sizes."""

    rollout_num_gpus: Annotated[int, Field(ge=0, le=10**5)] = Field(
        0,
        description="GPUs for the inference engines alone; 0: the engines share all GPUs with the training (colocate)",
    )
    rollout_num_gpus_per_engine: Count = 1
    expert_tensor_parallel: Count = 1
    sequence_parallel: bool = False
    max_tokens_per_gpu: Count = Field(9216, description="largest number of tokens in a packed microbatch")
    vllm_gpu_memory_utilization: Fraction = 0.7
    recompute: bool = Field(True, description="whether to recompute all activations, layer by layer")
    optimizer_cpu_offload: bool = Field(False, description="whether to keep the optimizer's state in host memory")
    offload: bool = Field(
        True, description="whether training and inference, if colocated, free the GPU's memory for each other"
    )
    arguments: Arguments = Field({}, description="further flags that this hardware needs")
    env: dict[Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$", max_length=100)], EnvValue] = Field({})


Purpose: TypeAlias = Literal["timing", "agreement", "deterministic", "profiler", "memory-history", "largest-microbatch"]
"""The purpose of a run of vime; a run has one purpose, and only ``timing`` measures speed.

``deterministic`` asks vime and vLLM for bitwise equal results, ``agreement`` also records what the engines compute for
the same tokens, ``profiler`` records a trace of three steps, and
``largest-microbatch`` trains longer and longer samples until a microbatch no longer fits in the GPU's memory.
Only plans of earlier versions have ``memory-history``.
"""


class VimeWorkload(AnyWorkload):
    """vime's own trainer on Ray, with vime's options; trials of lanes live and fixed-rollout use inference servers."""

    lanes = ("live", "fixed-rollout", "train-only")
    lane_limit = "vime has three lanes"
    modules = ("torch", "vime", "megatron", "ray")
    needs_prepared = True
    added_later = frozenset({"rollouts_seed", "rollouts_growth"})

    kind: Literal["vime"]
    what_for: Purpose = "timing"
    model: VimeModel
    data: VimeData
    grpo: VimeGrpo
    rollouts: StoredRollouts | None = Field(
        None,
        description="stored rollouts for lanes fixed-rollout and train-only; default: the run stores its own",
    )
    rollouts_seed: Seed | None = Field(
        None, description="seed from which prepare makes rollouts of random tokens at full length, without an engine"
    )
    rollouts_growth: Count | None = Field(
        None,
        description="tokens by which the samples of each rollout exceed those of the rollout before, in a run with "
        "what_for: largest-microbatch; the last rollout's samples have the full length",
    )
    placements: Annotated[dict[Name, Placement], Field(min_length=1, max_length=100)] = Field(
        description="GPUs and memory settings for each hardware named in layouts"
    )
    arguments: Arguments = Field({}, description="further flags of both variants")

    @property
    def loss_options(self) -> dict[str, Any]:
        named = {name.replace("-", "_"): value for name, value in self.arguments.items()}
        options = named | self.grpo.model_dump()
        options["use_routing_replay"] = self.grpo.use_rollout_routing_replay or bool(named.get("use_routing_replay"))
        options["mtp_num_layers"] = self.model.size("mtp-num-layers")
        return options

    @property
    def patched_pins(self) -> frozenset[PinName]:
        return frozenset({"megatron_lm"} if self.grpo.use_rollout_routing_replay else ())

    def generates(self, lane: Lane) -> bool:
        """Whether the run starts inference servers; lane train-only needs them only to store its own rollouts."""
        return lane != "train-only" or (self.rollouts is None and self.rollouts_seed is None)

    def has_rollout_log_probs(self, lane: Lane) -> bool:
        return lane == "live" or self.rollouts_seed is None

    @property
    def packed_rollouts(self) -> str | None:
        return self.rollouts.name if self.rollouts is not None and self.rollouts.is_packed else None

    def gpus_per_engine(self, hardware: str) -> int:
        return self.placements[hardware].rollout_num_gpus_per_engine

    def find_problems(self) -> Iterator[PathProblem]:
        yield from _find_batch_problems(self.grpo)
        yield from _find_data_problems(self.data)
        yield from _find_size_problems(self.model)
        if self.rollouts is not None and self.rollouts_seed is not None:
            what = "contradicts the key `rollouts`, which is also set"
            yield ("rollouts_seed",), what, self.rollouts_seed, "rollouts or rollouts_seed"
        if (self.rollouts_growth is None) is self.fills_memory:
            expected = "what_for: largest-microbatch with rollouts_growth, or neither"
            yield ("rollouts_growth",), f"does not fit what_for: {self.what_for}", self.rollouts_growth, expected
        if self.rollouts_growth is not None and self.rollouts_seed is None:
            yield ("rollouts_growth",), "needs rollouts_seed, which is missing", self.rollouts_growth, "a rollouts_seed"
        for place, arguments in self.all_arguments():
            yield from _find_argument_problems(place, arguments)
        if self.grpo.use_rollout_routing_replay and not self.model.num_experts:
            path = ("grpo", "use_rollout_routing_replay")
            yield path, "needs experts, but the model is dense", True, "false, or a model with num-experts"

    def all_arguments(self) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
        """Yield each map of flags in the run's file, with its path in the file."""
        yield MODEL, self.model.arguments
        yield ("arguments",), self.arguments
        for name, placement in self.placements.items():
            yield ("placements", name, "arguments"), placement.arguments

    def arguments_on(self, hardware: str) -> Arguments:
        """Return the run's flags except the model's; flags of the hardware's placement replace flags of the run."""
        return {**self.arguments, **self.placements[hardware].arguments}


def _find_batch_problems(grpo: VimeGrpo) -> Iterator[PathProblem]:
    num_steps = grpo.num_steps_per_rollout
    if grpo.num_samples % num_steps:
        expected = f"a divisor of {grpo.num_samples}"
        yield ("grpo", "num_steps_per_rollout"), "does not divide the samples of a rollout", num_steps, expected
    elif grpo.global_batch_size != grpo.num_samples // num_steps:
        what = "is not rollout_batch_size x n_samples_per_prompt / num_steps_per_rollout"
        yield ("grpo", "global_batch_size"), what, grpo.global_batch_size, str(grpo.num_samples // num_steps)
    if grpo.global_batch_size % grpo.n_samples_per_prompt:
        expected = f"a multiple of {grpo.n_samples_per_prompt}"
        yield ("grpo", "global_batch_size"), "splits the samples of a prompt", grpo.global_batch_size, expected


def _find_data_problems(data: VimeData) -> Iterator[PathProblem]:
    if (data.rm_type is None) is (data.custom_rm_path is None):
        what, expected = "the reward is missing or given twice", "either rm_type or custom_rm_path"
        yield ("data", "rm_type"), what, data.rm_type, expected


MODEL: Final = ("model", "arguments")
LAYER_PATTERN: Final = "moe-layer-freq"
SIZES: Final = ("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "vocab-size", "normalization")
"""Flags that every model must give; if one is missing, Megatron-LM uses its own default or fails after minutes."""
LARGEST: Final[Mapping[str, int]] = {"num-layers": 10**4, "num-experts": 10**5}
LARGEST_NUMBER: Final = 10**9
"""Megatron-LM accepts any number, so these limits, far above any real model, catch typing errors."""


def _find_size_problems(model: VimeModel) -> Iterator[PathProblem]:
    for flag in SIZES:
        if flag not in model.arguments:
            yield MODEL, f"{flag} is missing", sorted(model.arguments), f"{flag} too"
    heads, groups = model.size("num-attention-heads"), model.size("num-query-groups", 1)
    if heads > 0 and groups > 0 and heads % groups:
        yield (*MODEL, "num-query-groups"), "does not divide num-attention-heads", groups, f"a divisor of {heads}"
    pattern = model.arguments.get(LAYER_PATTERN)
    if pattern is not None and not is_layer_pattern(pattern, model.size("num-layers")):
        expected = "a whole number of at least 1, or a pattern of all layers such as [0]*1+[1]*45"
        yield (*MODEL, LAYER_PATTERN), "is not a pattern of the model's layers", pattern, expected
    chosen = model.size("moe-router-topk")
    if chosen > model.num_experts > 0:
        yield (*MODEL, "moe-router-topk"), "exceeds the number of experts", chosen, f"at most {model.num_experts}"


def _find_argument_problems(place: tuple[str, ...], arguments: Mapping[str, Any]) -> Iterator[PathProblem]:
    for flag, value in arguments.items():
        values = value if isinstance(value, tuple) else (value,)
        if False in [item for item in values if isinstance(item, bool)]:
            yield (*place, flag), "cannot switch a flag off", value, "true, or this key left out"
        elif place == MODEL and isinstance(value, int | float):
            low, high = int(flag in SIZES), LARGEST.get(flag, LARGEST_NUMBER)
            if not low <= value <= high:
                yield (*place, flag), "is out of range", value, f"{low} to {high}"
