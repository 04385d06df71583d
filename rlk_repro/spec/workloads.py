"""The kinds of workload that a run can name, each with its settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from rlk_repro.spec.values import (
    Count,
    GrowingModel,
    KlLossType,
    Lane,
    Model,
    Name,
    NonNegative,
    PathProblem,
    PinName,
    Positive,
    Text,
)


class ReferenceModel(Model):
    """Sizes of the reference trainer's decoder, named like vime's flags."""

    num_layers: Count = 2
    hidden_size: Count = 64
    num_attention_heads: Count = 4
    num_query_groups: Count = 2
    kv_channels: Count = 16
    ffn_hidden_size: Count = 128
    vocab_size: Annotated[int, Field(ge=16, le=10**7)] = 64
    untie_embeddings_and_output_weights: bool = False
    rotary_base: Positive = 10000.0
    norm_epsilon: Positive = 1e-6
    dtype: Literal["float32", "bfloat16"] = "float32"


class ReferenceTask(Model):
    """The arithmetic task that the reference trainer generates."""

    kind: Literal["addition"] = "addition"
    max_operand: Count = 9


class PolicyLoss(Model):
    """The settings that decide which loss is computed and how often, named like vime's flags."""

    num_steps_per_rollout: Count = Field(1, description="optimizer steps per rollout")
    rollout_temperature: Positive = 1.0
    use_kl_loss: bool = True
    kl_loss_coef: NonNegative = 0.0
    kl_loss_type: KlLossType = "low_var_kl"
    eps_clip: Positive = 0.2
    eps_clip_high: Positive = 0.28
    entropy_coef: NonNegative = 0.0
    log_probs_chunk_size: Annotated[int, Field(ge=-1, le=10**9)] = -1
    calculate_per_token_loss: bool = False


class Grpo(PolicyLoss):
    """GRPO settings, named like vime's flags."""

    rollout_batch_size: Count = Field(8, description="prompts per rollout")
    n_samples_per_prompt: Annotated[int, Field(ge=2, le=10**6)] = Field(8, description="samples per prompt")
    micro_batch_size: Count = 32
    rollout_max_response_len: Count = 8
    lr: Positive = 1e-3
    weight_decay: NonNegative = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.98
    clip_grad: NonNegative = 1.0

    @property
    def num_samples(self) -> int:
        return self.rollout_batch_size * self.n_samples_per_prompt


class AnyWorkload(GrowingModel):
    """What plan and analysis need to know about every kind of workload.

    ``lane_limit`` is the reason why only ``lanes`` are allowed.  Without ``has_output_layer`` there is no model, and
    logits are random.  The trainer needs the Python modules in ``modules``; before the first trial a child process
    imports the modules in ``imports``.  With ``needs_prepared`` the trials read files of ``rlk-repro prepare``.  A kind
    may have settings ``what_for`` and ``grpo``, which the functions here read.
    """

    lanes: ClassVar[tuple[Lane, ...]]
    lane_limit: ClassVar[str]
    has_variants: ClassVar[bool] = True
    trainer: ClassVar[str] = "vime"
    has_output_layer: ClassVar[bool] = True
    modules: ClassVar[tuple[str, ...]] = ("torch",)
    imports: ClassVar[tuple[str, ...]] = ()
    needs_prepared: ClassVar[bool] = False

    @property
    def purpose(self) -> str:
        """What a run is for; only ``timing`` measures speed."""
        return str(getattr(self, "what_for", "timing"))

    @property
    def is_timed(self) -> bool:
        return self.purpose == "timing"

    @property
    def compares_engines(self) -> bool:
        """Whether the run compares what training and rollout engines compute, and measures no time."""
        return self.purpose == "agreement"

    @property
    def fills_memory(self) -> bool:
        """Whether the run's samples grow until a microbatch no longer fits in memory, and the run measures no time."""
        return self.purpose == "largest-microbatch"

    @property
    def packed_rollouts(self) -> str | None:
        return None

    def has_rollout_log_probs(self, lane: Lane) -> bool:  # noqa: ARG002
        """Whether the trainer gets a rollout engine's log-probs to compare with its own."""
        return True

    @property
    def num_steps_per_rollout(self) -> int:
        loss: PolicyLoss | None = getattr(self, "grpo", None)
        return 1 if loss is None else loss.num_steps_per_rollout

    @property
    def loss_options(self) -> dict[str, Any]:
        """The settings that decide which operators may run, in vime's argument names."""
        loss: PolicyLoss | None = getattr(self, "grpo", None)
        return {} if loss is None else loss.model_dump()

    @property
    def patched_pins(self) -> frozenset[PinName]:
        """The pinned sources to which upstream's own patch must be applied for this workload."""
        return frozenset()

    def gpus_per_engine(self, hardware: str) -> int:  # noqa: ARG002
        """Return how many GPUs one inference server uses (their numbers are consecutive); 0 without servers."""
        return 0

    def find_problems(self) -> Iterator[PathProblem]:
        """Find impossible combinations of the workload's settings; each path begins below the key ``workload``."""
        yield from ()


