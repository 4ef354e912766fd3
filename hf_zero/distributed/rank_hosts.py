"""The host of each rank: its network interface that leads to the rendezvous address, and its name
and address in messages.

[Note: the interface]
By default gloo uses the address that the host's own name resolves to, which on many machines is
127.0.1.1: peers on other hosts would then connect to themselves. The hosts of all ranks are
exchanged while all ranks run, for messages about one that has exited.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from hf_zero.distributed.rendezvous import ELASTIC, is_loopback
from hf_zero.errors import LaunchError
from hf_zero.logging import logger

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
RESOLVE_SECONDS, RESOLVE_PAUSE = 120.0, 2.0
SOMEWHERE = "192.0.2.1"  # reserved for documentation: reached by the default route
SIOCGIFADDR = 0x8915


NAMES = ("HF_ZERO_HOST", "SLURMD_NODENAME")  # names that the user knows: of the hostfile, of SLURM

Exchange = Callable[[tuple[str, str]], Sequence[tuple[str, str]]]  # returns the values of all ranks
_hosts: list[str] = []


def choose_interface(
    master_addr: str | None, several_hosts: bool, interface: str | None = None
) -> None:
    """Set GLOO_SOCKET_IFNAME to ``interface`` (then NCCL's as well), or, if it is not set, to the
    interface that leads to ``master_addr``.

    Raises LaunchError if this host has no interface of that name.
    """
    if interface is not None:
        _check(interface, "interface")
        os.environ.update(dict.fromkeys(VARIABLES, interface))
        return
    if os.environ.get(VARIABLES[0]):
        _check(os.environ[VARIABLES[0]], VARIABLES[0])
        return
    leading = interface_of(_leading_to(master_addr, several_hosts)) if master_addr else None
    if leading is not None:
        os.environ[VARIABLES[0]] = leading


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


def wait_for_address(
    host: str, source: str, seconds: float = RESOLVE_SECONDS, pause: float = RESOLVE_PAUSE
) -> None:
    """Return when ``host``, the name or address of rank 0's host, resolves on this host. Some
    clusters publish a name only after the host has started, so try again for ``seconds``.

    Args:
        source: the variable or argument that gave the name, for messages.

    Raises LaunchError if the name does not resolve in time.
    """
    end, warned = time.monotonic() + seconds, False
    while True:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return
        except (OSError, UnicodeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        text = f"{own_host()} cannot resolve {host!r}, the host of rank 0 (from {source}): {reason}"
        if time.monotonic() + pause > end:
            remedy = "export MASTER_ADDR with an IP address of that host on all ranks"
            if os.environ.get(ELASTIC):
                remedy = (
                    "pass an IP address of that host to torchrun: --master-addr, or --local-addr "
                    "on that host for --rdzv-backend c10d"
                )
            raise LaunchError(f"{text}. Correct the name, or {remedy}")
        if not warned and os.environ.get("LOCAL_RANK", "0") == "0":
            logger.warning("%s; hf-zero tries again for %.0f s", text, seconds)
        warned = True
        time.sleep(pause)


def own_address(master_addr: str | None) -> str | None:
    """Return this host's address on the route to the master; None if there is no route."""
    return _source(master_addr) if master_addr else None


def address_for_others(master_addr: str | None) -> str | None:
    """Return this host's IPv4 address for other hosts, towards the master; None without one."""
    return _leading_to(master_addr, True) if master_addr else None


def _leading_to(master_addr: str, several_hosts: bool) -> str | None:
    """Return :func:`own_address`, if there are several hosts not a loopback address."""
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
        return str(probe.getsockname()[0])


def _check(names: str, where: str) -> None:
    missing = [name for name in names.split(",") if name not in interfaces()]
    if missing:
        raise LaunchError(
            f"{where}={names}: this host has no network interface {', '.join(missing)}; it has "
            f"{', '.join(interfaces())}"
        )


def learn(exchange: Exchange, entry: str = "") -> list[str]:
    """Tell all ranks this rank's host and its ``entry``; learn the hosts of all ranks and return
    their entries (collective).
    """
    told = exchange((own_host(), entry))
    _hosts[:] = [host for host, _ in told]
    return [entry for _, entry in told]


def host_of(rank: int) -> str:
    """Return the host of ``rank`` as :func:`own_host` names it there, after :func:`learn`."""
    return _hosts[rank]


def host_name() -> str:
    """Return this host's name: in the hostfile or in SLURM, else its own, which in a container is
    the name of the container or pod.
    """
    return next((os.environ[name] for name in NAMES if os.environ.get(name)), socket.gethostname())


def own_host() -> str:
    """Return this host's name and address: ``worker-1 (10.0.0.2)``."""
    name = host_name()
    address = own_address(os.environ.get("MASTER_ADDR"))
    return f"{name} ({address})" if address and address != name else name


def rank_ranges(ranks: Sequence[int]) -> str:
    """Return ``0-3`` for ranks 0 to 3, ``0, 2`` for ranks 0 and 2; a range has at least three."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    parts = [[f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run) for run in ranges]
    return ", ".join(text for part in parts for text in part)


def named(ranks: Iterable[int]) -> str:
    """Return ``rank 1 on worker-0 (10.0.0.1), ranks 2, 3 on worker-1 (10.0.0.2)``; only the numbers
    if :func:`learn` was never called.
    """
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(_hosts[rank] if rank < len(_hosts) else "", []).append(rank)
    parts = [
        f"rank{'s' * (len(group) > 1)} {', '.join(map(str, group))}"
        + (f" on {host}" if host else "")
        for host, group in by_host.items()
    ]
    return ", ".join(parts)
