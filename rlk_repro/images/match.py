"""Compare an image's record with a stack, with the kernels that a run needs, and with the image's present content."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rlk_repro.base.findings import Finding, Level
from rlk_repro.images.record import ARCHITECTURES, ImageRecord, list_symbols
from rlk_repro.operators import OPERATORS, Platform
from rlk_repro.probes.container import PROVENANCE
from rlk_repro.rundir.manifest import Fact, Section, Unknown
from rlk_repro.sources import SECTIONS
from rlk_repro.spec import Stack

SOURCE_FACTS: Final = ("version", "commit", "is_dirty", "diff_sha256")
KERNEL_FACTS: Final = ("is_compiled", "extension", "extension_sha256", "extension_symbols", "tree", "repairs")
DRIVER: Final = "libcuda.so.1"
"""RL-Kernel's extension is linked with this library, which only NVIDIA's driver installs."""
_NOTHING: Final = "nothing"


def match_stack(record: ImageRecord, stack: Stack, platform: str | None = None) -> Iterator[Finding]:
    """Check the image's stack, commits and platform; a machine without GPUs may use the image of any platform."""
    if record.stack != stack.stack:
        yield differs("image.stack", stack.stack, record.stack)
    if platform not in {None, Platform.CPU} and record.platform != platform:
        yield differs("image.platform", str(platform), record.platform)
    for name, pin in stack.pins.items():
        found = record.commits.get(name, _NOTHING)
        if found != pin.commit:
            yield differs(f"image.commits.{name}", pin.commit, found)


def check_kernels(record: ImageRecord) -> Iterator[Finding]:
    facts = _mapping(record.code.get("rl_kernel"))
    return check_extension(facts, record.gpu_platform, record.commits.get("rl_kernel", ""))


def check_extension(
    facts: Mapping[str, Any], platform: Platform, commit: str, architectures: Sequence[str] = ()
) -> Iterator[Finding]:
    """Check that RL-Kernel's extension has its commit's functions, and machine code for these GPUs only.

    Without ``architectures``, the GPUs are those of an image.
    """
    if platform not in ARCHITECTURES:
        return
    symbols, architectures = list_symbols(platform, commit), architectures or ARCHITECTURES[platform]
    if "sm_90a" not in architectures:
        symbols = tuple(name for name in symbols if not name.endswith("_sm90"))
    if facts.get("is_compiled") is not True:
        yield differs("rl_engine._C", "compiled", str(facts.get("is_compiled", _NOTHING)))
        return
    found = _names(facts.get("extension_symbols"))
    missing = [name for name in symbols if name not in found]
    if missing:
        yield differs("rl_engine._C symbols", ", ".join(symbols), f"without {', '.join(missing)}")
    code = facts.get("extension_architectures")
    if sorted(_names(code)) != sorted(architectures):
        yield differs("rl_engine._C architectures", ", ".join(architectures), _show(code))


def check_sources(record: ImageRecord) -> Iterator[Finding]:
    """Check that vime and RL-Kernel have the files of their commits; Megatron-LM may have the patch of vime's image."""
    for pin, name in SECTIONS.items():
        facts = _mapping(record.code.get(name))
        commit = facts.get("commit", Unknown("not recorded"))
        if commit != record.commits.get(pin):
            yield differs(f"code.{name}.commit", record.commits.get(pin, _NOTHING), str(commit))
        if name != "megatron" and facts.get("is_dirty") is not False:
            yield differs(f"code.{name}.is_dirty", "False", str(facts.get("is_dirty")))


def match_running(record: ImageRecord, code: Section) -> Iterator[Finding]:
    yield from _match_packages(_mapping(record.code.get("packages")), _mapping(code.get("packages")))
    for name in SECTIONS.values():
        names = SOURCE_FACTS + KERNEL_FACTS if name == "rl_kernel" else SOURCE_FACTS
        yield from _match_facts(name, names, record.code, code, Level.BLOCKING)
    # a profile may put a newer rlk_repro first on Python's path; the manifest names the version used
    yield from _match_facts("rlk_repro", ("version",), record.code, code, Level.WARNING)


def match_operators(built_for: Platform, commit: str, answer: Mapping[str, Any]) -> Iterator[Finding]:
    """Check which operators RL-Kernel's registry chooses here; without a GPU it chooses native operators."""
    platform = str(answer.get("platform"))
    if platform not in {built_for, Platform.CPU}:
        yield differs("operators.platform", built_for, platform)
        return
    error = str(answer.get("extension_error") or "")
    if error.startswith(DRIVER) and platform == Platform.CPU:
        yield Finding(Level.INFO, "rl_engine._C", "importable", "not tried: this machine has no NVIDIA driver")
    elif error and built_for in ARCHITECTURES:
        yield differs("rl_engine._C", "importable", error)
    for name, class_name in sorted(_mapping(answer.get("operators")).items()):
        accepted = OPERATORS[name].list_offered(platform, commit)
        if accepted and class_name not in {item.class_name for item in accepted}:
            yield differs(f"operators.{name}", " or ".join(item.class_name for item in accepted), str(class_name))


def is_recorded(record: ImageRecord | None, name: str, facts: Mapping[str, Any]) -> bool:
    """Whether ``facts`` and the image's record show the same commit and the same changes of the source ``name``."""
    if record is None:
        return False
    recorded = _mapping(record.code.get(name))
    return all(facts.get(fact) == recorded.get(fact) for fact in ("commit", "is_dirty", "diff_sha256"))


def _match_packages(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Finding]:
    for name in sorted(recorded.keys() | found.keys()):
        if recorded.get(name) != found.get(name):
            yield differs(f"packages.{name}", str(recorded.get(name, _NOTHING)), str(found.get(name, _NOTHING)))


def _match_facts(
    name: str, facts: tuple[str, ...], recorded: Section, found: Section, level: Level
) -> Iterator[Finding]:
    before, now = _mapping(recorded.get(name)), _mapping(found.get(name))
    for fact in facts:
        if isinstance(before.get(fact), Unknown) and isinstance(now.get(fact), Unknown):
            continue
        if before.get(fact) != now.get(fact):
            yield Finding(level, f"code.{name}.{fact}", _show(before.get(fact)), _show(now.get(fact)))


def differs(where: str, expected: str, found: str) -> Finding:
    return Finding(Level.BLOCKING, where, expected, found)


def _show(fact: Fact | None) -> str:
    if isinstance(fact, list):
        return ", ".join(map(str, fact))
    return str(fact or "not recorded")


def _mapping(fact: Any) -> dict[str, Any]:
    return dict(fact) if isinstance(fact, Mapping) else {}


def _names(fact: Any) -> list[str]:
    return [str(item) for item in fact] if isinstance(fact, list) else []


def missing_record(reason: str, where: str = PROVENANCE) -> Finding:
    return differs(where, "the record of an image that rlk-repro built", reason)
