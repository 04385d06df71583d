"""Imports point one way: a module imports only from layers named above its own (docs/structure.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests import ROOT

PACKAGE = ROOT / "rlk_repro"
# What reads a bundle: this kernel imports nothing of the rest, so that evidence can be read for ever.
KERNEL = (
    *("base", "loss_options", "operators", "sources", "switches", "spec", "schedule", "rundir", "statistics", "logs"),
    *("plan", "division", "rundir.differences", "bundle", "analysis"),
)
# A layer is a folder or a module; of two that fit a module the longer name is its layer.
LAYERS = (
    *KERNEL,
    *(
        "prediction",
        "probes",
        "prepare",
        "workloads",
        "images",
        "image_check",
        "clusters.profiles",
        "clusters.api",
        "agent",
    ),
    *("clusters", "report", "submit", "replay", "cli", "job"),
)
# What runs inside a trainer, or is one: no layer imports these.
ASIDE = {
    "integration": {"base", "loss_options", "operators", "refengine", "rundir", "schedule", "switches"},
    "refengine": {"base", "schedule", "spec", "switches"},
    "bench": {"base", "integration", "loss_options", "operators", "probes", "refengine", "rundir", "sources", "spec",
              "switches", "workloads"},
}  # fmt: skip


def find_layer(name: str) -> str:
    fitting = [layer for layer in (*LAYERS, *ASIDE) if name == layer or name.startswith(f"{layer}.")]
    assert fitting, f"{name} is in no layer of tests/test_layers.py: give it one"
    return max(fitting, key=len)


def find_file(name: str) -> bool:
    path = PACKAGE / name.replace(".", "/")
    return bool(name) and (path.is_dir() or path.with_suffix(".py").is_file())


def list_imports() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        if "_data" in path.parts or name in {"__init__", "__main__"}:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] != "rlk_repro":
                continue
            for alias in node.names:
                target = f"{node.module}.{alias.name}".removeprefix("rlk_repro.")
                if find_file(target) or find_file(target.rpartition(".")[0]):
                    yield name, target


def is_allowed(layer: str, wanted: str) -> bool:
    allowed = ASIDE[layer] if layer in ASIDE else LAYERS[: LAYERS.index(layer)]
    return wanted == layer or wanted in allowed


def test_every_module_imports_only_from_above_and_the_kernel_from_itself() -> None:
    wrong = [
        f"{name} imports {target}"
        for name, target in list_imports()
        if not is_allowed(find_layer(name), find_layer(target))
    ]
    assert wrong == []


def test_routes_need_the_operators_alone() -> None:
    routed = (target for name, target in list_imports() if name.startswith("integration.route."))
    found = {find_layer(target) for target in routed if not target.startswith("integration.route")}
    assert found <= {"loss_options", "operators"}
