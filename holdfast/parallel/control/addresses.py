"""The address under which the other ranks reach this one."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import Any

from holdfast.errors import GroupError

_LOOPBACK = (socket.AF_INET, "127.0.0.1")
_ELSEWHERE = "192.0.2.1"
"""An address that is reserved for documents: the route to it is the default one."""
_SIOCGIFADDR = 0x8915


def own_address(store: object) -> tuple[socket.AddressFamily, str]:
    """Family and address: that of the interface which ``GLOO_SOCKET_IFNAME`` names, else a guess.

    The guess is the address from which this process reaches the host of the store, then that of
    ``MASTER_ADDR``, as every rank reaches these. A host that knows its own name as a loopback
    address uses the one of its default route.

    Raises:
        GroupError: The named interface has no address.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return _of_interface(interface)
    for host in (_host_of(store), os.environ.get("MASTER_ADDR", "")):
        route = _towards(host)
        if route is None:
            continue
        if _is_loopback(route[1]) and not _is_loopback(host):
            route = _towards(_ELSEWHERE) or route
        return route
    return _LOOPBACK


def _host_of(store: Any) -> str:
    """The host of a TCPStore, below any prefixes; empty for other stores."""
    while not hasattr(store, "host") and hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def _towards(host: str) -> tuple[socket.AddressFamily, str] | None:
    """The address of this machine on the route to a host; nothing is sent."""
    if not host:
        return None
    try:
        resolved = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in resolved:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return family, probe.getsockname()[0]
        except OSError:
            continue
    return None


def _is_loopback(host: str) -> bool:
    """Whether somebody named this very machine, by name or number."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _of_interface(name: str) -> tuple[socket.AddressFamily, str]:
    """The first address of an interface, IPv4 before IPv6."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", name.encode()[:15])
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            return socket.AF_INET, socket.inet_ntoa(reply[20:24])
        except OSError:
            pass
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, _, _, _, _, interface = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        if interface == name and not address.is_link_local:  # those have another name elsewhere
            return socket.AF_INET6, str(address)
    raise GroupError(f"GLOO_SOCKET_IFNAME names the interface {name!r}, which has no address here.")
