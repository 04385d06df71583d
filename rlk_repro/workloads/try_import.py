"""Print a JSON list of the modules that ``python try_import.py NAME…`` cannot find; use the standard library only.

An empty module replaces each missing module, so the import goes on and finds the next missing module.  Any other error
ends this process as it would end the trainer.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec


class Placeholder(types.ModuleType):
    """An empty module in which every attribute is a class, so that other classes can inherit from it."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Placeholders(MetaPathFinder, Loader):
    def __init__(self) -> None:
        self.names: list[str] = []

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        is_ours = fullname.partition(".")[0] in self.names
        return ModuleSpec(fullname, self, is_package=True) if is_ours else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return Placeholder(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def main() -> None:
    warnings.simplefilter("ignore")
    placeholders = Placeholders()
    sys.meta_path.append(placeholders)
    try:
        while (name := find_missing(sys.argv[1:])) and name not in placeholders.names:
            placeholders.names.append(name)
            forget_half_imported(sys.argv[1:])
    finally:
        sys.stdout.write(f"\n{json.dumps(sorted(placeholders.names))}\n")


def find_missing(names: list[str]) -> str:
    """Return the first top-level module that was not found, or an empty text if all were found."""
    try:
        for name in names:
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not error.name:
            raise
        return error.name.partition(".")[0]
    return ""


def forget_half_imported(names: list[str]) -> None:
    """Remove only the requested packages from ``sys.modules``, because some other modules cannot be imported twice."""
    tops = {name.partition(".")[0] for name in names}
    for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
        del sys.modules[name]


if __name__ == "__main__":
    main()
