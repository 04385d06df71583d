"""A stack: the pinned versions, how each was checked, which images exist, and what goes into them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from rlk_repro.spec.values import (
    Commit,
    Digest,
    GrowingModel,
    Model,
    Name,
    PathProblem,
    PinName,
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
