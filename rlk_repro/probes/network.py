"""Find facts about the network, but no addresses: interfaces, InfiniBand and RoCE devices, and kernel modules."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from rlk_repro.probes.sources import derive, known_or, link_name, list_names, locate, read_int, read_text
from rlk_repro.rundir.manifest import Fact, Unknown

SECTION: Final = "network"
NET: Final = "/sys/class/net"
INFINIBAND: Final = "/sys/class/infiniband"
VERBS: Final = "/dev/infiniband"
OPENS: Final = "opens"
# network interfaces of container runtimes appear and disappear with pods
PLUMBING: Final = re.compile(
    r"lo|veth.*|docker.*|br-.*|virbr.*|cali.*|cni.*|flannel.*|tunl.*|lxc.*|ifb.*|dummy.*|kube.*"
)
MODULES: Final = ("nvidia_peermem", "nv_peer_mem", "gdrdrv", "mlx5_core", "bnxt_re", "irdma", "ionic_rdma", "efa")


def probe(root: Path = Path("/")) -> dict[str, Fact]:
    interfaces = [name for name in list_names(root, NET) if not PLUMBING.fullmatch(name)]
    devices = list_names(root, INFINIBAND)
    return {
        "interfaces": {name: _interface(root, name) for name in interfaces} or Unknown(f"{NET} has no interface"),
        "rdma_devices": {name: _rdma_device(root, name) for name in devices} or Unknown(f"{INFINIBAND} has no device"),
        "rdma_verbs": {name: _open_verbs(root, name) for name in devices} or Unknown(f"{INFINIBAND} has no device"),
        "modules": {name: _module(root, name) for name in MODULES},
    }


def _interface(root: Path, name: str) -> dict[str, Fact]:
    folder = f"{NET}/{name}"
    return {
        "mtu": read_int(root, f"{folder}/mtu"),
        "speed_mbps": derive(
            read_int(root, f"{folder}/speed"),
            lambda speed: speed if speed > 0 else Unknown("the driver reports no speed"),
        ),
        "driver": link_name(root, f"{folder}/device/driver"),
        "state": read_text(root, f"{folder}/operstate"),
        "numa_node": read_int(root, f"{folder}/device/numa_node"),
    }


def _rdma_device(root: Path, name: str) -> dict[str, Fact]:
    folder = f"{INFINIBAND}/{name}"
    ports = list_names(root, f"{folder}/ports")
    return {
        "firmware": read_text(root, f"{folder}/fw_ver"),
        "board": read_text(root, f"{folder}/board_id"),
        "model": read_text(root, f"{folder}/hca_type"),
        "numa_node": read_int(root, f"{folder}/device/numa_node"),
        "ports": {port: _port(root, f"{folder}/ports/{port}") for port in ports}
        or Unknown(f"{folder}/ports has no port"),
    }


def _open_verbs(root: Path, name: str) -> str:
    """A container sees all devices in /sys, but can open only the devices that it was given."""
    found = list_names(root, f"{INFINIBAND}/{name}/device/infiniband_verbs")
    if not found:
        return "no verbs device"
    try:
        os.close(os.open(locate(root, f"{VERBS}/{found[0]}"), os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"{VERBS}/{found[0]}: {error.strerror}"
    return OPENS


def _port(root: Path, folder: str) -> dict[str, Fact]:
    return {
        "state": derive(read_text(root, f"{folder}/state"), _after_colon),
        "physical_state": derive(read_text(root, f"{folder}/phys_state"), _after_colon),
        "rate": read_text(root, f"{folder}/rate"),
        "link_layer": read_text(root, f"{folder}/link_layer"),
    }


def _module(root: Path, name: str) -> str | Unknown:
    """Return a kernel module's version, ``loaded`` for a module without a version, or ``absent``."""
    if not locate(root, "/sys/module").exists():
        return Unknown("/sys/module absent")
    if not locate(root, f"/sys/module/{name}").exists():
        return "absent"
    return known_or(read_text(root, f"/sys/module/{name}/version"), "loaded")


def _after_colon(text: str) -> str:
    return text.rpartition(":")[2].strip()
