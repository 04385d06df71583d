"""What authors write: run, stack, hardware and profile as strict, frozen models.  Loading them is specfile's business.

Every model refuses unknown keys and converts nothing.  Rules that tie several values together are in ``run_problems``;
they return paths, so that errors can name the line.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from rlk_repro.operators import OPERATORS, find_conflicts

SCHEMA: Final = 1

Text: TypeAlias = Annotated[str, Field(min_length=1, max_length=2000)]
Name: TypeAlias = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]*[a-z0-9])?$", max_length=40)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=10**9)]
NonNegative: TypeAlias = Annotated[float, Field(ge=0, le=1e12)]
Positive: TypeAlias = Annotated[float, Field(gt=0, le=1e12)]
Commit: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Digest: TypeAlias = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
EnvName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=100)]
Schema: TypeAlias = Literal[1]
Lane: TypeAlias = Literal["live", "fixed-rollout", "train-only"]
Variant: TypeAlias = Literal["baseline", "enabled"]
Cluster: TypeAlias = Literal["local", "slurm", "k8s"]
Platform: TypeAlias = Literal["cpu", "cuda", "rocm"]
Mode: TypeAlias = Literal["auto", "require"]
KlLossType: TypeAlias = Literal["k1", "k2", "k3", "low_var_kl"]


class Model(BaseModel):
    """Base of everything an author writes."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Margins(Model):
    """How much worse the enabled variant may be shown to be before its speed does not count (docs/statistics.md)."""

    raw_reward: NonNegative = Field(0.01, description="absolute drop of the mean raw_reward")
    logprob_abs_diff_ratio: Positive = Field(1.05, description="ratio enabled / baseline of the mean abs diff")
    logprob_abs_diff_difference: NonNegative = Field(0.001, description="or this absolute difference")
    logprob_abs_diff_cap: Positive = Field(0.1, description="absolute cap, as in vime's own tests")
    peak_memory_ratio: Positive = Field(1.02, description="ratio enabled / baseline of peak device memory")
    response_length_pct: Positive = Field(2.0, description="difference of mean response length, both ways, percent")


class Measure(Model):
    """The measurement plan, fixed and hashed before the first trial."""

    pairs: Annotated[int, Field(ge=0, le=64)] = Field(6, description="pairs of one baseline and one enabled trial")
    control_pairs: Annotated[int, Field(ge=0, le=64)] = Field(0, description="pairs of two baseline trials")
    warmup_steps: Annotated[int, Field(ge=0, le=10000)] = Field(2, description="first rollouts of a trial, not scored")
    scored_steps: Count = Field(10, description="rollouts scored per trial")
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(1234, description="pair i uses seed + i")
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    smallest_effect_pct: Positive = Field(1.0, description="smallest change of step time worth a word")
    expected_pair_sd_pct: Positive = Field(2.0, description="assumed spread of pair effects, for the power estimate")
    max_dropped_fraction: Annotated[float, Field(ge=0, le=1)] = 0.2
    margins: Margins = Margins()


class RlKernel(Model):
    """How the enabled variant routes RL-Kernel in.  ``require`` refuses to start where an operator cannot run."""

    mode: Mode = "require"
    ops: Annotated[tuple[Name, ...], Field(min_length=1)] = ("logp", "ratio_kl")


class Layout(Model):
    """Nodes and parallel sizes on one hardware."""

    num_nodes: Annotated[int, Field(ge=1, le=4096)] = 1
    gpus_per_node: Annotated[int, Field(ge=0, le=72)] = 0
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    context_parallel: Count = 1
    expert_parallel: Count = 1


class ReferenceModel(Model):
    """Sizes of the reference trainer's decoder, in vime's flag names."""

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


class Grpo(Model):
    """GRPO settings, in vime's flag names."""

    rollout_batch_size: Count = Field(8, description="prompts per rollout")
    n_samples_per_prompt: Annotated[int, Field(ge=2, le=10**6)] = Field(8, description="samples per prompt")
    num_steps_per_rollout: Count = Field(1, description="optimizer steps per rollout")
    micro_batch_size: Count = 32
    rollout_max_response_len: Count = 8
    rollout_temperature: Positive = 1.0
    lr: Positive = 1e-3
    weight_decay: NonNegative = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.98
    clip_grad: NonNegative = 1.0
    use_kl_loss: bool = True
    kl_loss_coef: NonNegative = 0.0
    kl_loss_type: KlLossType = "low_var_kl"
    eps_clip: Positive = 0.2
    eps_clip_high: Positive = 0.28
    entropy_coef: NonNegative = 0.0
    log_probs_chunk_size: Annotated[int, Field(ge=-1, le=10**9)] = -1
    calculate_per_token_loss: bool = False

    @property
    def num_samples(self) -> int:
        return self.rollout_batch_size * self.n_samples_per_prompt


class ReferenceWorkload(Model):
    """The reference trainer: for smoke, bring-up and tests; never for claims about vime."""

    kind: Literal["reference"]
    model: ReferenceModel = ReferenceModel()
    task: ReferenceTask = ReferenceTask()
    grpo: Grpo = Grpo()
    num_threads: Annotated[int, Field(ge=1, le=512)] = Field(1, description="CPU threads of a trainer")


Workload: TypeAlias = ReferenceWorkload


