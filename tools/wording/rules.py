"""The wording policy as data: forbidden claims, the reasons, and what to say instead.

A pattern is a regular expression over the words of one sentence, as ``prose`` gives them: lower case, single spaces, no
hyphens or slashes.  ``~6`` stands for up to six words in between.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One kind of claim that is not allowed.

    A sentence breaks the rule if it matches one of ``patterns`` and does not deny the claim.  A sentence also breaks
    the rule if it matches one of ``absolute``: these patterns contain a ``no`` themselves, which would count as a
    denial.  A sentence that matches ``unless`` is allowed.
    """

    name: str
    patterns: tuple[re.Pattern[str], ...]
    reason: str
    instead: str
    absolute: tuple[re.Pattern[str], ...] = ()
    unless: re.Pattern[str] | None = None


_RLK: Final = r"(?:rl kernel(?:'s)?|rlkernel|rl engine)"
_R3: Final = r"(?:vime's )?(?:r3|(?:rollout )?routing replay|router replay)"
_REPLACE: Final = (
    r"(?:replac(?:e|es|ed|ing)|supersed\w*|substitut(?:e|es|ed|ing)|obviat\w*|subsum\w*|tak(?:e|es|ing) the place of"
    r"|do(?:es)? away with|remov\w* the need for)"
)
_EXPERTS: Final = r"(?:moe|mixture of experts|experts?|router|gating)"
_KERNELS: Final = r"(?:kernels?|gemms?)"
_FASTER: Final = r"(?:faster|quicker|speedups?|speed ups?|accelerat\w*|speed(?:s|ing)? up|sped up)"
_BETTER: Final = rf"(?:{_FASTER}|optimi[sz]\w*|fus(?:e|es|ed|ing)|improv\w*)"
_ENGINE: Final = r"(?:vime|rl kernel|baseline)"
_JOIN: Final = r"(?: (?:\+|and|with|plus) )"
_VERSUS: Final = r"(?:vs|versus|against|compared (?:to|with)|relative to|(?:faster|better|slower|smaller) than)"
_SIDE: Final = rf"{_ENGINE}(?:{_JOIN}{_ENGINE})*"
_SIDE_R3: Final = rf"(?:{_ENGINE}{_JOIN})*r3(?:{_JOIN}{_ENGINE})*"
_SIDE_BEGINS: Final = r"(?<!\+ )(?<!and )(?<!with )(?<!plus )"
_SIDE_ENDS: Final = rf"(?!{_JOIN}(?:{_ENGINE}|r3)\b)"
_BITWISE: Final = r"(?:bit ?wise|bit for bit|bit (?:exact|identical|equal)\w*)"
_TRAIN: Final = r"(?:train\w*|megatron)"
_INFER: Final = r"(?:inference|rollouts?|vllm|generation|sampling|serving)"
_PROMISE: Final = (
    r"(?:guarantee\w*|ensur\w*|achiev\w*|provid\w*|deliver\w*|clos(?:e|es|ed|ing)|restor\w*|fix(?:es|ed)?|solv\w*"
    r"|eliminat\w*|lock\w*|enforc\w*|bring\w*|giv\w*)"
)
_DONE: Final = r"(?:guaranteed|ensured|achieved|closed|solved)"
_LOWER_TIER: Final = r"(?:operators?|modules?|(?<!rl )kernels?|micro ?benchmarks?)"
_WHOLE: Final = r"(?:end to end|e2e|training|whole runs?|step times?|steps?)"
_NEVER_RAN: Final = r"(?:a100s?|gb200s?|b200s?|mi300x?s?|mi325x|mi355x)"
_RAN: Final = r"(?:ran|tested|measured|benchmarked|validated|verified|certified|proven|works|worked|supported)"
_TIMES: Final = r"\d[\d.]* ?(?:x|×|times|%)"
_WE: Final = r"(?:we|our|ours|rlk repro|this tool)"
_ATTRIBUTED: Final = r"\b(?:published|publishes|printed|prints|upstream|readme|reported|reports|their|theirs|authors)\b"


def _compile(*patterns: str) -> tuple[re.Pattern[str], ...]:
    """Compile patterns; ``~6`` in a pattern becomes up to six words."""
    return tuple(re.compile(r"\b" + re.sub(r" ~(\d+) ", r"(?: \\S+){0,\1}? ", pattern) + r"\b") for pattern in patterns)


