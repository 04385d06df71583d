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
        EnvironmentMissing: the interface is absent or has no address, or no IPv4 address reaches the other nodes.
    """
    if interface is not None:
        return read_interface(interface)
    routes = [found for other in others for found in _find_route(other)]
    address = next((found for found in (*routes, *_find_own(node)) if not is_loopback(found)), LOOPBACK)
    if address == LOOPBACK and others and not routes:
        expected = "an IPv4 address, which Ray and the trainers need here"
        hint = "ray.interface in the profile names the network between the nodes; nodes with IPv6 only run alone"
        raise EnvironmentMissing(Problem(f"node {node}", "no IPv4 address reaches the other nodes", got=others[0],
                                         expected=expected, hint=hint))  # fmt: skip
    return address


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


def _find_own(node: str) -> Iterator[str]:
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
