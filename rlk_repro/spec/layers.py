"""Count the layers of Megatron-LM's layer patterns, such as ``[0]*1+[1]*45``, without building the lists."""

from __future__ import annotations

import ast
from typing import Any, NamedTuple


class LayerCount(NamedTuple):
    """How many layers a pattern has, and how many of them it selects with a 1."""

    num_layers: int
    num_chosen: int


def is_layer_pattern(value: Any, num_layers: int) -> bool:
    """Tell whether a value is a layer pattern: a number n for every n-th layer, or a list of ``num_layers`` entries."""
    if isinstance(value, str) and "[" in value:
        found = read_layer_pattern(value)
        return found is not None and found.num_layers == num_layers
    text = str(value)
    return not isinstance(value, bool | float | tuple) and text.isdecimal() and len(text) < 6 and int(text) > 0


def read_layer_pattern(text: str) -> LayerCount | None:
    """Count the layers of a text like ``[0]*3+[1]*45``; return None for a text of another form."""
    try:
        return _count(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _count(node: ast.expr) -> LayerCount:
    match node:
        case ast.List(elts=items):
            values = [item.value if isinstance(item, ast.Constant) else None for item in items]
            if all(type(value) is int and value in {0, 1} for value in values):
                return LayerCount(len(values), values.count(1))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            one, other = _count(left), _count(right)
            return LayerCount(one.num_layers + other.num_layers, one.num_chosen + other.num_chosen)
        case ast.BinOp(left=part, op=ast.Mult(), right=ast.Constant(value=int(times))) if times > 0:
            repeated = _count(part)
            return LayerCount(repeated.num_layers * times, repeated.num_chosen * times)
        case _:
            pass
    raise ValueError("not a pattern of layers")
