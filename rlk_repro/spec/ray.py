"""What a site may have to say about Ray: the ``ray`` part of a profile, for workloads that run on it."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import Field

from rlk_repro.spec.values import UNSEEN, Model

FIRST_RAY_WITH_TOKENS: Final = (2, 52)
Interface = Annotated[str, Field(pattern=rf"^[^-\s/{UNSEEN}][^\s/{UNSEEN}]{{0,14}}$")]


class RaySettings(Model):
    """Every service of Ray gets a port of its own from ``first_port`` on, three of the head and six of each node."""

    first_port: Annotated[int, Field(ge=1024, le=8000)] = Field(
        6379, description="the head's; ephemeral ports begin at 9000 on some nodes, so all of them stay below that"
    )
    interface: Interface | None = Field(
        None,
        description="network interface by which nodes reach each other, where the node's name leads to another; NCCL's "
        "and Gloo's too, where env does not say otherwise",
    )


def knows_tokens(version: str) -> bool:
    """Whether this release of Ray authenticates by token; older ones ignore the wish without a word."""
    return tuple(map(int, re.findall(r"\d+", version)[:2])) >= FIRST_RAY_WITH_TOKENS
