"""A site's settings for Ray: the ``ray`` section of a profile."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import Field

from rlk_repro.spec.values import UNSEEN, Model

FIRST_RAY_WITH_TOKENS: Final = (2, 52)
Interface = Annotated[str, Field(pattern=rf"^[^-\s/{UNSEEN}][^\s/{UNSEEN}]{{0,14}}$")]


class RaySettings(Model):
    """Ray's network, and Ray's ports from ``first_port`` on: three on the head, six on each node."""

    first_port: Annotated[int, Field(ge=1024, le=8000)] = Field(
        6379,
        description="first port of Ray's head; all ports stay below 9000, where ephemeral ports begin on some nodes",
    )
    interface: Interface | None = Field(
        None,
        description="network interface between the nodes, needed if the nodes' names resolve to addresses of another "
        "interface. NCCL and Gloo also use it, unless env names an interface for them",
    )


def knows_tokens(version: str) -> bool:
    """Tell whether this release of Ray authenticates by token; older releases silently ignore the setting."""
    return tuple(map(int, re.findall(r"\d+", version)[:2])) >= FIRST_RAY_WITH_TOKENS
