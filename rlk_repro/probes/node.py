"""Make the manifest of one node from all probes.  To add a probe, write its module and add it to ``PROBES``."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from rlk_repro.probes import code, container, environment, gpu, host, network
from rlk_repro.rundir.manifest import Manifest, Section

PROBES: Final[dict[str, Callable[[Path], Section]]] = {
    host.SECTION: host.probe,
    gpu.SECTION: gpu.probe,
    network.SECTION: network.probe,
    code.SECTION: code.probe,
    container.SECTION: container.probe,
    environment.SECTION: environment.probe,
}


def probe_node(node_name: str, *, root: Path = Path("/")) -> Manifest:
    return Manifest(node=node_name, sections={name: probe(root) for name, probe in PROBES.items()})
