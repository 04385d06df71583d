"""What ran in a bundle's trials: which sources of vime, Megatron-LM and RL-Kernel, and what each operator resolved to.

Two results of the same bits prove nothing of each other where other code made them, or where nobody knows which did.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.files import load_json
from rlk_repro.base.findings import Finding, Level
from rlk_repro.logs.ops import read_decisions
from rlk_repro.plan import Plan
from rlk_repro.rundir.manifest import Manifest, load_manifests
from rlk_repro.rundir.paths import RunDir, TrialDir

# by the module that a trainer imports: where a manifest describes it
SECTIONS: Final = {"vime": "vime", "megatron": "megatron", "rl_engine": "rl_kernel"}
RL_KERNEL: Final = "rl_engine"
PACKAGE_TREE: Final = "package_tree"
SOURCES: Final = "sources"
DECISIONS: Final = "decisions"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """``sources`` are the hashes of each module's Python files; a module that ran and has none is known to nobody.

    ``decisions`` are implementation and version by operator, of the operators that RL-Kernel served.
    """

    sources: Mapping[str, frozenset[str]]
    decisions: Mapping[str, frozenset[tuple[str, str]]]


def read_identity(run_dir: RunDir, plan: Plan) -> Identity:
    """From what the ranks loaded; what they do not say is taken from the manifests of their nodes."""
    folders = [run_dir.trial(trial.name) for trial in plan.trials]
    decisions = _read_decisions(folders)
    loaded = [sources for folder in folders for sources in _read_loaded(folder)]
    needed = set(plan.run.workload.modules) & set(SECTIONS) | ({RL_KERNEL} if decisions else set())
    needed |= {module for sources in loaded for module in sources}
    return Identity(
        sources={module: _collect(module, loaded, run_dir) for module in sorted(needed)}, decisions=decisions
    )


def _read_decisions(folders: Sequence[TrialDir]) -> dict[str, frozenset[tuple[str, str]]]:
    found: dict[str, set[tuple[str, str]]] = {}
    for folder in folders:
        for item in read_decisions(folder):
            if item.is_rl_kernel:
                found.setdefault(item.op, set()).add((item.implementation, item.version))
    return {op: frozenset(resolved) for op, resolved in sorted(found.items())}


def _read_loaded(folder: TrialDir) -> Iterator[Mapping[str, str]]:
    """By rank, of the modules that it had loaded."""
    for path in sorted(folder.libraries.glob("*.json")):
        try:
            value = load_json(path)
        except BundleUnreadable:
            continue
        sources = value.get(SOURCES) if isinstance(value, dict) else None
        if isinstance(sources, dict):
            yield {module: tree for module, tree in sources.items() if module in SECTIONS and isinstance(tree, str)}


def _collect(module: str, loaded: Sequence[Mapping[str, str]], run_dir: RunDir) -> frozenset[str]:
    trees = {sources[module] for sources in loaded if module in sources}
    described = (_read_package_tree(module, manifest) for manifest in load_manifests(run_dir))
    return frozenset(trees or {tree for tree in described if tree is not None})


def _read_package_tree(module: str, manifest: Manifest) -> str | None:
    facts = manifest.sections.get("code", {}).get(SECTIONS[module])
    tree = facts.get(PACKAGE_TREE) if isinstance(facts, dict) else None
    return tree if isinstance(tree, str) else None


def compare_identities(old: Identity, new: Identity) -> list[Finding]:
    """Blocking where other code ran; a warning where one side does not know which did."""
    return [*_compare_sources(old, new), *_compare_decisions(old, new)]


def find_source_drift(recorded: Identity, here: Manifest, known: Iterable[Finding]) -> list[Finding]:
    """Where this machine has other sources than those that ran, as far as ``known`` does not say so already.

    The ranks may have loaded what their node's manifest could not see.
    """
    places = {finding.where for finding in known}
    findings = []
    for module, trees in recorded.sources.items():
        where, now = f"code.{SECTIONS[module]}.{PACKAGE_TREE}", _read_package_tree(module, here)
        if where not in places and trees and now is not None and trees != {now}:
            findings.append(Finding(Level.BLOCKING, where, _name_trees(trees), now))
    return findings


def _compare_sources(old: Identity, new: Identity) -> Iterator[Finding]:
    for module in sorted(old.sources.keys() | new.sources.keys()):
        was, now = (side.sources.get(module, frozenset()) for side in (old, new))
        where = f"{SOURCES}.{module}"
        if not was or not now:
            yield Finding(Level.WARNING, where, _name_trees(was), _name_trees(now))
        elif was != now:
            yield Finding(Level.BLOCKING, where, _name_trees(was), _name_trees(now))


def _name_trees(trees: frozenset[str]) -> str:
    return ", ".join(sorted(trees)) or "not recorded"


def _compare_decisions(old: Identity, new: Identity) -> Iterator[Finding]:
    """Classes always; versions only where the files do not already say that they are the same."""
    has_same_files = bool(files := old.sources.get(RL_KERNEL)) and files == new.sources.get(RL_KERNEL)
    for op in sorted(old.decisions.keys() | new.decisions.keys()):
        sides = [side.decisions.get(op, frozenset()) for side in (old, new)]
        if has_same_files:
            names = [", ".join(sorted({implementation for implementation, _ in side})) for side in sides]
        else:
            names = [", ".join(sorted(f"{name} of {version}" for name, version in side)) for side in sides]
        if names[0] != names[1]:
            yield Finding(Level.BLOCKING, f"{DECISIONS}.{op}", names[0] or "none", names[1] or "none")
