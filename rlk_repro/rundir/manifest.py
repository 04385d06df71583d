"""Define manifests, which hold the facts of one node, and how much a difference between two manifests matters.

A fact is a plain JSON value or ``Unknown`` with a reason; in JSON an unknown fact is the object ``{"unknown":
"reason"}``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeAlias

from rlk_repro.base.errors import BundleUnreadable, Problem, shorten
from rlk_repro.base.files import check_schema, load_json
from rlk_repro.base.findings import MAX_FINDINGS, Finding, Level
from rlk_repro.rundir.paths import RunDir

SCHEMA: Final = 1
ACTIVE: Final = "ACTIVE"
"""The driver's name for the state of a port that can transfer data."""
DIFF: Final = "diff_sha256"
OWN_PATCH: Final = "patch"
"""The fact that says whether the bundle holds all changes of rlk-repro's checkout."""
PATCH_IS_WHOLE: Final = "whole"
PATCH_IS_SCRUBBED: Final = "without secrets"
MAX_FACTS: Final = 5000
"""Largest number of facts of one node; a node with 72 GPUs has about 2000."""
OTHER_RUNS: Final = "host.other_runs"
"""The fact that names the runs which may use the same GPUs at the same time."""


@dataclass(frozen=True)
class Unknown:
    """A fact that could not be found, and the reason, such as ``nvidia-smi is not on PATH``."""

    reason: str

    def __str__(self) -> str:
        return f"unknown ({self.reason})"


Fact: TypeAlias = "str | int | float | bool | list[Any] | dict[str, Any] | Unknown"
Section: TypeAlias = Mapping[str, Fact]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The facts of one node, by section: ``host``, ``gpu``, ``network``, ``code``, ``container``, ``environment``."""

    node: str
    sections: Mapping[str, Section] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "node": self.node, "sections": _encode(self.sections)}

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Load the manifest of one node; raise BundleUnreadable if the file is missing or not a manifest."""
        return cls.from_json(load_json(path), str(path))

    @classmethod
    def from_json(cls, value: Any, where: str = "manifest") -> Manifest:
        check_schema(where, value, SCHEMA)
        found = value.get("sections", {})
        if not isinstance(found, dict):
            raise BundleUnreadable(Problem(where, "no manifest", got=found, expected="sections by name"))
        sections = {str(name): _decode_section(body) for name, body in found.items()}
        manifest = cls(node=str(value.get("node", "")), sections=sections)
        num_facts = sum(1 for _ in manifest.facts())
        if num_facts > MAX_FACTS:
            problem = Problem(where, "too many facts for one node", got=num_facts, expected=f"at most {MAX_FACTS}")
            raise BundleUnreadable(problem)
        return manifest

    def facts(self) -> Iterator[tuple[str, Fact]]:
        for name, section in self.sections.items():
            yield from _flatten(name, dict(section))


# Another version of a package that no trainer uses, such as a linter, does not change a measurement.
TRAINER_PACKAGES: Final = (
    *("apex", "cupy*", "flash-attn*", "flashinfer*", "megatron-core", "numpy", "nvidia-*", "ray", "rl-engine"),
    *("safetensors", "sglang*", "tokenizers", "torch-memory-saver", "torchvision", "transformer-engine*"),
    *("transformers", "triton*", "vime", "vllm*", "xgrammar"),
)


def _each(prefix: str, level: Level, *names: str) -> Iterator[tuple[str, Level]]:
    return ((prefix + name, level) for name in names)


# The first pattern that matches a fact's dotted path gives the level of a difference.  A ``*`` also matches dots.
SEVERITY: Final[tuple[tuple[str, Level], ...]] = (
    *_each("gpu.devices.*.", Level.BLOCKING, "name", "mig_mode", "compute_partition", "memory_partition"),
    *_each("gpu.", Level.BLOCKING, "count", "vendor"),
    ("host.machine", Level.BLOCKING),
    ("container.image_digest", Level.BLOCKING),
    ("code.*.source", Level.INFO),
    # The compiler puts unique names into every build, so two builds of the same sources never have the same bytes.
    *_each("code.rl_kernel.", Level.WARNING, "build_variables*", "extension_sha256"),
    *_each("code.", Level.BLOCKING, "rl_kernel.*", "vime.*", "megatron.*", "packages.torch", "packages.vllm"),
    *_each("code.rlk_repro.", Level.WARNING, "commit", "is_dirty", "version", "package_tree"),
    ("code.rlk_repro.*", Level.INFO),
    *_each("code.packages.", Level.WARNING, *TRAINER_PACKAGES),
    ("code.packages.*", Level.INFO),
    ("code.python", Level.WARNING),
    ("code.*", Level.INFO),
    *_each("gpu.", Level.WARNING, "driver", "cuda_driver_version", "compat_libcuda", "rocm_version"),
    *_each("gpu.", Level.INFO, "fabric.cluster_uuid", "fabric.clique_id", "fabric.health", "topology_text"),
    *_each("gpu.", Level.WARNING, "fabric*", "topology*", "nvlinks_up"),
    *_each("gpu.devices.*.", Level.WARNING, "memory_total_mib", "power_limit_w", "ecc_mode", "vbios", "compute_mode"),
    *_each("gpu.devices.*.", Level.WARNING, "clocks_max_*", "clocks_applications_*", "pcie_width"),
    ("gpu.*", Level.INFO),
    *_each("host.", Level.WARNING, "kernel", "cmdline", "page_size_bytes", "clock_source", "cpu_model", "num_cpus"),
    *_each("host.", Level.WARNING, "num_cpus_usable", "num_numa_nodes", "is_smt_active", "governor"),
    *_each("host.", Level.WARNING, "numa_balancing", "transparent_hugepages", "memory_total_gib"),
    *_each("host.", Level.WARNING, "cgroup_cpu_max", "cgroup_memory_max_gib"),
    *_each("container.", Level.WARNING, "runtime", "image_record_sha256"),
    # Two measurements of all_reduce are never equal; replay compares them with a tolerance.
    *_each("network.", Level.INFO, "ephemeral_ports", "all_reduce*"),
    ("network.*", Level.WARNING),
    *_each("environment.", Level.INFO, "SLURM_*", "RLK_REPRO_*", "*_SRC"),
    ("environment.*", Level.WARNING),
    ("*", Level.INFO),
)


