"""Record the flags that vime's parsers accept: ``python -m tools.contract VIME MEGATRON [-o FILE]`` writes a contract.

The tool calls the real ``vime.utils.arguments.parse_args``, with Megatron-LM, vLLM and vllm-router as this Python finds
them.  It records every parser that this function builds, and reads no command line.  Nothing needs a GPU.

VIME is a checkout.  MEGATRON is a checkout with vime's own patch applied (``git apply
VIME/docker/patch/latest/megatron.patch``), as in images.  vLLM and the router must be those of the stack.
"""

from __future__ import annotations

import argparse
import enum
import hashlib
import importlib
import importlib.metadata
import json
import math
import sys
from pathlib import Path
from typing import Any

from rlk_repro.base import git

PLAIN = {int: "int", float: "float", str: "text", bool: "bool", json.loads: "json", None: "text"}
PATCH = Path("docker/patch/latest/megatron.patch")
VALUELESS = {"store_true", "store_false", "store_const", "append_const", "BooleanOptionalAction", "help", "version"}


class Done(Exception):
    """The exception that ends vime's ``parse_args`` where the last parser would read the command line."""


def main() -> None:
    arguments = read_command_line()
    sys.path[:0] = [str(arguments.vime), str(arguments.megatron)]
    name_platform()
    parsers, megatron = collect_parsers()
    contract: dict[str, Any] = {
        "schema": 1,
        "vime": arguments.vime_commit or find_commit(arguments.vime),
        "megatron_lm": arguments.megatron_commit or find_commit(arguments.megatron),
        "megatron_patch": check_patch(arguments.vime / PATCH, arguments.megatron),
        "made_with": find_versions(),
        "flags": [
            describe(action, find_owner(action, megatron, own_text(arguments.vime)))
            for parser in parsers
            for action in sorted(parser._actions, key=lambda item: list(item.option_strings))
            if action.option_strings and not isinstance(action, argparse._HelpAction)
        ],
    }
    out = arguments.out or Path(f"manifests/contracts/vime-{contract['vime']}.json")
    out.write_text(render(contract))
    sys.stdout.write(f"{out}: {len(contract['flags'])} flags of {len(parsers)} parsers\n")


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.contract", description=__doc__)
    parser.add_argument("vime", type=Path)
    parser.add_argument("megatron", type=Path)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--vime-commit", help="commit of VIME, if VIME is an unpacked archive")
    parser.add_argument("--megatron-commit")
    return parser.parse_args()


def collect_parsers() -> tuple[list[argparse.ArgumentParser], frozenset[str]]:
    """Return every parser that reads vime's command line, in order, and the flags of Megatron-LM itself."""
    found: list[argparse.ArgumentParser] = []
    megatron: set[str] = set()
    read = argparse.ArgumentParser.parse_known_args

    def take_down(self: argparse.ArgumentParser, *_: Any, **__: Any) -> Any:
        found.append(self)
        if megatron:
            raise Done
        return read(self, [], None)

    def see_megatron(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        megatron.update(flag for action in parser._actions for flag in action.option_strings)
        return parser

    argparse.ArgumentParser.parse_known_args = take_down  # type: ignore[method-assign]
    try:
        importlib.import_module("vime.utils.arguments").parse_args(add_custom_arguments=see_megatron)
    except Done:
        pass
    finally:
        argparse.ArgumentParser.parse_known_args = read  # type: ignore[method-assign]
    return found, frozenset(megatron)


def describe(action: argparse.Action, owner: str) -> dict[str, Any]:
    """Return the facts of one flag that one parser has; keys with their usual value are left out."""
    name = find_action_name(action)
    kind = find_kind(action.type)
    is_alone = action.nargs == 0 or name in VALUELESS
    usual = {"kind": "text", "nargs": None, "choices": None, "default": None, "is_required": False, "takes_value": True}
    described = {
        "kind": kind,
        "nargs": None if is_alone else action.nargs,
        "choices": None if action.choices is None else [find_default(item) for item in action.choices],
        "default": find_default(action.default),
        "is_required": action.required,
        "takes_value": not is_alone,
    }
    kept = {
        key: value for key, value in described.items() if value != usual[key] or type(value) is not type(usual[key])
    }
    return {"flags": list(action.option_strings), "dest": action.dest, "owner": owner, "action": name, **kept}


def find_kind(made: Any) -> str:
    """Return the type of a value; look inside vLLM's wrapper for values that may also be ``None``."""
    if made in PLAIN:
        return str(PLAIN[made])
    closure = getattr(made, "__closure__", None) or ()
    inside = [cell.cell_contents for cell in closure if cell.cell_contents in (int, float, str)]
    return PLAIN[inside[0]] if len(inside) == 1 else "other"


def find_action_name(action: argparse.Action) -> str:
    for name, made in argparse.ArgumentParser()._registries["action"].items():
        if type(action) is made and name is not None:
            return str(name)
    return type(action).__name__


def find_default(value: Any) -> Any:
    """Return a default as JSON; of any other object only the type's name, because its text may name this machine."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return [find_default(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return "(a path)" if value.startswith("/") else value
    return f"({type(value).__name__})"


def own_text(vime: Path) -> str:
    return (vime / "vime" / "backends" / "vllm_utils" / "arguments.py").read_text()


def find_owner(action: argparse.Action, megatron: frozenset[str], own: str) -> str:
    flag = action.option_strings[0]
    if flag in megatron:
        return "megatron"
    if flag.startswith(("--vllm-", "--router-")) and f'"{flag}"' not in own:
        return "router" if flag.startswith("--router-") else "vllm"
    return "vime"


def check_patch(patch: Path, megatron: Path) -> str:
    """Return the sha256 of vime's patch, after a check that the checkout contains the patch."""
    words = ("apply", "--reverse", "--check", "--", str(patch.absolute()))
    if not git.ask_git(megatron, *words, timeout_s=60.0).is_ok:
        sys.exit(f"{megatron}: {patch} is not applied")
    return hashlib.sha256(patch.read_bytes()).hexdigest()


def find_commit(checkout: Path) -> str:
    answer = git.ask_git(checkout, "rev-parse", "HEAD", timeout_s=60.0)
    if not answer.is_ok:
        sys.exit(f"{checkout}: is no git checkout; give its commit by --vime-commit or --megatron-commit")
    return answer.stdout.strip()


def find_versions() -> dict[str, str]:
    names = ("torch", "transformers", "vllm", "vllm-router")
    return {"python": sys.version.split()[0], **{name: importlib.metadata.version(name) for name in names}}


def name_platform() -> None:
    """Set vLLM's platform to CPU, because without a GPU vLLM finds no platform and cannot build its defaults."""
    platforms = importlib.import_module("vllm.platforms")
    if platforms.current_platform.is_unspecified():
        platforms._current_platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform()  # type: ignore[attr-defined]


def render(contract: dict[str, Any]) -> str:
    """Write one line per flag, so that a diff of two contracts is readable."""
    head = {key: value for key, value in contract.items() if key != "flags"}
    lines = [json.dumps(flag, ensure_ascii=False) for flag in contract["flags"]]
    return json.dumps(head, indent=1)[:-2] + ',\n "flags": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


if __name__ == "__main__":
    main()
