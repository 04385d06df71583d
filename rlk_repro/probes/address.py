"""Find the IPv4 address at which other nodes reach this node.

The address is the one that this node uses to reach the other nodes, because many hosts map their own name to 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Final

from rlk_repro.base.errors import EnvironmentMissing, Problem

LOOPBACK: Final = "127.0.0.1"
ELSEWHERE: Final = "192.0.2.1"
"""No host has this address (RFC 5737), so the route to it is the default route."""
_SIOCGIFADDR: Final = 0x8915


def find_address(node: str, others: Sequence[str], interface: str | None) -> str:
    """Return ``interface``'s address, else the address used to reach ``others``, else the address of this node's name.

    Raises:
        EnvironmentMissing: the interface is absent or has no address.
    """
    if interface is not None:
        return read_interface(interface)
    return next((found for found in _find_candidates(node, others) if not is_loopback(found)), LOOPBACK)


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def read_interface(name: str) -> str:
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError as error:
            what = f"the interface has no address ({error.strerror})"
            raise EnvironmentMissing(Problem("profile: ray.interface", what, got=name)) from None
    return socket.inet_ntoa(answer[20:24])


def _find_candidates(node: str, others: Sequence[str]) -> Iterator[str]:
    for other in others:
        yield from _find_route(other)
    with contextlib.suppress(OSError):
        yield socket.gethostbyname(node)
    yield from _find_route(ELSEWHERE)


def _find_route(target: str) -> Iterator[str]:
    # Connecting a datagram socket sends no packet.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return
        yield str(probe.getsockname()[0])
