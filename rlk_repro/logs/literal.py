"""Read the numbers from a printed Python dict, without evaluating it.

The reader accepts plain numbers, bare ``nan`` and ``inf``, and numpy and torch scalars; it skips other values.
"""

from __future__ import annotations

import re
import sys
from typing import Final

_STRING: Final = r"""(?:'(?:[^'\\\r\n]++|\\.)*+'|"(?:[^"\\\r\n]++|\\.)*+")"""
_NUMBER: Final = r"(?P<{}>[+-]?(?:(?:\d{{1,64}}+(?:\.\d{{0,64}}+)?|\.\d{{1,64}}+)(?:[eE][+-]?\d{{1,8}}+)?+|nan|inf))"
_CALL: Final = r"(?:(?:np|numpy)\.(?:float|u?int)\d*|(?:torch\.)?tensor|array)\("

_KEY: Final = re.compile(rf"\s*(?P<key>{_STRING})\s*:\s*")
_VALUE: Final = re.compile(
    rf"(?:{_NUMBER.format('plain')}"
    rf"|{_CALL}\s*{_NUMBER.format('wrapped')}\s*(?:,[^()\[\]{{}}\r\n]*+)?\)"
    rf"|(?:np\.)?(?:True|False)_?|None|{_STRING})(?=\s*[,}}])",
    re.ASCII,
)
_NESTED: Final = re.compile(rf"""{_STRING}|[^\[\](){{}}'"]++|(?P<open>[\[({{])|(?P<close>[\])}}])""")
_SEPARATOR: Final = re.compile(r"\s*(?P<mark>[,}])")


class NotADict(ValueError):
    """The text is not a dict of the accepted form."""


class CutOff(NotADict):
    """The text ends before the dict ends."""


def read_numbers(text: str) -> tuple[dict[str, float], int]:
    """Read the dict at the start of ``text``: its numbers by key, and the position after its closing brace.

    Raises:
        CutOff: the dict does not end.
        NotADict: the text is not ``'key': value`` pairs, or has a key twice (two dicts mixed by torn writes).
    """
    numbers: dict[str, float] = {}
    seen: set[str] = set()
    position, mark = 1, ","
    while mark == ",":
        key = _KEY.match(text, position)
        if key is None:
            raise _failure(text, position)
        name = sys.intern(key["key"][1:-1])  # saves memory: thousands of rows have the same few keys
        if name in seen:
            raise NotADict
        seen.add(name)
        position, number = _read_value(text, key.end())
        if number is not None:
            numbers[name] = number
        separator = _SEPARATOR.match(text, position)
        if separator is None:
            raise _failure(text, position)
        position, mark = separator.end(), separator["mark"]
    return numbers, position


def _read_value(text: str, start: int) -> tuple[int, float | None]:
    value = _VALUE.match(text, start)
    if value is not None:
        number = value["plain"] or value["wrapped"]
        return value.end(), None if number is None else float(number)
    if text[start : start + 1] in ("[", "(", "{"):
        return _skip_nested(text, start), None
    raise _failure(text, start)


def _skip_nested(text: str, start: int) -> int:
    depth, position = 0, start
    while token := _NESTED.match(text, position):
        position = token.end()
        depth += (token["open"] is not None) - (token["close"] is not None)
        if depth == 0:
            return position
    raise _failure(text, position)


def _failure(text: str, position: int) -> NotADict:
    return CutOff() if text.find("}", position) < 0 else NotADict()
