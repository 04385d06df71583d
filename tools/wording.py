"""Find claims that no run supports: RL-Kernel leaves MoE kernels and vime's R3 routing replay as they are.

``python -m tools.wording FILE...`` prints each sentence and exits with 1.  A sentence that denies the claim passes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

_R3 = r"(r3|rout(er|ing) replay)"
_EXPERTS = r"(moe|experts?|routers?|gating)"
_KERNELS = r"(kernels?|gemms?)"
_BETTER = r"(faster|speed\w*|sped|accelerat\w*|fus(es?|ed|ing)|optimi[sz]\w*|replac\w*|improv\w*)"
CLAIMS = re.compile(
    rf"\b(replac|supersed|substitut|obviat)\w*( \S+){{0,6}}? {_R3}\b"
    rf"|\b{_R3}( \S+){{0,6}}? (replaced|superseded|obsolete|unnecessary|redundant)\b"
    rf"|\b(replacement|substitute|instead|place|need)( \S+){{0,4}}? {_R3}\b"
    rf"|\b{_BETTER}( \S+){{0,5}}? {_EXPERTS}( \S+)?( {_KERNELS})\b"
    rf"|\b{_EXPERTS}( \S+)? {_KERNELS}( \S+){{0,4}}? {_BETTER}\b"
)
DENIALS = re.compile(r"\b(not|no|never|neither|nor|nothing|without|cannot|whether|\w+n't)\b")
SENTENCE = re.compile(r"[^.!?;|]+|[.!?;|]")


def find_claims(text: str) -> Iterator[str]:
    for sentence in SENTENCE.findall(text.replace("\n\n", ". ").replace("\n- ", ". ")):
        words = " ".join(re.findall(r"[\w']+", sentence.lower().replace("_", " ")))
        if CLAIMS.search(words) and not DENIALS.search(words):
            yield " ".join(sentence.split())


if __name__ == "__main__":
    found = [f"{name}: {claim}" for name in sys.argv[1:] for claim in find_claims(Path(name).read_text())]
    sys.exit("\n".join(found) or 0)
