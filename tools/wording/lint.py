"""Find sentences that break a rule; a sentence that denies the forbidden claim is allowed."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlk_repro.base.escapes import printable
from tools.wording.prose import Sentence, read_sentences
from tools.wording.rules import RULES, Rule

MAX_EXCERPT: Final = 120
NEAR_WORDS: Final = 4
# A denial is searched in this many characters before a match; sentences are shorter.
CONTEXT: Final = 600

_DENIAL: Final = r"(?:not(?! (?:only|just|merely)\b)|no|never|none|nothing|nobody|neither|nor|nowhere|cannot|\w+n't)"
_DENIED: Final = re.compile(rf"\b{_DENIAL}\b")
_NEAR: Final = re.compile(rf"\b(?:{_DENIAL}|without)\b")
# Words that deny the rest of the sentence: "this does not mean that …", "no claim that …", "refuses …".
_META: Final = re.compile(
    rf"\b{_DENIAL}(?: \S+){{0,4}}? (?:sa(?:y|ys|id)|claim\w*|mean\w*|show\w*|impl(?:y|ies)|prov\w*|suggest\w*|promis\w*"
    r"|support\w*|stat\w*|conclud\w*|evidence|read)\b"
    r"|\b(?:refus\w*|forbid\w*|forbidden|reject\w*|prohibit\w*|ban(?:s|ned)?|flag(?:s|ged)?|whether|wrong to)\b"
)
_IS: Final = r"(?:is|are|was|were)"
_AFTERWARDS: Final = re.compile(
    rf"(?: \S+){{0,2}}? (?:(?:may|must) not|cannot|{_IS} (?:not|never|false|wrong|untrue|refused|forbidden))\b"
    rf"|(?: \S+){{0,8}}? {_IS} (?:no claim|not (?:a claim|claimed|shown|said|measured|meant))\b"
    r"|(?: \S+){0,8}? do(?:es)? not (?:follow|say|mean|show|imply)\b"
)
_TURN: Final = re.compile(r".*\b(?:but|yet|however|instead|nevertheless)\b", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Offence:
    """A sentence that claims too much; ``words`` are those words of the file that break the rule."""

    line: int
    column: int
    rule: str
    words: str
    reason: str
    instead: str

    def __str__(self) -> str:
        place = f"{self.line}:{self.column}: {self.rule}"
        return f"{place}: “{printable(self.words)}”: {self.reason}\n  instead: {self.instead}"


def lint_file(path: Path) -> list[Offence]:
    """Find every offence of a file, in the order of the text; HTML is recognised by the file's name or first words."""
    text = path.read_text(encoding="utf-8", errors="replace")
    is_html = path.suffix.lower() in {".html", ".htm"} or text[:200].lstrip().lower().startswith(("<!doctype", "<html"))
    return lint_text(text, is_html=is_html)


def lint_text(text: str, *, is_html: bool = False) -> list[Offence]:
    lines = [0, *(match.end() for match in re.finditer("\n", text))]
    return [
        _make_offence(text, lines, rule, begin, end)
        for sentence in read_sentences(text, is_html=is_html)
        if not sentence.is_question
        for rule in RULES
        for begin, end in _find(rule, sentence)
    ]


def _make_offence(text: str, lines: list[int], rule: Rule, begin: int, end: int) -> Offence:
    line = bisect_right(lines, begin)
    words = " ".join(text[begin:end].split())
    return Offence(
        line=line,
        column=begin - lines[line - 1] + 1,
        rule=rule.name,
        words=words if len(words) <= MAX_EXCERPT else f"{words[:MAX_EXCERPT]}…",
        reason=rule.reason,
        instead=rule.instead,
    )


def _find(rule: Rule, sentence: Sentence) -> Iterator[tuple[int, int]]:
    words = sentence.words
    if rule.unless is not None and rule.unless.search(words):
        return
    for pattern in (*rule.patterns, *rule.absolute):
        for match in pattern.finditer(words):
            if not _is_denied(words, match, is_absolute=pattern in rule.absolute):
                last = words.rfind(" ", 0, match.end()) + 1
                yield sentence.source(match.start()), sentence.source(last) + match.end() - last
                return


def _is_denied(words: str, match: re.Match[str], *, is_absolute: bool) -> bool:
    before = words[max(0, match.start() - CONTEXT) : match.start()]
    turn = _TURN.match(before)
    before = before[turn.end() :] if turn else before
    if _META.search(before) or _AFTERWARDS.match(words, match.end()):
        return True
    if is_absolute:
        return False
    near = " ".join(before.rpartition(",")[2].split()[-NEAR_WORDS:])
    return bool(_DENIED.search(match[0]) or _NEAR.search(near))