class ReferenceWorkload(AnyWorkload):
    """The reference trainer for smoke runs, first machine tests and automated tests; it does not measure vime."""

    lanes = ("live", "train-only")
    trainer = "the trainer"
    lane_limit = "the reference trainer has no inference server, which lane fixed-rollout needs"
    added_later = frozenset({"what_for"})

    kind: Literal["reference"]
    what_for: Literal["timing", "agreement"] = Field(
        "timing", description="agreement: compare what the engines compute for the same tokens, and measure no time"
    )
    model: ReferenceModel = ReferenceModel()
    task: ReferenceTask = ReferenceTask()
    grpo: Grpo = Grpo()
    num_threads: Annotated[int, Field(ge=1, le=512)] = Field(1, description="CPU threads of a trainer")

    def find_problems(self) -> Iterator[PathProblem]:
        grpo, model = self.grpo, self.model
        if grpo.num_samples % grpo.num_steps_per_rollout:
            path = ("grpo", "num_steps_per_rollout")
            expected = f"a divisor of {grpo.num_samples}"
            yield path, "does not divide the samples of a rollout", grpo.num_steps_per_rollout, expected
        if model.num_attention_heads % model.num_query_groups:
            path = ("model", "num_query_groups")
            expected = f"a divisor of {model.num_attention_heads}"
            yield path, "does not divide the attention heads", model.num_query_groups, expected
        if model.kv_channels % 2:
            yield ("model", "kv_channels"), "rotary embedding needs an even size", model.kv_channels, "an even number"


class ModuleLoss(PolicyLoss):
    """The settings of vime's policy loss, named like vime's flags."""

    advantage_estimator: Literal["grpo", "gspo", "cispo"] = "grpo"
    use_unbiased_kl: bool = False
    use_tis: bool = False


class ModuleBatch(Model):
    """The random batches of a module run; a microbatch packs the tokens of all its samples one after another."""

    num_samples: Count = Field(16, description="samples per microbatch")
    num_tokens: Count = Field(9216, description="tokens of prompts and responses in one packed microbatch")
    prompt_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.25, description="share of the prompt in a sample's tokens; prompt and response have at least one token each"
    )
    num_microbatches: Count = Field(1, description="microbatches per optimizer step")
    vocab_size: Annotated[int, Field(ge=16, le=10**7)] = Field(
        description="vocabulary size before padding to a multiple of 128 x tensor parallel"
    )


class ModuleWorkload(AnyWorkload):
    """vime's own log-prob and policy loss functions on random packed batches; no model, no optimizer, no rollouts."""

    lanes = ("train-only",)
    lane_limit = "the module tier makes its batches itself"
    has_output_layer = False
    modules = ("torch", "vime", "megatron")
    imports = ("vime.backends.megatron_utils.loss",)

    kind: Literal["module"]
    model: Text = Field(description="name of the model with this vocabulary size, for reports")
    grpo: ModuleLoss = ModuleLoss()
    batch: ModuleBatch
    lead_ms: Annotated[float, Field(ge=0, le=10000)] = Field(
        30.0,
        description="milliseconds that the device is kept busy before each pass, so that the host issues kernels ahead "
        "of the device, as in training. With 0, the time of a pass includes the device's waits for the host",
    )

    def find_problems(self) -> Iterator[PathProblem]:
        if self.batch.num_tokens < 2 * self.batch.num_samples:
            what, expected = "allows fewer than two tokens per sample", f"at least {2 * self.batch.num_samples}"
            yield ("batch", "num_tokens"), what, self.batch.num_tokens, expected


OperatorName: TypeAlias = Literal["logp", "ratio_kl", "grpo_loss", "linear_logp"]
Shape: TypeAlias = Annotated[tuple[Count, ...], Field(min_length=1)]
Density: TypeAlias = Annotated[float, Field(gt=0, le=1)]


class Grid(Model):
    """The cases of one operator: every combination of these values."""

    operator: OperatorName
    num_tokens: Shape
    vocab_size: Shape
    hidden_size: tuple[Count, ...] = Field((), description="hidden size, for linear_logp only")
    dtypes: Annotated[tuple[Literal["float32", "bfloat16", "float16"], ...], Field(min_length=1)] = ("float32",)
    densities: Annotated[tuple[Density, ...], Field(min_length=1)] = Field(
        (1.0,), description="share of the rows that the loss uses"
    )
    passes: Annotated[tuple[Literal["forward", "forward_backward"], ...], Field(min_length=1)] = ("forward",)


class OperatorsWorkload(AnyWorkload):
    """Time single operators: each implementation in each case; one sweep over all cases counts as one rollout."""

    lanes = ("train-only",)
    lane_limit = "the operator tier has no rollouts"
    has_variants = False

    kind: Literal["operators"]
    grids: Annotated[tuple[Grid, ...], Field(min_length=1)]
    implementations: tuple[Name, ...] = Field(
        (), description="implementations to measure; default: all that serve the operator"
    )
    warmup_calls: Annotated[int, Field(ge=0, le=10**6)] = Field(
        3, description="untimed calls of an implementation in a case before the timed calls"
    )
    timed_calls: Count = Field(20, description="timed calls per implementation, case and sweep")
    oracle_rows: Count = Field(64, description="number of rows of a case that are checked against float64")
    memory_limit_gib: Positive | None = Field(
        None, description="memory limit; cases that need more are reported as blocked"
    )

    def find_problems(self) -> Iterator[PathProblem]:
        for index, grid in enumerate(self.grids):
            if bool(grid.hidden_size) is not (grid.operator == "linear_logp"):
                expected = "one size or more" if grid.operator == "linear_logp" else "none"
                got = list(grid.hidden_size)
                yield ("grids", str(index), "hidden_size"), f"does not fit {grid.operator}", got, expected
