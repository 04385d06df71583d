"""Parse hand-written YAML into plain data; every problem names its line.

Scalars follow the YAML 1.2 core schema, so that ``1e-6`` is a number, and ``no`` and ``1:30`` are text. Anchors, tags
and duplicate keys are refused, because a reader can misread a file that uses them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import yaml

from rlk_repro.base.errors import Problem, SpecError, shorten

Path_: TypeAlias = "tuple[str | int, ...]"

MAX_BYTES: Final = 1 << 16  # ten times the largest shipped file; to parse so many bytes takes about a second
MAX_DEPTH: Final = 40
MAX_SHOWN: Final = 40

_INT: Final = re.compile(r"[-+]?[0-9]{1,40}\Z|0x[0-9a-fA-F]{1,16}\Z")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,4})?\Z")
_NOT_FINITE: Final = re.compile(r"[-+]?\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z")
_CONSTANTS: Final[dict[str, Any]] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip


@dataclass(frozen=True)
class YamlSource:
    name: str
    value: Any
    lines: dict[Path_, int] = field(default_factory=dict)  # counted from 1

    def where(self, path: Path_) -> str:
        """Return a place like ``jobs/x.yaml:12: measure.pairs``; a missing path gets the line of its nearest parent."""
        dotted = format_path(path)
        shown = path
        while shown and shown not in self.lines:
            shown = shown[:-1]
        line = self.lines.get(shown)
        place = self.name if line is None else f"{self.name}:{line}"
        return f"{place}: {dotted}" if dotted else place


def format_path(path: Path_) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def parse_yaml(name: str, data: bytes) -> YamlSource:
    """Parse one document; raise SpecError for text that is not UTF-8, not YAML, or uses a refused construct."""
    if len(data) > MAX_BYTES:
        raise SpecError(Problem(name, "file is too large", got=len(data), expected=f"at most {MAX_BYTES} bytes"))
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise SpecError(Problem(f"{name}:{line}", "not UTF-8 text", expected="UTF-8")) from None
    try:
        _check_events(name, text)
        node = yaml.compose(text, Loader=yaml.CSafeLoader)
    except yaml.YAMLError as error:
        raise SpecError(_describe(name, error)) from None
    builder = _Builder(name)
    value = builder.build(node, ()) if node is not None else None
    if builder.problems:
        raise SpecError(*builder.problems)
    return YamlSource(name, value, builder.lines)


def parse_scalar(text: str) -> Any:
    return parse_yaml("value", text.encode("utf-8", errors="surrogateescape")).value


def _check_events(name: str, text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        line = event.start_mark.line + 1 if event.start_mark is not None else 0
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise SpecError(
                Problem(f"{name}:{line}", "anchors and aliases are not allowed", expected="the value itself")
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise SpecError(Problem(f"{name}:{line}", "nested too deeply", expected=f"at most {MAX_DEPTH} levels"))


def _describe(name: str, error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    where = name if mark is None else f"{name}:{mark.line + 1}"
    reason = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable"
    return Problem(where, f"not YAML ({reason})", expected="one YAML document")


class _Builder:
    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[Path_, int] = {}
        self.problems: list[Problem] = []

    def build(self, node: yaml.Node, path: Path_) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        if not node.tag.startswith("tag:yaml.org,2002:") or "python" in node.tag:
            self._refuse(path, f"tag {node.tag} is not allowed", "a plain value")
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: Path_) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._refuse(path, "a key must be text", "a name")
                continue
            key = key_node.value
            inner = (*path, key)
            if key in result:
                first = self.lines[inner]
                self.problems.append(
                    Problem(f"{self.name}:{key_node.start_mark.line + 1}: {format_path(inner)}",
                            f"key given twice (first on line {first})", expected="one value")
                )  # fmt: skip
                continue
            self.lines[inner] = key_node.start_mark.line + 1
            result[key] = self.build(value_node, inner)
        return result

    def _scalar(self, node: yaml.Node, path: Path_) -> Any:
        text = str(node.value)
        if any("\ud800" <= character <= "\udfff" for character in text):
            self._refuse(path, "text holds a lone surrogate", "valid Unicode")
            return None
        if getattr(node, "style", None):  # quoted and block scalars are text, even if they look like numbers
            return text
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if _INT.match(text):
            return int(text, 16) if text.startswith("0x") else int(text)
        if _NOT_FINITE.match(text):
            self._refuse(path, f"{text} is not a finite number", "a finite number")
            return None
        if _FLOAT.match(text):
            number = float(text)
            if math.isfinite(number):
                return number
            self._refuse(path, f"{shorten(text, MAX_SHOWN)} is too large", "a finite number")
            return None
        return text

    def _refuse(self, path: Path_, what: str, expected: str) -> None:
        place = YamlSource(self.name, None, self.lines).where(path)
        self.problems.append(Problem(place, what, expected=expected))
