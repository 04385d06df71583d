"""Compare the log-prob of a token with and without a cached prefix: vLLM's prefix cache must not change the value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from rlk_repro.integration.measure.engines import MAX_CHOSEN, EngineRecord
from rlk_repro.integration.vime_rollout import RolloutServer
from rlk_repro.rundir.agreement import EMPTY_CACHE, GENERATED, PREFIX_CACHE

UNUSED: Final = "vLLM took no prefix from its cache: the cache is off, or each prefix is shorter than a block"


def record_prefixes(
    server: RolloutServer, record: EngineRecord, step: int, dtype: str, samples: Sequence[tuple[list[int], int]]
) -> None:
    """Record the log-prob of the last token of up to 16 samples, computed with an empty and with a filled cache."""
    empty: list[torch.Tensor] = []
    cached: list[torch.Tensor] = []
    reason = UNUSED
    for number, (tokens, _) in enumerate(samples[:MAX_CHOSEN]):
        # vLLM shares a cached prefix only between requests with the same salt, so a new salt finds no cached prefix
        salt = f"rlk-repro {step} {number}"
        first, num_first = _ask(server, tokens, salt)
        second, num_second = _ask(server, tokens, salt)
        if num_first is None or num_second is None:
            reason = "vLLM does not say how many tokens of a prefix it took from its cache"
        elif num_first:
            reason = "vLLM took a cached prefix for the first request with a new salt"
        is_usable = num_first == 0 and bool(num_second)
        empty.append(torch.tensor([first] if is_usable else [], dtype=torch.float64))
        cached.append(torch.tensor([second] if is_usable else [], dtype=torch.float64))
    if any(map(len, empty)):
        record.write_log_probs(step, GENERATED, EMPTY_CACHE, dtype, empty)
        record.write_log_probs(step, GENERATED, PREFIX_CACHE, dtype, cached)
    else:
        record.skip(step, "log_probs", GENERATED, PREFIX_CACHE, reason)


def _ask(server: RolloutServer, tokens: Sequence[int], salt: str) -> tuple[float, int | None]:
    *prefix, token = tokens
    # vLLM returns as many log-probs as are requested, with its sampled token's log-prob first
    wanted: dict[str, Any] = {"max_tokens": 1, "temperature": 1.0, "logprobs": 2}
    answer = server.generate(prefix, wanted | {"logprob_token_ids": [token, int(not token)]}, cache_salt=salt)
    found = {item["token"]: item["logprob"] for item in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}
    details = answer["usage"]["prompt_tokens_details"] or {}
    return found[f"token_id:{token}"], details.get("cached_tokens")
