"""Define rewards for vime's ``--custom-rm-path``: one that random weights can earn, and one for correct answers."""

from __future__ import annotations

import re
from typing import Any, Final

_WHOLE_NUMBER: Final = re.compile(r"(?<![\d.])\d+(?![\d.]*\d)")


async def share_of_even_ids(args: object, sample: Any, **_: object) -> float:  # noqa: ARG001
    """Return the fraction of even token ids in the response; an untrained model earns about 0.5."""
    response = sample.tokens[-sample.response_length :] if sample.response_length else []
    return float(sum(token_id % 2 == 0 for token_id in response) / max(len(response), 1))


async def last_number_is_label(args: object, sample: Any, **_: object) -> float:  # noqa: ARG001
    """Return 1 if the last whole number of the response equals the label, otherwise 0."""
    numbers = _WHOLE_NUMBER.findall(sample.response)
    return float(bool(numbers) and int(numbers[-1]) == int(sample.label))