RULES: Final[tuple[Rule, ...]] = (
    Rule(
        name="r3-replacement",
        patterns=_compile(
            rf"{_REPLACE} ~6 {_R3}",
            rf"{_R3} ~6 (?:replaced|superseded|obsolete|unnecessary|redundant|superfluous)",
            rf"(?:replacement|substitute|alternative) (?:for|of|to) ~3 {_R3}",
            rf"{_RLK} ~4 (?:instead of|in place of|rather than) ~3 {_R3}",
        ),
        absolute=_compile(
            rf"{_RLK} ~8 (?:no need for|no longer needs?|without needing) ~3 {_R3}",
            rf"{_RLK} ~8 {_R3} ~3 (?:no longer|not) (?:needed|necessary|required)",
            rf"{_R3} ~3 (?:no longer|not) (?:needed|necessary|required) ~4 {_RLK}",
        ),
        reason="RL-Kernel leaves vime's R3 routing replay as it is",
        instead="vime + R3 vs vime + R3 + RL-Kernel",
    ),
    Rule(
        name="moe-kernels",
        patterns=_compile(
            rf"{_RLK} ~6 {_EXPERTS} ~2 {_KERNELS}",
            rf"(?:{_BETTER}|replac\w*|new|better) ~3 {_EXPERTS} ~2 {_KERNELS}",
            rf"{_EXPERTS} ~2 {_KERNELS} ~4 {_BETTER}",
            rf"(?:accelerat\w*|speed(?:s|ing)? up|sped up|speedups? (?:of|for|in|on)) ~3 {_EXPERTS}",
        ),
        reason="rlk-repro measures log-probs and losses, not experts or routers",
        instead="name the function that was timed, and compare vime + R3 vs vime + R3 + RL-Kernel",
    ),
    Rule(
        name="moe-comparison",
        patterns=_compile(
            rf"{_SIDE_BEGINS}{_SIDE}(?: (?!r3\b|vs\b)\S+){{0,3}}? {_VERSUS} {_SIDE_R3}",
            rf"{_SIDE_R3}(?: (?!vs\b)\S+){{0,3}}? {_VERSUS} {_SIDE}{_SIDE_ENDS}",
        ),
        reason="with R3 on one side only, the comparison measures R3, not RL-Kernel",
        instead="vime + R3 vs vime + R3 + RL-Kernel",
    ),
    Rule(
        name="consistency",
        patterns=_compile(
            r"closed? ~2 loops? ~4 consisten\w*",
            r"consisten\w* ~4 clos(?:e|es|ed|ing) ~2 loops?",
            rf"{_BITWISE} ~6 (?:{_TRAIN} ~3 {_INFER}|{_INFER} ~3 {_TRAIN})",
            rf"(?:{_TRAIN} ~4 {_INFER}|{_INFER} ~4 {_TRAIN}) ~6 {_BITWISE}",
            rf"{_BITWISE} ~2 (?:to|with|as) ~3 {_INFER}",
            rf"{_PROMISE} ~4 {_TRAIN} ~2 {_INFER} ~2 (?:consisten\w*|parity|mismatch\w*|equality)",
            rf"(?:consisten\w*|parity|equality) ~3 {_TRAIN} ~2 {_INFER} ~3 {_DONE}",
            rf"{_TRAIN} ~2 {_INFER} ~2 (?:consisten\w*|parity) ~3 (?:is|{_DONE})",
        ),
        unless=re.compile(r"\b(?:stored|replay\w*|published|upstream)\b"),
        reason="agreement is measured as train_rollout_logprob_abs_diff and compared with a margin; equality is not "
        "shown",
        instead="give the measured difference and its margin",
    ),
    Rule(
        name="end-to-end-speed",
        patterns=_compile(
            rf"{_LOWER_TIER} ~10 {_WHOLE} ~4 {_FASTER}",
            rf"{_LOWER_TIER} ~10 {_FASTER} ~2 (?:end to end|e2e|training|whole runs?)",
            rf"(?:end to end|e2e) ~3 (?:{_FASTER}|gains?) ~8 {_LOWER_TIER}",
        ),
        reason="an operator or module is only a part of a step; its time says nothing about the rest",
        instead="give the operator's or module's own time, and the end-to-end tier's verdict beside it",
    ),
    Rule(
        name="published-number",
        patterns=_compile(
            rf"{_WE} ~3 (?:verif\w*|confirm\w*|prov(?:e|es|ed|en)|validat\w*) ~4"
            r" (?:claims?|published numbers?|published speedups?|published results?|benchmarks?)",
            rf"{_WE} ~2 (?:published|readme) (?:numbers?|figures?|results?|speedups?)",
        ),
        reason="published numbers are their authors' results, on their hardware",
        instead="say of each row: reproduced, not reproduced or not runnable here; with both numbers",
    ),
    Rule(
        name="maximum",
        patterns=_compile(
            r"(?:up to|as much as|as high as|more than) (?:\d[\d.]*|ten|a hundred) ?(?:x|×|times|fold) ~2"
            r" (?:faster|smaller|less|lower|speedups?|memory|vram|reduction)",
            r"\d[\d.]*[x×] (?:faster|speedups?) ~6 rl kernel",
            r"163 ?[x×]",
        ),
        unless=re.compile(_ATTRIBUTED),
        reason="the best row of a table, without its shape, hardware and spread, is not a result",
        instead="ratio, interval, number of pairs, shape and hardware; or say whose number it is",
    ),
    Rule(
        name="speed-of-training",
        patterns=_compile(
            rf"{_RLK} ~3 (?:makes?|making|speeds? up|accelerat\w*|runs?) ~2 train\w* ~3 {_TIMES}",
            rf"train\w* ~4 {_TIMES} {_FASTER} ~2 (?:with|by|thanks to|using) {_RLK}",
        ),
        unless=re.compile(_ATTRIBUTED),
        reason="a speed-up of training holds for one model, one length and one machine, and has an interval",
        instead="give the run, the hardware, the interval and the bundle's id",
    ),
    Rule(
        name="bare-promise",
        patterns=_compile(
            r"(?:is|are|stays?|fully|be) (?:\S+ )?(?:bit exact|production (?:ready|grade)|battle tested|lossless)",
            r"(?:bit exact|lossless) and production ready",
        ),
        reason="no run shows equality everywhere, or fitness for a production system that was not measured",
        instead="name what was compared, the number of steps and the margin",
    ),
    Rule(
        name="hardware-never-run",
        patterns=_compile(
            rf"{_RAN} ~2 (?:on|for) ~5 {_NEVER_RAN}",
            rf"{_NEVER_RAN} ~4 (?:is|are|was|were|been) (?:fully )?{_RAN}",
        ),
        unless=re.compile(rf"{_ATTRIBUTED}|\b(?:rendered|planned|fixtures?)\b"),
        reason="jobs and layouts for this hardware were rendered and checked; nothing ran there",
        instead="rendered only, or planned; list what ran where",
    ),
)