def load_manifests(run_dir: RunDir) -> tuple[Manifest, ...]:
    """Load a run's manifests in the order of the nodes' names; raise BundleUnreadable for an invalid one."""
    files = (node.manifest for node in run_dir.node_dirs())
    return tuple(Manifest.load(path) for path in files if path.is_file())


@lru_cache(maxsize=4 * MAX_FACTS)
def severity(path: str) -> Level:
    return next(level for pattern, level in SEVERITY if fnmatchcase(path, pattern))


def diff_manifests(expected: Manifest, found: Manifest) -> list[Finding]:
    """Return a finding for each fact that differs; a fact known in only one manifest gives at most a warning."""
    left, right = dict(expected.facts()), dict(found.facts())
    return list(_diff_facts(left, right, left.keys() | right.keys()))


def diff_nodes(manifests: Sequence[Manifest]) -> Iterator[Finding]:
    """Compare each node with the run's first node; yield the differences that may matter, up to a limit."""
    first = dict(manifests[0].facts()) if manifests else {}
    telling = {path for path, fact in first.items() if not isinstance(fact, Unknown)}
    telling = {path for path in telling if severity(path) is not Level.INFO}
    num_left = MAX_FINDINGS
    for other in manifests[1:]:
        if other.sections == manifests[0].sections:
            continue
        right = dict(other.facts())
        for item in _diff_facts(first, right, telling | right.keys()):
            if item.level is not Level.INFO:
                yield replace(item, where=f"nodes.{other.node}.{item.where}")
                num_left -= 1
        if num_left < 0:
            found = f"more than {MAX_FINDINGS} differences up to node {other.node}; later nodes were not compared"
            yield Finding(Level.BLOCKING, "nodes", "nodes alike", found)
            return


def _diff_facts(left: Mapping[str, Fact], right: Mapping[str, Fact], paths: Iterable[str]) -> Iterator[Finding]:
    for path in sorted(paths):
        was, now = left.get(path, Unknown("not recorded")), right.get(path, Unknown("not recorded"))
        if was == now or (isinstance(was, Unknown) and isinstance(now, Unknown)):
            continue
        level = severity(path)
        if level is Level.BLOCKING and (isinstance(was, Unknown) or isinstance(now, Unknown)):
            level = Level.INFO if _is_settled_by_files(path, left, right) else Level.WARNING
        elif path.endswith(f".{DIFF}") and _has_same(path.replace(DIFF, "tree"), left, right):
            level = Level.INFO  # the files are equal; older versions of rlk-repro hash the same diff differently
        yield Finding(level, path, shorten(str(was)), shorten(str(now)))


def _is_settled_by_files(path: str, left: Mapping[str, Fact], right: Mapping[str, Fact]) -> bool:
    """Tell whether the fact at ``path`` describes sources whose Python files are equal in both manifests.

    An unpacked archive has no git commit and an installed package has no git tree, but both have Python files.
    """
    source, _, name = path.rpartition(".")
    is_of_sources = name in {"commit", "is_dirty", DIFF, "tree", "version"}
    return is_of_sources and _has_same(f"{source}.package_tree", left, right)


def _has_same(path: str, left: Mapping[str, Fact], right: Mapping[str, Fact]) -> bool:
    was, now = left.get(path), right.get(path)
    return was is not None and was == now and not isinstance(was, Unknown)


def _encode(value: Any) -> Any:
    if isinstance(value, Unknown):
        return {"unknown": value.reason}
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"unknown"} and isinstance(value["unknown"], str):
            return Unknown(value["unknown"])
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return Unknown("recorded as null") if value is None else value


def _decode_section(body: Any) -> dict[str, Fact]:
    return {key: _decode(item) for key, item in body.items()} if isinstance(body, dict) else {}


def _flatten(path: str, value: Any) -> Iterator[tuple[str, Fact]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(f"{path}.{key}", item)
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _flatten(f"{path}.{index}", item)
    else:
        yield path, value


def list_ports(devices: object) -> Iterator[tuple[str, dict[str, Fact]]]:
    """Yield every InfiniBand or RoCE port of ``rdma_devices`` with its name, such as ``mlx5_0.ports.1``."""
    for name, device in devices.items() if isinstance(devices, dict) else ():
        ports = device.get("ports") if isinstance(device, dict) else None
        for number, port in ports.items() if isinstance(ports, dict) else ():
            if isinstance(port, dict):
                yield f"{name}.ports.{number}", port
