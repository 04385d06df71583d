"""vLLM's log-prob of one token, with an empty and with a filled prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlk_repro.analysis.checks import check_pair
from rlk_repro.integration.measure.engines import EngineRecord
from rlk_repro.integration.vime_rollout import RolloutServer
from rlk_repro.logs.engines import read_engines
from rlk_repro.rundir.agreement import AgreementCheck, CheckKind, CheckWord
from rlk_repro.rundir.paths import TrialDir

BLOCK = 4
SAMPLES = [(list(range(10, 10 + length)), 3) for length in (4, 6, 9)]


class CachingServer(RolloutServer):
    """Answers as vLLM does: whole blocks of a prefix are cached by salt, and the sampled token comes first."""

    def __init__(self, error: float = 0.0) -> None:
        super().__init__()
        self.error, self.seen = error, set[tuple[str, int]]()

    def generate(self, tokens: Sequence[int], wanted: dict[str, Any], **more: str) -> Any:
        assert wanted["logprobs"] == len(wanted["logprob_token_ids"])
        key = (more["cache_salt"], len(tokens))
        cached = (len(tokens) - 1) // BLOCK * BLOCK if key in self.seen else 0
        self.seen.add(key)
        values = {99: -9.0, wanted["logprob_token_ids"][0]: -len(tokens) / 7 - (self.error if cached else 0)}
        listed = [{"token": f"token_id:{token}", "logprob": value} for token, value in values.items()]
        return {
            "choices": [{"logprobs": {"content": [{"top_logprobs": listed[: wanted["logprobs"]]}]}}],
            "usage": {"prompt_tokens_details": self.tell(cached)},
        }

    def tell(self, cached: int) -> Any:
        return {"cached_tokens": cached}


def compare(folder: Path, server: RolloutServer) -> list[AgreementCheck]:
    record = EngineRecord(TrialDir(folder).engines, 0)
    inputs = [{"tokens": tokens, "loss_mask": [1] * num, "padding": 0} for tokens, num in SAMPLES]
    record.write_inputs(0, "rollout", inputs)
    record.write_log_probs(0, "rollout, generated", "", "bfloat16", [])
    server.record_prefixes(record, 0, "bfloat16", SAMPLES)
    record.close()
    log = read_engines(TrialDir(folder))
    checks = check_pair("p1", [("baseline", log), ("enabled", log)])
    return [item for item in checks if item.kind is CheckKind.INVARIANCE and item.variant == "baseline"]


def test_a_cached_prefix_that_changes_nothing_is_bitwise_equal(tmp_path: Path) -> None:
    (check,) = compare(tmp_path, CachingServer())
    assert (check.first, check.second) == ("rollout, generated", "prefix cache")
    # a prefix of 3 tokens fills no block
    assert (check.word, check.found, check.num) == (CheckWord.PASS, "bitwise", 2)


def test_a_cached_prefix_that_changes_a_log_prob_is_found_with_its_token(tmp_path: Path) -> None:
    (check,) = compare(tmp_path, CachingServer(error=0.5))
    assert (check.word, check.num_unequal) == (CheckWord.FAIL, 2)
    assert check.found == "largest 0.5 at sample 1, position 2 of its response, token 15"
