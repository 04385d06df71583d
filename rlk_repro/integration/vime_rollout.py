"""Let a training process ask vime's vLLM server for log-probs and layer outputs of whole samples.

vLLM has the weights of the last sync: until the training's next sync, these are the weights before the training's step.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch

from rlk_repro.integration.measure.engines import MAX_CHOSEN, EngineRecord
from rlk_repro.rundir.agreement import AS_RUN, EMPTY_CACHE, GENERATED, PREFIX_CACHE, PROMPTS

logger = logging.getLogger(__name__)

TOGETHER: Final = "together"
TIMEOUT_S: Final = 120.0
HASHES_TIMEOUT_S: Final = 240.0
UNUSED: Final = "vLLM took no prefix from its cache: the cache is off, or each prefix is shorter than a block"


class RolloutServer:
    """A client of the vLLM server to which the trainer sends its weights."""

    def __init__(self) -> None:
        self._engines: Sequence[Any] = ()
        self._url = ""
        # an engine's address cannot be reached through a proxy
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def follow_connect(self, connect: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap vime's method that connects the weight sync to vLLM's engines, and remember these engines."""

        @functools.wraps(connect)
        def note_and_connect(updater: Any, rollout_engines: Sequence[Any], *rest: Any, **named: Any) -> Any:
            self._engines, self._url = tuple(rollout_engines), ""
            return connect(updater, rollout_engines, *rest, **named)

        return note_and_connect

    def find_refusal(self, args: Namespace) -> str:
        """Return why vLLM's log-probs cannot be compared in this run; empty if they can."""
        if not self._engines:
            return "the trainer has no vLLM engine"
        if getattr(args, "offload_rollout", False):
            return "vLLM has released its memory for the training"
        if args.world_size > args.tensor_model_parallel_size or args.rank:
            return "only rank 0 asks vLLM, and only if the training has one data parallel rank"
        if (args.rollout_temperature, args.rollout_top_p) != (1, 1):
            return "vLLM does not apply temperature and top-p to the log-probs of prompts"
        split = [getattr(args, f"vllm_{name}_parallel_size", 1) or 1 for name in ("data", "pipeline")]
        if max(split) > 1:
            return "vLLM's data or pipeline parallel workers each compute a part of the samples or layers"
        return ""

    def record(
        self, record: EngineRecord, step: int, dtype: str, samples: Sequence[tuple[list[int], int]],
        chosen: Sequence[Sequence[tuple[int, int]]],
    ) -> None:  # fmt: skip
        """Record log-probs and layer outputs of samples sent one by one, and log-probs of samples sent all at once.

        ``samples`` lists each sample's tokens and the length of its response.  ``chosen`` lists, for each sample, the
        tokens whose layer outputs are recorded: a token's index among all chosen tokens, and its row in the sample.
        """
        rows, layers = self._watch_alone(samples, chosen)
        with ThreadPoolExecutor(len(samples)) as pool:
            together = list(pool.map(lambda sample: self._score(*sample), samples))
        record.write_log_probs(step, PROMPTS, AS_RUN, dtype, rows)
        record.write_points(step, PROMPTS, AS_RUN, dtype, layers.get("points", {}))
        if reason := layers.get("reason"):
            record.skip(step, "layers", PROMPTS, AS_RUN, reason)
        if reason := layers.get("routing_reason"):
            record.skip(step, "routing", PROMPTS, AS_RUN, reason)
        if experts := layers.get("routing"):
            tokens = [(sample, row) for sample, rows_of in enumerate(chosen) for _, row in rows_of]
            record.write_routing(step, PROMPTS, AS_RUN, dtype, tokens, experts)
        record.write_log_probs(step, PROMPTS, TOGETHER, dtype, together)

    def _watch_alone(
        self, samples: Sequence[tuple[list[int], int]], chosen: Sequence[Sequence[tuple[int, int]]]
    ) -> tuple[list[torch.Tensor], dict[str, Any]]:
        if not any(map(len, chosen)):
            return [self._score(*sample) for sample in samples], {}
        wanted = {"calls": chosen, "lengths": [len(tokens) for tokens, _ in samples]}
        try:
            lacking = self._try("rlk_repro_watch", json.dumps(wanted))
            rows = [self._score(*sample) for sample in samples]
        finally:
            # hooks that stay on the model would disturb vLLM's next generation
            found = self._try("rlk_repro_found")
        return rows, lacking or found

    def _try(self, method: str, *arguments: str) -> dict[str, Any]:
        try:
            return self._call(method, *arguments) or {}
        except Exception as error:
            logger.warning("rlk-repro: no record of the model's layers in vLLM", exc_info=True)
            return {"reason": describe_failure(error)}

    def _score(self, tokens: list[int], num_response: int) -> torch.Tensor:
        wanted = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 1}
        answer = self.generate(tokens, wanted)
        first = len(tokens) - num_response
        known = zip(tokens[first:], answer["prompt_logprobs"][first:], strict=True)
        return torch.tensor([found[str(token)]["logprob"] for token, found in known], dtype=torch.float64)

    def record_prefixes(
        self, record: EngineRecord, step: int, dtype: str, samples: Sequence[tuple[list[int], int]]
    ) -> None:
        """Record the log-prob of the last token of up to 16 samples, computed with an empty and with a filled cache.

        vLLM's prefix cache must not change the value.
        """
        found: dict[str, list[torch.Tensor]] = {EMPTY_CACHE: [], PREFIX_CACHE: []}
        reason = UNUSED
        for number, (tokens, _) in enumerate(samples[:MAX_CHOSEN]):
            # vLLM shares a cached prefix only between requests with the same salt, so a new salt finds no cached prefix
            salt = f"rlk-repro {step} {number}"
            first, num_first = self._score_last(tokens, salt)
            second, num_second = self._score_last(tokens, salt)
            if num_first is None or num_second is None:
                reason = "vLLM does not say how many tokens of a prefix it took from its cache"
            elif num_first:
                reason = "vLLM took a cached prefix for the first request with a new salt"
            is_usable = num_first == 0 and bool(num_second)
            for values, value in zip(found.values(), (first, second), strict=True):
                values.append(torch.tensor([value] if is_usable else [], dtype=torch.float64))
        if not any(map(len, found[EMPTY_CACHE])):
            record.skip(step, "log_probs", GENERATED, PREFIX_CACHE, reason)
            return
        for case, values in found.items():
            record.write_log_probs(step, GENERATED, case, dtype, values)

    def _score_last(self, tokens: Sequence[int], salt: str) -> tuple[float, int | None]:
        """Return the last token's log-prob, and how many tokens of the prefix vLLM took from its cache."""
        *prefix, token = tokens
        # vLLM returns as many log-probs as are requested, with its sampled token's log-prob first
        wanted = {"max_tokens": 1, "temperature": 1.0, "logprobs": 2, "logprob_token_ids": [token, int(not token)]}
        answer = self.generate(prefix, wanted, cache_salt=salt)
        listed = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        found = {item["token"]: item["logprob"] for item in listed}
        details = answer["usage"]["prompt_tokens_details"] or {}
        return found[f"token_id:{token}"], details.get("cached_tokens")

    def generate(self, tokens: Sequence[int], wanted: dict[str, Any], **more: str) -> Any:
        body = {"token_ids": list(tokens), "sampling_params": wanted, **more}
        return self._post("/inference/v1/generate", body)

    def hash_weights(self, dtype: str) -> Any:
        return self._call("rlk_repro_weights", dtype, timeout_s=HASHES_TIMEOUT_S)

    def _call(self, method: str, *arguments: str, timeout_s: float = TIMEOUT_S) -> Any:
        answer = self._post("/collective_rpc", {"method": method, "args": list(arguments)}, timeout_s)
        return answer["results"][0]

    def _post(self, path: str, body: Any, timeout_s: float = TIMEOUT_S) -> Any:
        if not self._url:
            ray: Any = importlib.import_module("ray")
            self._url = ray.get(self._engines[0].get_url.remote(), timeout=TIMEOUT_S)
        request = urllib.request.Request(  # noqa: S310 this is the address of vLLM's server
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with self._opener.open(request, timeout=timeout_s) as answer:
            return json.load(answer)


def find_dtype(args: Namespace) -> str:
    return "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"


def describe_failure(error: Exception) -> str:
    """Return a short reason why a request to vLLM failed, without any address."""
    if isinstance(error, urllib.error.HTTPError):
        return f"vLLM answered with HTTP status {error.code}"
    if isinstance(error, OSError):
        return f"vLLM did not answer: {type(error).__name__}"
    return f"vLLM's answer cannot be read: {type(error).__name__}"
