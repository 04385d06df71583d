"""The wording policy as a linter: it finds sentences that claim more than the evidence supports.

``prose`` turns a file into sentences, ``rules`` holds the policy as data, ``lint`` applies the rules.
docs/wording.md gives the reasons.
"""

from tools.wording.lint import Offence, lint_file, lint_text
from tools.wording.rules import RULES, Rule

__all__ = ["RULES", "Offence", "Rule", "lint_file", "lint_text"]
