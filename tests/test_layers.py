"""Imports point one way: a module imports only from rows printed above its own (docs/design/structure.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "rlk_repro"

# Patterns of module names by row; the first match decides.  Modules of one row may import each other only where
# the later one in a line imports the earlier one.
ROWS: tuple[tuple[str, ...], ...] = (
    ("rlk_repro", "escapes", "errors"),
    ("units", "clock", "findings", "disk", "files", "trees", "places", "proc", "procfs", "git"),
    ("rundir", "rollout_files", "known_values", "secrets", "operators", "yamlfile", "resources", "wording"),
    ("spec", "specfile", "manifest", "results", "store", "console"),
    (
        *("contracts", "prepared", "plan", "contents", "gzip_stream", "checksums", "archive", "probes", "logs"),
        *("stats", "power", "gates"),
    ),
    (
        "verdict",
        "trials",
        "bundle",
        "sbatch",
        "k8s",
        "backends",
        "workloads",
        "operator_table",
        "allocations",
        "analysis",
        "claims",
        "schemas",
    ),
    (
        "stage",
        "checkouts",
        "doctor",
        "consent",
        "planview",
        "verify",
        "identity",
        "compare",
        "authored",
        "report",
        "images",
        "image_check",
        "job",
        "prepare",
        "pod",
        "sites",
        "launch",
        "recorded",
        "replay",
    ),
    ("cli", "__main__"),
)
ASIDE = {
    "integration": {
        *("disk", "errors", "files", "operators", "procfs", "rollout_files", "rundir", "trees", "units", "refengine"),
    },
    "refengine": {"errors"},
    # the processes of the module and operator tiers
    "bench": {
        *("checkouts", "claims", "errors", "files", "integration", "manifest", "operators", "probes", "refengine"),
        *("results", "rundir", "spec", "units"),
    },
}
TORCH_ALLOWED = ("integration", "refengine", "bench")


def _name(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "rlk_repro"


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "rlk_repro":
                yield from (f"rlk_repro.{alias.name}" for alias in node.names)
            else:
                yield node.module


def _place(name: str) -> tuple[int, int]:
    top = name.partition(".")[0]
    for row, members in enumerate(ROWS):
        if top in members:
            return row, members.index(top)
    raise AssertionError(f"{name} is in no row of tests/test_layers.py: give it one")


def _modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "_data" not in path.parts)


def test_every_module_imports_only_from_above() -> None:
    wrong = []
    for path in _modules():
        name = _name(path)
        top = name.split(".")[0]
        for imported in _imports(path):
            if not imported.startswith("rlk_repro.") or imported.split(".")[1] in (top, "__version__"):
                continue
            target = imported.removeprefix("rlk_repro.")
            if top in ASIDE:
                is_fine = target.split(".")[0] in ASIDE[top]
            else:
                is_fine = target.split(".")[0] not in ASIDE and _place(target) < _place(name)
            if not is_fine:
                wrong.append(f"{name} imports {target}")
    assert wrong == []


def test_torch_stays_with_the_trainers() -> None:
    wrong = [
        _name(path)
        for path in _modules()
        if _name(path).split(".")[0] not in TORCH_ALLOWED
        for imported in _imports(path)
        if imported.split(".")[0] == "torch"
    ]
    assert wrong == []


def test_modules_stay_small() -> None:
    assert [
        f"{_name(path)}: {lines}" for path in _modules() if (lines := len(path.read_text().splitlines())) > 400
    ] == []
