"""Run by test_vime_arguments with vime and Megatron-LM on the path: vime's own ``parse_args`` on lists of arguments.

Reads ``[[name, argv, env, major], …]`` as JSON from stdin, with the environment and the major compute capability of the
GPU that a list is for, and prints ``{"stand_ins": […], "results": {name: …}}``.  A result holds ``error``, what the
parser or a check of vime or Megatron-LM said; ``ignored``, the flags that none of vime's parsers knows; ``values``, the
resulting namespace as text.  What is not installed, and the GPU where there is none, is stood in for and named.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any
from unittest import mock


class Config:
    """Of a model folder: its config.json as attributes, as transformers' AutoConfig gives them."""

    @classmethod
    def from_pretrained(cls, folder: str, **_: Any) -> Config:
        config = cls()
        vars(config).update(json.loads((Path(folder) / "config.json").read_text()))
        return config


class NoArguments:
    """For vLLM's and the router's classes that add flags: only the two that vime itself reads without looking."""

    @staticmethod
    def add_cli_args(parser: Any, **options: Any) -> Any:
        if not options and not any(action.dest == "vllm_data_parallel_size" for action in parser._actions):
            parser.add_argument("--data-parallel-size", type=int, default=1)
            parser.add_argument("--pipeline-parallel-size", type=int, default=1)
        return parser


class Anything(types.ModuleType):
    """A module whose every name is a class that takes everything and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda *_, **__: None})


STAND_INS: dict[str, dict[str, Any]] = {
    "transformers": {"AutoConfig": Config},
    "vllm.engine.arg_utils": {"AsyncEngineArgs": NoArguments},
    "vllm.utils.argparse_utils": {"FlexibleArgumentParser": argparse.ArgumentParser},
    "vllm.entrypoints.openai.cli_args": {"FrontendArgs": NoArguments},
    "vllm_router.launch_router": {"RouterArgs": NoArguments},
    "wandb": {},
    "httpx": {},
    "requests": {},
    "six": {},
    "omegaconf": {},
    "regex": {},
}


def install_stand_ins() -> list[str]:
    installed = []
    absent = {name for name in {name.partition(".")[0] for name in STAND_INS} if importlib.util.find_spec(name) is None}
    for name, values in STAND_INS.items():
        parts = name.split(".")
        if parts[0] not in absent:
            continue
        installed.append(name)
        for number in range(len(parts)):
            module = sys.modules.setdefault(prefix := ".".join(parts[: number + 1]), Anything(prefix))
            module.__path__ = []
            if number:
                setattr(sys.modules[".".join(parts[:number])], parts[number], module)
            module.__spec__ = importlib.util.spec_from_loader(prefix, loader=None)
        vars(sys.modules[name]).update(values)
    return installed


def stand_in_for_gpu(major: int) -> None:
    """Megatron-LM asks which architecture it runs on before it believes some of its arguments."""
    torch = importlib.import_module("torch")
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=major, minor=0)


def parse(argv: list[str], parse_args: Any) -> dict[str, Any]:
    """One argument list through vime's parser and its checks, with what every parser left over."""
    left: list[set[str]] = []
    read = argparse.ArgumentParser.parse_known_args

    def watch(self: Any, *args: Any, **kwargs: Any) -> Any:
        found, rest = read(self, *args, **kwargs)
        left.append({word for word in rest if word.startswith("--")})
        return found, rest

    sys.argv = ["train.py", *argv]
    argparse.ArgumentParser.parse_known_args = watch  # type: ignore[method-assign]
    with tempfile.TemporaryFile("w+") as said:  # a real file: what is parsed may ask for its number
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                values = {name: str(value) for name, value in vars(parse_args()).items()}
        except (Exception, SystemExit) as error:  # noqa: BLE001
            said.seek(0)
            return {"error": f"{type(error).__name__}: {error} {said.read()[-500:]}"}
        finally:
            argparse.ArgumentParser.parse_known_args = read  # type: ignore[method-assign]
    return {"error": None, "ignored": sorted(set.intersection(*left)), "values": values}


def main() -> None:
    lists = json.load(sys.stdin)
    stand_ins = install_stand_ins()
    if "vllm.engine.arg_utils" not in stand_ins:
        platforms: Any = importlib.import_module("vllm.platforms")
        if platforms.current_platform.is_unspecified():  # no GPU here: vLLM's own CPU platform
            platforms._current_platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform()
    from vime.utils.arguments import parse_args

    has_gpu = importlib.import_module("torch").cuda.is_available()
    results = {}
    for name, argv, env, major in lists:
        if not has_gpu:
            stand_in_for_gpu(major)
        with mock.patch.dict(os.environ, env):
            results[name] = parse(argv, parse_args)
    if not has_gpu:
        stand_ins.append("the GPU's architecture")
    sys.stdout.write("\n" + json.dumps({"stand_ins": stand_ins, "results": results}) + "\n")


if __name__ == "__main__":
    main()
