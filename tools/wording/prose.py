"""Split text, Markdown or HTML into sentences of lower-case words with their positions.

Hyphens, slashes, underscores and markup only separate words, so ``RL-Kernel``, ``rl_kernel`` and ``RL-**Kernel**`` are
the same two words.  The time grows in proportion to the length of the text, also for very long lines.
"""

from __future__ import annotations

import html
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from typing import Final

EXAMPLE_BEGIN: Final = "<!-- wording: example -->"
EXAMPLE_END: Final = "<!-- /wording: example -->"
EXAMPLE_FENCE: Final = "wording-example"
"""The linter skips a fenced block with this word in its first line."""
MAX_WORD: Final = 40

_BREAK: Final = "\x1e"
_SPECIAL: Final = re.compile(
    r"(?P<comment><!--)|<(?P<raw>script|style)\b|</?(?P<tag>[a-zA-Z][a-zA-Z0-9]*)\b[^<>]*>|(?P<link>\]\([^()\n]*\))"
    r"|(?P<entity>&#?[0-9a-zA-Z]{1,10};)|(?P<quote>’)|(?P<invisible>[\u00ad\u200b-\u200f\u2060\ufeff])",
)
_READ_AS: Final = {"link": "]", "quote": "'", "invisible": ""}
_INLINE: Final = frozenset(
    {"a", "abbr", "b", "code", "del", "em", "i", "img", "ins", "kbd", "mark", "s", "small", "span", "strong"}
    | {"sub", "sup", "tspan", "u", "wbr"}
)
_FENCE: Final = re.compile(r"^ {0,3}(?P<mark>`{3,}|~{3,})(?P<info>[^\n]*)$", re.MULTILINE)
_BOUNDARY: Final = re.compile(rf"{_BREAK}|[|;\n]|[.!?](?=[\s\"'’”)\]*_|{_BREAK}]|\Z)")
_STRUCTURE: Final = re.compile(r"[ \t]*(?:\n|\Z|[-*+#>] |[0-9]{1,3}[.)] |```|~~~)")
_ABBREVIATIONS: Final = ("e.g", "i.e", " vs", " cf", "approx")
_WORD: Final = re.compile(r"[+,]|[^\W_](?:[^\W_]|['.×%])*")


@dataclass(frozen=True)
class Sentence:
    """The words of one sentence, joined by single spaces.

    ``starts`` are the positions of the words in ``words``, and ``sources`` their positions in the file.
    """

    words: str
    starts: tuple[int, ...]
    sources: tuple[int, ...]
    is_question: bool

    def source(self, position: int) -> int:
        """Return the place in the file of the word at ``position`` of ``words``."""
        return self.sources[bisect_right(self.starts, position) - 1]


def read_sentences(text: str, *, is_html: bool = False) -> Iterator[Sentence]:
    plain = _Plain(text, is_html=is_html)
    begin = 0
    for end, terminator in _find_ends(plain.text):
        sentence = _make_sentence(plain, begin, end, is_question=terminator == "?")
        if sentence is not None:
            yield sentence
        begin = end + 1


class _Plain:
    def __init__(self, text: str, *, is_html: bool) -> None:
        self._pieces: list[str] = []
        self._begins: list[int] = []
        self._sources: list[int] = []
        self._length = 0
        done = 0
        for begin, end, replacement in _find_markup(text, is_html=is_html):
            self._add(text[done:begin], done)
            self._add(replacement, begin)
            done = end
        self._add(text[done:], done)
        self.text = "".join(self._pieces)

    def _add(self, piece: str, source: int) -> None:
        if piece:
            self._pieces.append(piece)
            self._begins.append(self._length)
            self._sources.append(source)
            self._length += len(piece)

    def source(self, position: int) -> int:
        index = bisect_right(self._begins, position) - 1
        return self._sources[index] + position - self._begins[index]


def _find_markup(text: str, *, is_html: bool) -> Iterator[tuple[int, int, str]]:
    """Yield begin, end and replacement of each piece of markup, in order and without overlap."""
    cutter = _Cutter(text)
    found = merge([] if is_html else _find_example_fences(text), map(cutter.cut, _SPECIAL.finditer(text)))
    done = 0
    for begin, end, replacement in found:
        if begin >= done and end > begin:
            yield begin, end, replacement
            done = end


class _Cutter:
    def __init__(self, text: str) -> None:
        self._text = text
        self._missing: set[str] = set()

    def cut(self, match: re.Match[str]) -> tuple[int, int, str]:
        begin, end, kind = match.start(), match.end(), match.lastgroup
        if kind == "comment":
            return begin, self._end_of_comment(begin), _BREAK
        if kind == "raw":
            return begin, self._find_end(f"</{match['raw']}", end), _BREAK
        if kind == "tag":
            return begin, end, "" if match["tag"].lower() in _INLINE else _BREAK
        return begin, end, html.unescape(match[0]) if kind == "entity" else _READ_AS[kind or ""]

    def _end_of_comment(self, begin: int) -> int:
        if self._text.startswith(EXAMPLE_BEGIN, begin):
            end = self._find_end(EXAMPLE_END, begin)
            if end > begin:
                return end
        return self._find_end("-->", begin)

    def _find_end(self, mark: str, begin: int) -> int:
        """Return the position after the next ``mark``, or ``begin`` without one: unclosed markup is plain text."""
        # one search for a missing mark, so that a text of unclosed comments is read fast
        found = -1 if mark in self._missing else self._text.find(mark, begin)
        if found < 0:
            self._missing.add(mark)
            return begin
        return found + len(mark)


def _find_example_fences(text: str) -> list[tuple[int, int, str]]:
    spans: list[tuple[int, int, str]] = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence["mark"].startswith(opened["mark"]) and not fence["info"].strip():
            if EXAMPLE_FENCE in opened["info"].split():
                spans.append((opened.start(), fence.end(), _BREAK))
            opened = None
    return spans


def _find_ends(text: str) -> Iterator[tuple[int, str]]:
    """Find the ends of sentences, with the character that ends them."""
    line_begin = 0
    for match in _BOUNDARY.finditer(text):
        place, character = match.start(), match[0]
        if character == "\n":
            is_heading = text.startswith("#", line_begin)
            line_begin = place + 1
            if is_heading or _STRUCTURE.match(text, place + 1):
                yield place, character
        elif character != "." or not text[max(0, place - 6) : place].lower().endswith(_ABBREVIATIONS):
            yield place, character
    yield len(text), ""


def _make_sentence(plain: _Plain, begin: int, end: int, *, is_question: bool) -> Sentence | None:
    words, starts, sources = [], [], []
    length = 0
    for match in _WORD.finditer(plain.text, begin, end):
        word = match[0].rstrip(".'").lower()[:MAX_WORD]
        words.append(word)
        starts.append(length)
        sources.append(plain.source(match.start()))
        length += len(word) + 1
    return Sentence(" ".join(words), tuple(starts), tuple(sources), is_question) if words else None
