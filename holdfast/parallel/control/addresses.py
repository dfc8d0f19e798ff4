"""The address under which the other ranks reach this one."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

from holdfast.errors import GroupError

_LOOPBACK = (socket.AF_INET, "127.0.0.1")
_ELSEWHERE = "192.0.2.1"
"""An address reserved for documentation, so that only the default route leads to it."""
_SIOCGIFADDR = 0x8915


def own_address(store_host: str) -> tuple[socket.AddressFamily, str]:
    """Return family and address: of the interface in ``GLOO_SOCKET_IFNAME``, else a guess.

    The guess is the address from which this process reaches the host of the store, or else that of
    ``MASTER_ADDR``, since every rank reaches these. A host that resolves its own name to a loopback
    address uses the address of its default route.

    Raises:
        GroupError: The named interface has no address.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return _of_interface(interface)
    for host in (store_host, os.environ.get("MASTER_ADDR", "")):
        route = _towards(host)
        if route is None:
            continue
        # The store's host may reach itself by loopback, which other hosts cannot use. If the store
        # was named by a loopback address, all ranks are on this machine.
        if _is_loopback(route[1]) and not _is_loopback(host):
            route = _towards(_ELSEWHERE) or route
        return route
    return _LOOPBACK


def _towards(host: str) -> tuple[socket.AddressFamily, str] | None:
    """Return the address of this machine on the route to a host; nothing is sent."""
    if not host:
        return None
    try:
        resolved = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in resolved:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # of a datagram socket: it only picks the route
                return family, probe.getsockname()[0]
        except OSError:
            continue
    return None


def _is_loopback(host: str) -> bool:
    """Return True if a host, by name or number, is this machine for itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _of_interface(name: str) -> tuple[socket.AddressFamily, str]:
    """Return the first address of an interface, IPv4 before IPv6."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # The kernel's `struct ifreq`: a name of at most 15 bytes and its zero; in the reply the
            # IPv4 address is at 20, behind the family and port of its `sockaddr_in`.
            request = struct.pack("256s", name.encode()[:15])
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            return socket.AF_INET, socket.inet_ntoa(reply[20:24])
        except OSError:
            pass
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, _, _, _, _, interface = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        # A link-local address needs the interface's name on the other host, too.
        if interface == name and not address.is_link_local:
            return socket.AF_INET6, str(address)
    raise GroupError(
        f"GLOO_SOCKET_IFNAME names the interface {name!r}, which has no address on this host. "
        f"Name another one, or unset the variable."
    )