class Run(Model):
    """A benchmark definition, ``jobs/<run>.yaml``."""

    schema_: Schema = Field(alias="schema", default=1)
    run: Name
    purpose: Text
    may_claim: tuple[Text, ...] = ()
    may_not_claim: tuple[Text, ...] = ()
    stack: Name
    lane: Lane
    expected_trial_minutes: dict[Name, Positive] = Field({}, description="of one trial with these steps, by hardware")
    time_limit_min: Positive = Field(30.0, description="of one trial")
    layouts: Annotated[dict[Name, Layout], Field(min_length=1)]
    measure: Measure = Measure()
    rl_kernel: RlKernel = RlKernel()
    workload: Workload


class Image(Model):
    """A container image by digest, never by tag alone."""

    reference: Text = Field(description="repository, without tag")
    digest: Digest


class Pin(Model):
    """A source repository at one commit."""

    repository: Text
    commit: Commit


class Stack(Model):
    """A named set of pins, ``manifests/stacks/<stack>.yaml``.  Without an image the run uses what the host has."""

    schema_: Schema = Field(alias="schema", default=1)
    stack: Name
    purpose: Text
    images: dict[Literal["cuda-amd64", "cuda-arm64", "rocm-amd64"], Image] = {}
    pins: dict[Literal["vime", "rl_kernel", "megatron_lm"], Pin] = {}


class Hardware(Model):
    """Facts of one hardware target, ``jobs/hardware/<name>.yaml``."""

    schema_: Schema = Field(alias="schema", default=1)
    hardware: Name
    title: Text
    platform: Platform
    machine: Literal["x86_64", "aarch64", "any"]
    gpus_per_node: Annotated[int, Field(ge=0, le=72)]
    gpu_memory_gib: NonNegative = Field(0.0, description="of one GPU, as its driver reports it")
    name_part: Annotated[str, Field(max_length=40)] = Field("", description="part of the name the driver reports")
    refused_name_parts: tuple[Text, ...] = Field((), description="products that look alike and are not this one")
    driver_floor: Annotated[str, Field(max_length=40)] = ""


class FromEnv(Model):
    """A value that only the submitting shell knows, by the name of its variable."""

    from_env: EnvName


class Preflight(Model):
    """What a finding does to the job, and the limits behind the findings."""

    min_free_disk_gib: NonNegative = 1.0
    min_free_memory_gib: NonNegative = 1.0
    on_blocking: Literal["stop", "continue"] = "stop"


class Profile(Model):
    """What one site needs."""

    schema_: Schema = Field(alias="schema", default=1)
    profile: Name
    cluster: Cluster
    purpose: Annotated[str, Field(max_length=2000)] = ""
    hardware: Name | None = Field(None, description="default hardware of this site")
    env: dict[EnvName, str | FromEnv] = Field({}, description="environment of the trainers")
    preflight: Preflight = Preflight()
    telemetry_interval_s: Annotated[float, Field(ge=0.05, le=3600)] = 1.0


PathProblem: TypeAlias = "tuple[tuple[str, ...], str, Any, str]"


def run_problems(run: Run) -> list[PathProblem]:
    """Combinations that no single field can refuse: (path, what is wrong, got, expected)."""
    return [*_operator_problems(run.rl_kernel), *_workload_problems(run.workload), *_run_problems(run)]


def _operator_problems(rl_kernel: RlKernel) -> list[PathProblem]:
    ops = rl_kernel.ops
    menu = f"one of {', '.join(OPERATORS)}"
    problems: list[PathProblem] = [
        (("rl_kernel", "ops", str(index)), "no such operator", op, menu)
        for index, op in enumerate(ops)
        if op not in OPERATORS
    ]
    if len(set(ops)) != len(ops):
        problems.append((("rl_kernel", "ops"), "operator named twice", list(ops), "each once"))
    if not problems:
        problems += [
            (("rl_kernel", "ops"), "two operators would serve the same call", list(pair), "one of them")
            for pair in find_conflicts(ops)
        ]
    return problems


def _workload_problems(workload: ReferenceWorkload) -> list[PathProblem]:
    grpo, model = workload.grpo, workload.model
    problems: list[PathProblem] = []
    if grpo.num_samples % grpo.num_steps_per_rollout:
        path = ("workload", "grpo", "num_steps_per_rollout")
        expected = f"a divisor of {grpo.num_samples}"
        problems.append((path, "does not divide the samples of a rollout", grpo.num_steps_per_rollout, expected))
    if model.num_attention_heads % model.num_query_groups:
        path = ("workload", "model", "num_query_groups")
        expected = f"a divisor of {model.num_attention_heads}"
        problems.append((path, "does not divide the attention heads", model.num_query_groups, expected))
    if model.kv_channels % 2:
        path = ("workload", "model", "kv_channels")
        problems.append((path, "rotary embedding needs an even size", model.kv_channels, "an even number"))
    return problems


def _run_problems(run: Run) -> list[PathProblem]:
    problems: list[PathProblem] = []
    if run.lane == "fixed-rollout":
        what = "the reference trainer has no inference server to keep live"
        problems.append((("lane",), what, run.lane, "live or train-only"))
    if run.measure.pairs + run.measure.control_pairs == 0:
        problems.append((("measure", "pairs"), "nothing to run", 0, "at least one pair or control pair"))
    menu = f"one of {', '.join(run.layouts)}"
    problems += [
        (("expected_trial_minutes", name), "no layout for this hardware", name, menu)
        for name in run.expected_trial_minutes
        if name not in run.layouts
    ]
    return problems
