"""Identify the code that ran in a bundle's trials: sources of vime, Megatron-LM and RL-Kernel, and chosen operators."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlk_repro.analysis.transport import find_network
from rlk_repro.base.files import load_record
from rlk_repro.base.findings import Finding, Level
from rlk_repro.logs.ops import read_decisions
from rlk_repro.operators import COMPILED_LOGP
from rlk_repro.plan import Plan
from rlk_repro.rundir.manifest import Manifest, load_manifests
from rlk_repro.rundir.paths import RunDir, TrialDir
from rlk_repro.sources import PINNED, RL_KERNEL

SECTIONS: Final = {source.module: source.section for source in PINNED}
PACKAGE_TREE: Final = "package_tree"
SOURCES: Final = "sources"
DECISIONS: Final = "decisions"
IMPLEMENTATION: Final = "implementation"
VERSION: Final = "version"
UNKNOWN: Final = "unversioned"
MISSING: Final = "not recorded"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The code that ran; ``sources`` maps each module to hashes of its Python files; no hash if none is recorded.

    ``decisions`` holds the implementation and the version of each operator that served.
    """

    sources: Mapping[str, frozenset[str]]
    decisions: Mapping[str, frozenset[tuple[str, str]]]
    networks: frozenset[str] = frozenset()


def read_identity(run_dir: RunDir, plan: Plan) -> Identity:
    """Read which code ran: from the libraries that the ranks loaded, else from the manifests of their nodes."""
    folders = [run_dir.trial(trial.name) for trial in plan.trials]
    decisions = _read_decisions(folders)
    paths = [path for folder in folders for path in sorted(folder.libraries.glob("*.json"))]
    records = [record for record in map(load_record, paths) if record]
    loaded = [_read_sources(record) for record in records]
    manifests = load_manifests(run_dir)
    needed = set(plan.run.workload.modules) & set(SECTIONS)
    needed |= {RL_KERNEL.module} if set(decisions) - {COMPILED_LOGP} else set()
    needed |= {module for sources in loaded for module in sources}
    return Identity(
        sources={module: _collect(module, loaded, manifests) for module in sorted(needed)},
        decisions=decisions,
        networks=frozenset(filter(None, map(find_network, records))),
    )


def _read_decisions(folders: Sequence[TrialDir]) -> dict[str, frozenset[tuple[str, str]]]:
    found: dict[str, set[tuple[str, str]]] = {}
    for folder in folders:
        for item in read_decisions(folder):
            if item.is_served:
                found.setdefault(item.op, set()).add((item.implementation, item.version))
    return {op: frozenset(resolved) for op, resolved in sorted(found.items())}


def _read_sources(record: Mapping[str, Any]) -> Mapping[str, str]:
    sources = record.get(SOURCES)
    found = sources.items() if isinstance(sources, dict) else ()
    return {module: tree for module, tree in found if module in SECTIONS and isinstance(tree, str)}


def _collect(module: str, loaded: Sequence[Mapping[str, str]], manifests: Sequence[Manifest]) -> frozenset[str]:
    trees = {sources[module] for sources in loaded if module in sources}
    described = (_read_package_tree(module, manifest) for manifest in manifests)
    return frozenset(trees or {tree for tree in described if tree is not None})


def _read_package_tree(module: str, manifest: Manifest) -> str | None:
    facts = manifest.sections.get("code", {}).get(SECTIONS[module])
    tree = facts.get(PACKAGE_TREE) if isinstance(facts, dict) else None
    return tree if isinstance(tree, str) else None


def compare_identities(old: Identity, new: Identity) -> list[Finding]:
    """Return a blocking finding for different values, and a warning for a missing value."""
    return [*_compare_sources(old, new), *_compare_decisions(old, new), *_compare_networks(old, new)]


def find_source_drift(
    recorded: Identity, here: Manifest, known: Iterable[Finding], left_out: Collection[str] = ()
) -> list[Finding]:
    """Return a finding for each module whose sources on this machine differ from the sources that ran.

    Modules in ``left_out`` are not compared, because a replay imports them from other folders than ``here`` records.
    """
    places = {finding.where for finding in known}
    findings = []
    for module, trees in recorded.sources.items():
        if module in left_out:
            continue
        where, now = f"code.{SECTIONS[module]}.{PACKAGE_TREE}", _read_package_tree(module, here)
        if where not in places and trees and now is not None and trees != {now}:
            findings.append(Finding(Level.BLOCKING, where, ", ".join(sorted(trees)), now))
    return findings


def _compare_sources(old: Identity, new: Identity) -> Iterator[Finding]:
    for module in sorted(old.sources.keys() | new.sources.keys()):
        was, now = (side.sources.get(module, frozenset()) for side in (old, new))
        if not was or was != now:
            yield _describe(f"{SOURCES}.{module}", was, now)


def _compare_networks(old: Identity, new: Identity) -> Iterator[Finding]:
    """Bundles of one node and older bundles record no network."""
    if old.networks and new.networks and old.networks != new.networks:
        yield _describe("transport", old.networks, new.networks)


def _compare_decisions(old: Identity, new: Identity) -> Iterator[Finding]:
    """Compare versions of operators only if RL-Kernel's source files are unknown or differ."""
    has_same_files = bool(files := old.sources.get(RL_KERNEL.module)) and files == new.sources.get(RL_KERNEL.module)
    for op in sorted(old.decisions.keys() | new.decisions.keys()):
        where = f"{DECISIONS}.{op}"
        if op not in old.decisions or op not in new.decisions:
            was, now = (frozenset(name for name, _ in side.decisions.get(op, ())) for side in (old, new))
            yield Finding(Level.BLOCKING, where, ", ".join(sorted(was)) or "none", ", ".join(sorted(now)) or "none")
            continue
        for place, field in enumerate((IMPLEMENTATION,) if has_same_files else (IMPLEMENTATION, VERSION)):
            was, now = (_list_known(item[place] for item in side.decisions[op]) for side in (old, new))
            if was != now:
                yield _describe(f"{where}.{field}", was, now)


def _list_known(values: Iterable[str]) -> frozenset[str]:
    return frozenset(value for value in values if not value.startswith(UNKNOWN))


def _describe(where: str, was: frozenset[str], now: frozenset[str]) -> Finding:
    texts = (", ".join(sorted(values)) or MISSING for values in (was, now))
    return Finding(Level.BLOCKING if was and now else Level.WARNING, where, *texts)
