"""Run by test_prepare_kills with Megatron-LM on the path: the conversion tool's parser on lists of arguments.

Reads ``{"tool": PATH, "lists": {name: argv}}`` as JSON from stdin, prints name to the parser's complaint, "" for none.
Of the tool only the function that adds its arguments runs: the rest of it needs a GPU.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from tests.support.vime_parser import install_stand_ins


def load_adder(tool: Path) -> Any:
    tree = ast.parse(tool.read_text())
    names = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    scope: dict[str, Any] = {}
    exec(compile(ast.Module([names["add_convertion_args"]], []), str(tool), "exec"), scope)
    return scope["add_convertion_args"]


def main() -> None:
    question = json.load(sys.stdin)
    install_stand_ins()  # of what Megatron-LM imports and its arguments do not need
    from megatron.training.arguments import parse_args

    add = load_adder(Path(question["tool"]))
    answers = {}
    for name, argv in question["lists"].items():
        sys.argv = [question["tool"], *argv]
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                parse_args(add)
            answers[name] = ""
        except SystemExit:
            answers[name] = said.getvalue().strip().splitlines()[-1]
    sys.stdout.write("\n" + json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
