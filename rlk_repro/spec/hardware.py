"""Hardware targets: what an author writes in ``jobs/hardware/<name>.yaml``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlk_repro.spec.kubernetes import LabelKey, LabelValue
from rlk_repro.spec.stack import ImagePlatform
from rlk_repro.spec.values import GrowingModel, Model, Name, NonNegative, Platform, Positive, Schema, Text


class AllReduceFloor(Model):
    """Limits of a measurement that version 0.2 made before the trials, as its plans record them."""

    one_node_gb_s: Positive | None = None
    nodes_gb_s: Positive | None = None
    source: Text


class Hardware(GrowingModel):
    """The properties of one hardware target, ``jobs/hardware/<name>.yaml``."""

    added_later: ClassVar[frozenset[str]] = frozenset({"links_per_gpu", "node_labels", "all_reduce"})

    schema_: Schema = Field(alias="schema", default=1)
    hardware: Name
    title: Text
    platform: Platform
    machine: Literal["x86_64", "aarch64", "any"]
    gpus_per_node: Annotated[int, Field(ge=0, le=72)]
    gpu_memory_gib: NonNegative = Field(0.0, description="memory of one GPU, as its driver reports it")
    name_part: Annotated[str, Field(max_length=40)] = Field(
        "", description="text that must occur in the GPU's name, as the driver reports it"
    )
    refused_name_parts: tuple[Text, ...] = Field(
        (), description="texts that must not occur in the GPU's name, because they name similar products"
    )
    driver_floor: Annotated[str, Field(max_length=40)] = ""
    links_per_gpu: Annotated[int, Field(ge=0, le=72)] = Field(0, description="number of NVLink or xGMI links of a GPU")
    node_labels: dict[LabelKey, Annotated[tuple[LabelValue, ...], Field(min_length=1)]] = Field(
        {},
        max_length=20,
        description="labels of Kubernetes nodes with these GPUs, each with its values; one match is enough",
    )
    all_reduce: AllReduceFloor | None = Field(None, description="removed in version 0.3; new runs refuse it")

    @property
    def as_measured(self) -> Hardware:
        """Return this hardware without the limits that only preflight uses; these limits change no measurement."""
        return self.model_copy(update={"all_reduce": None})

    @property
    def image_platform(self) -> ImagePlatform:
        match self.platform:
            case "cpu":
                return "cpu"
            case "rocm":
                return "rocm-amd64"
            case "cuda":
                return "cuda-arm64" if self.machine == "aarch64" else "cuda-amd64"
