"""The network interface that gloo listens on: the one that leads to the rendezvous address.

By default gloo uses the address that the host's own name resolves to, which on many machines is
127.0.1.1: peers on other hosts would then connect to themselves.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

from hf_zero.distributed.rendezvous import is_loopback
from hf_zero.errors import LaunchError

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SOMEWHERE = "192.0.2.1"  # reserved for documentation: reached by the default route
SIOCGIFADDR = 0x8915


def choose_interface(
    master_addr: str | None, several_hosts: bool, asked: str | None = None
) -> None:
    """Set GLOO_SOCKET_IFNAME to ``asked`` (then NCCL's as well), or, if it is not set, to the
    interface that leads to ``master_addr``.

    Raises LaunchError if this host has no interface of the name given by ``asked`` or the variable.
    """
    if asked is not None:
        _check(asked, "interface")
        os.environ.update(dict.fromkeys(VARIABLES, asked))
        return
    if os.environ.get(VARIABLES[0]):
        _check(os.environ[VARIABLES[0]], VARIABLES[0])
        return
    found = interface_of(_leading_to(master_addr, several_hosts)) if master_addr else None
    if found is not None:
        os.environ[VARIABLES[0]] = found


def interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def interface_of(address: str | None) -> str | None:
    """Return the interface that has this IPv4 address; None if there is none."""
    if address is None or sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in interfaces():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def own_address(master_addr: str | None) -> str | None:
    """Return this host's address on the route to the master; None if there is no route."""
    return _source(master_addr) if master_addr else None


def _leading_to(master_addr: str, several_hosts: bool) -> str | None:
    """Return this host's address on the route to the master; None if the host knows no route."""
    source = _source(master_addr)
    if (
        source is not None
        and several_hosts
        and is_loopback(source)
        and not is_loopback(master_addr)
    ):
        # /etc/hosts maps the name of rank 0's host to its own loopback address
        return _source(SOMEWHERE)
    return source


def _source(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # a datagram socket: nothing is sent
        except OSError:
            return None
        return probe.getsockname()[0]


def _check(names: str, where: str) -> None:
    missing = [name for name in names.split(",") if name not in interfaces()]
    if missing:
        raise LaunchError(
            f"{where}={names}: this host has no network interface {', '.join(missing)}; it has "
            f"{', '.join(interfaces())}"
        )
