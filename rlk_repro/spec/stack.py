"""The software and the machines of a run: stacks of pinned versions and images, and hardware targets."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from rlk_repro.spec.kubernetes import LabelKey, LabelValue
from rlk_repro.spec.values import (
    REMOVED,
    Commit,
    Digest,
    GrowingModel,
    Model,
    Name,
    NonNegative,
    PathProblem,
    PinName,
    Platform,
    Positive,
    Repository,
    Schema,
    Text,
)

ImagePlatform: TypeAlias = Literal["cuda-amd64", "cuda-arm64", "rocm-amd64", "cpu"]
Confidence: TypeAlias = Literal["certain", "likely", "unverified"]
"""``certain``: read at its source; ``likely``: reported by one other party; ``unverified``: not checked."""
Tag: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")]
Reference: TypeAlias = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*$", max_length=255),
]


class Image(GrowingModel):
    """A container image by digest, never by tag alone."""

    added_later: ClassVar[frozenset[str]] = frozenset({"vime"})

    reference: Reference = Field(description="registry and repository, without tag")
    digest: Digest
    vime: Commit | None = Field(None, description="commit of vime that the image's own record names")

    @property
    def pinned(self) -> str:
        """The image's name with its digest: ``NAME@sha256:…``."""
        return f"{self.reference}@{self.digest}"


class Unpublished(Model):
    """An image of this stack that is not yet in any registry, and the command that builds it."""

    build: Text
    reason: Text


class BaseImage(Model):
    """The image that another image is built on; without a digest only a tag is known, which may be reassigned."""

    reference: Reference
    tag: Tag | None = None
    digest: Digest | None = None
    vime: Commit | None = Field(None, description="commit of vime in the base image, which the build replaces")
    confidence: Confidence
    evidence: Text


class Pin(GrowingModel):
    """A source repository at one commit."""

    added_later: ClassVar[frozenset[str]] = frozenset({"confidence", "evidence", "patched_tree"})

    repository: Repository
    commit: Commit
    tree: Commit | None = Field(None, description="git tree hash of the commit's files, which identifies an archive")
    patched_tree: Commit | None = Field(
        None, description="git tree hash of the commit's files with the patch that upstream applies in its images"
    )
    confidence: Confidence | None = None
    evidence: Text | None = None

    def holds_tree(self, tree: object) -> bool:
        """Tell whether ``tree`` is git's hash of the pinned files, with or without upstream's patch."""
        return tree is not None and tree in {self.tree, self.patched_tree}


class Component(Model):
    """Other software in the images: it has a commit if it is built from sources, otherwise a version."""

    repository: Repository | None = None
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{7,40}$")] | None = Field(
        None, description="commit, or its first digits if only they are known"
    )
    version: Text | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = Field(None, description="sha256 of a single file")
    platforms: tuple[ImagePlatform, ...] = Field((), description="platforms that have this part; default: all")
    confidence: Confidence
    evidence: Text


class Stack(GrowingModel):
    """A named set of pins, ``manifests/stacks/<stack>.yaml``.  Without an image the run uses the host's software."""

    added_later: ClassVar[frozenset[str]] = frozenset({"unpublished", "bases", "locks", "components", "moving"})

    schema_: Schema = Field(alias="schema", default=1)
    stack: Name
    purpose: Text
    images: dict[ImagePlatform, Image] = Field({})
    unpublished: dict[ImagePlatform, Unpublished] = Field({}, description="images that are planned but not published")
    pins: dict[PinName, Pin] = Field({}, description="versions that every node must have before the first trial")
    bases: dict[ImagePlatform, BaseImage] = Field({})
    locks: dict[ImagePlatform, Digest] = Field(
        {}, description="hash of requirements/STACK-PLATFORM.txt, which pins every Python package by version and hash"
    )
    components: dict[Name, Component] = Field(
        {}, description="further parts of the images; no check compares them with an image"
    )
    moving: dict[Name, Text] = Field({}, description="inputs whose version may change in a rebuilt image, and why")


def stack_problems(stack: Stack) -> list[PathProblem]:
    problems: list[PathProblem] = [
        (("unpublished", platform), "is listed under images as well", platform, "images or unpublished")
        for platform in stack.unpublished
        if platform in stack.images
    ]
    pin = stack.pins.get("vime")
    problems += [
        (("images", platform, "vime"), "differs from the vime that the stack pins", image.vime, pin.commit)
        for platform, image in stack.images.items()
        if pin is not None and image.vime not in {None, pin.commit}
    ]
    problems += [
        (("components", name), "has no commit and no version", None, "a commit or version, or the key `moving`")
        for name, component in stack.components.items()
        if component.commit is None and component.version is None
    ]
    return problems


class AllReduceFloor(Model):
    """Limits of a measurement that version 0.2 made before the trials, as its plans record them."""

    one_node_gb_s: Positive | None = None
    nodes_gb_s: Positive | None = None
    source: Text


class Hardware(GrowingModel):
    """The properties of one hardware target, ``jobs/hardware/<name>.yaml``."""

    added_later: ClassVar[frozenset[str]] = frozenset(
        {"links_per_gpu", "node_labels", "all_reduce", "nvlink_domain_gpus"}
    )

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
    nvlink_domain_gpus: Annotated[int, Field(ge=0, le=4096)] = Field(
        0,
        description="number of GPUs that NVLink connects across nodes (72 in NVL72); 0: NVLink ends at the node",
    )
    node_labels: dict[LabelKey, Annotated[tuple[LabelValue, ...], Field(min_length=1)]] = Field(
        {},
        max_length=20,
        description="labels of Kubernetes nodes with these GPUs, each with its values; one match is enough",
    )
    all_reduce: AllReduceFloor | None = Field(None, description=REMOVED)

    @property
    def as_measured(self) -> Hardware:
        """Return this hardware without what earlier files lack and what changes no measurement by itself."""
        return self.model_copy(update={"all_reduce": None, "nvlink_domain_gpus": 0})

    @property
    def image_platform(self) -> ImagePlatform:
        match self.platform:
            case "cpu":
                return "cpu"
            case "rocm":
                return "rocm-amd64"
            case "cuda":
                return "cuda-arm64" if self.machine == "aarch64" else "cuda-amd64"
