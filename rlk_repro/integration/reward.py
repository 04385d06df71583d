"""A reward that a model with random weights can earn, by vime's ``--custom-rm-path``; for bring-up, not for claims."""

from __future__ import annotations

from typing import Any


async def share_of_even_ids(args: object, sample: Any, **_: object) -> float:  # noqa: ARG001
    """The share of even token ids in the response: about one half at first, and it follows from the tokens alone."""
    response = sample.tokens[-sample.response_length :] if sample.response_length else []
    return float(sum(token_id % 2 == 0 for token_id in response) / max(len(response), 1))
