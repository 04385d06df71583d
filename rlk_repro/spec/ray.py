"""What a site may have to say about Ray: the ``ray`` part of a profile, for workloads that run on it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlk_repro.spec.values import Model

Interface = Annotated[str, Field(pattern=r"^[^\s/]{1,15}$")]


class RaySettings(Model):
    """Every service of Ray gets a port of its own from ``first_port`` on, three of the head and six of each node."""

    first_port: Annotated[int, Field(ge=1024, le=8000)] = Field(
        6379, description="the head's; ephemeral ports begin at 9000 on some nodes, so all of them stay below that"
    )
    interface: Interface | None = Field(
        None, description="network interface by which nodes reach each other, where the node's name leads to another"
    )
