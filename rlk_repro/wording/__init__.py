"""The wording policy as a linter: sentences that claim more than the evidence carries, each with its place.

``prose`` turns a file into sentences, ``rules`` are the policy as data, ``lint`` brings the two together.
docs/wording.md gives the reasons.
"""

from rlk_repro.wording.lint import Offence, lint_file, lint_text
from rlk_repro.wording.rules import RULES, Rule

__all__ = ["RULES", "Offence", "Rule", "lint_file", "lint_text"]
