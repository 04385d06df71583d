"""Imports point one way: a module imports only from layers named above its own (docs/structure.md)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests import ROOT

PACKAGE = ROOT / "rlk_repro"

# A layer is a folder or a module of the package; of two that fit a module the longer name is its layer.  Modules of one
# layer may import each other.
LAYERS = (
    "base",
    "loss_options",
    "operators",
    "sources",
    "switches",
    "spec",
    "rundir",
    "probes",
    "statistics",
    "logs",
    "schedule",
    "plan",
    "bundle",
    "prepare",
    "workloads",
    "analysis",
    "images",
    "image_check",
    "clusters.profiles",
    "clusters.api",
    "agent",
    "clusters",
    "report",
    "submit",
    "replay",
    "cli",
    "job",
    "pod",
)
# What runs inside a trainer, or is one: no layer imports these.
ASIDE = {
    "integration": {"base", "loss_options", "operators", "refengine", "rundir", "schedule", "switches"},
    "refengine": {"base", "spec"},
    # the processes of the module and operator tiers
    "bench": {
        "base",
        "integration",
        "loss_options",
        "operators",
        "probes",
        "refengine",
        "rundir",
        "sources",
        "spec",
        "switches",
        "workloads",
    },
}
MOST_TOUCHED = 27
"""Files and folders of all changes that the page lists."""
TORCH_ALLOWED = ("integration", "refengine", "bench")


def _name(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _modules() -> dict[str, Path]:
    return {_name(path): path for path in sorted(PACKAGE.rglob("*.py")) if "_data" not in path.parts}


def _imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a module imports, without the package's name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "rlk_repro":
            inner = node.module.partition(".")[2]
            for alias in node.names:
                full = f"{inner}.{alias.name}".lstrip(".")
                yield full if full in known else inner


def _layer(name: str) -> str:
    fitting = [layer for layer in (*LAYERS, *ASIDE) if name == layer or name.startswith(f"{layer}.")]
    assert fitting, f"{name} is in no layer of tests/test_layers.py: give it one"
    return max(fitting, key=len)


def test_every_module_imports_only_from_above() -> None:
    known = _modules()
    wrong = []
    for name, path in known.items():
        if name in {"", "__main__"}:
            continue
        layer = _layer(name)
        for target in filter(None, _imports(path, known)):
            wanted = _layer(target)
            if wanted == layer:
                continue
            is_fine = wanted in ASIDE[layer] if layer in ASIDE else wanted in LAYERS[: LAYERS.index(layer)]
            if not is_fine:
                wrong.append(f"{name} imports {target}")
    assert wrong == []


def test_the_page_names_every_layer() -> None:
    """``docs/structure.md`` has one line for each folder of the package."""
    text = (ROOT / "docs" / "structure.md").read_text()
    named = set(re.findall(r"^\| `([\w./]+)` \|", text, re.MULTILINE))
    folders = {f"{path.parent.relative_to(PACKAGE).as_posix()}/" for path in PACKAGE.rglob("*.py")} - {"./"}
    assert folders - named == set()


def test_the_files_to_touch_are_there() -> None:
    """The page names, for a dozen kinds of change, files that exist."""
    text = (ROOT / "docs" / "structure.md").read_text()
    changes = text.split("## What to touch")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (?!change|---)(.+?) \| (.+) \| (\d+) \|$", changes, re.MULTILINE)
    assert len(rows) == 12
    named = {name: re.findall(r"`([\w./]+/[\w.]*)`", files) for name, files, _ in rows}
    assert [name for name, _, number in rows if len(named[name]) > int(number)] == []
    assert sum(int(number) for _, _, number in rows) <= MOST_TOUCHED
    assert [name for name, files in named.items() if not files] == []
    assert [path for files in named.values() for path in files if not (ROOT / path).exists()] == []


def test_torch_stays_with_the_trainers() -> None:
    wrong = [
        name
        for name, path in _modules().items()
        if name.split(".")[0] not in TORCH_ALLOWED and re.search(r"^\s*(import|from) torch\b", path.read_text(), re.M)
    ]
    assert wrong == []


def test_modules_stay_small() -> None:
    assert [
        f"{name}: {lines}" for name, path in _modules().items() if (lines := len(path.read_text().splitlines())) > 400
    ] == []


def test_only_workloads_and_spec_ask_what_kind_a_workload_is() -> None:
    asks = re.compile(r"isinstance\([^()]*, [^()]*\b\w+Workload\b")
    found = [name for name, path in _modules().items() if asks.search(path.read_text())]
    assert [name for name in found if _layer(name) not in {"spec", "workloads"}] == []


def test_layers_that_serve_any_workload_name_none() -> None:
    """What they must call by its name comes from the workload, or from the tables of sources and results."""
    found = [
        path.relative_to(PACKAGE).as_posix()
        for layer in ("agent", "clusters", "probes", "report")
        for path in sorted((PACKAGE / layer).rglob("*"))
        if path.is_file() and path.suffix != ".pyc" and re.search("vime", path.read_text(), re.IGNORECASE)
    ]
    assert found == []


def test_routes_need_the_operators_alone() -> None:
    known = _modules()
    found = {
        imported
        for name, path in known.items()
        if name.startswith("integration.route.")
        for imported in _imports(path, known)
        if not imported.startswith("integration.route")
    }
    assert found == {"operators"}
