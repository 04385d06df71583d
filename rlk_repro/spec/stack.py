"""A stack: what is pinned, how sure that is, which images exist, and what goes into them.

Nothing here is made up: an image that has not been built is named as not published, an unpinned input as moving.
"""

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
"""``certain``: read at its source; ``likely``: one other party says so; ``unverified``: not checked here."""
Tag: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")]
Reference: TypeAlias = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*$", max_length=255),
]
"""A registry and a repository, without tag and digest."""


class Image(GrowingModel):
    """A container image by digest, never by tag alone."""

    added_later: ClassVar[frozenset[str]] = frozenset({"vime"})

    reference: Reference = Field(description="registry and repository, without tag")
    digest: Digest
    vime: Commit | None = Field(None, description="the vime inside, as its record says")


class Unpublished(Model):
    """An image of this stack that no registry has yet, and the command that builds it."""

    build: Text
    reason: Text


class BaseImage(Model):
    """What an image is built on.  Without a digest it is known by its tag alone, which may move."""

    reference: Reference
    tag: Tag | None = None
    digest: Digest | None = None
    vime: Commit | None = Field(None, description="the vime inside, which the build replaces")
    confidence: Confidence
    evidence: Text = Field(description="where this is known from")


class Pin(GrowingModel):
    """A source repository at one commit."""

    added_later: ClassVar[frozenset[str]] = frozenset({"confidence", "evidence", "patched_tree"})

    repository: Repository
    commit: Commit
    tree: Commit | None = Field(None, description="git's hash of the commit's files: by it an archive is known")
    patched_tree: Commit | None = Field(None, description="the same with the patch that upstream's own images apply")
    confidence: Confidence | None = None
    evidence: Text | None = Field(None, description="where this is known from")

    def holds_tree(self, tree: object) -> bool:
        """Whether files with this hash are the pinned ones, wherever they came from."""
        return tree is not None and tree in {self.tree, self.patched_tree}


class Component(Model):
    """What else is in the images, by commit where it is built from sources, else by version."""

    repository: Repository | None = None
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{7,40}$")] | None = Field(None, description="as far as it is known")
    version: Text | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = Field(None, description="of a single file")
    platforms: tuple[ImagePlatform, ...] = Field((), description="none named: all")
    confidence: Confidence
    evidence: Text


class Stack(GrowingModel):
    """A named set of pins, ``manifests/stacks/<stack>.yaml``.  Without an image the run uses what the host has."""

    added_later: ClassVar[frozenset[str]] = frozenset({"unpublished", "bases", "components", "moving"})

    schema_: Schema = Field(alias="schema", default=1)
    stack: Name
    purpose: Text
    images: dict[ImagePlatform, Image] = Field({})
    unpublished: dict[ImagePlatform, Unpublished] = Field({}, description="images that are meant to be, and are not")
    pins: dict[PinName, Pin] = Field({}, description="what every node is held to before the first trial")
    bases: dict[ImagePlatform, BaseImage] = Field({})
    components: dict[Name, Component] = Field(
        {}, description="recorded, not checked: the image's own record names them"
    )
    moving: dict[Name, Text] = Field({}, description="what a rebuild may get another version of, and why")


def stack_problems(stack: Stack) -> list[PathProblem]:
    """Parts that do not belong together."""
    problems: list[PathProblem] = [
        (("unpublished", platform), "is among the images too", platform, "one of both")
        for platform in stack.unpublished
        if platform in stack.images
    ]
    pin = stack.pins.get("vime")
    problems += [
        (("images", platform, "vime"), "is not the vime that the stack pins", image.vime, pin.commit)
        for platform, image in stack.images.items()
        if pin is not None and image.vime not in {None, pin.commit}
    ]
    problems += [
        (("components", name), "neither commit nor version", None, "one of both, or a line in moving")
        for name, component in stack.components.items()
        if component.commit is None and component.version is None
    ]
    return problems
