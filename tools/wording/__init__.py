"""The linter of the wording policy (docs/wording.md): it finds sentences that claim more than the evidence supports."""

from tools.wording.lint import Offence, lint_file, lint_text
from tools.wording.rules import RULES, Rule

__all__ = ["RULES", "Offence", "Rule", "lint_file", "lint_text"]
