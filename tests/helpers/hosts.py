"""Hosts for tests: network namespaces joined by a veth pair, entered through a script that stands
in for ssh.

Where the machine forbids namespaces the hosts are two loopback addresses, on which the launcher
starts its agents directly; ``Hosts.kind`` says which they are. Whatever was made is taken away
again.
"""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.commands import completed

NAMESPACES, LOOPBACK = "network namespaces", "loopback addresses"
SSH = """#!/bin/sh
# ssh HOST LINE, as the launcher calls it: the host is a network namespace of this machine.
host=$1; shift
echo "$host" >> {log}
exec ip netns exec "$host" sh -c "$*"
"""
_numbers = itertools.count()


@dataclass(frozen=True)
class Hosts:
    """Two hosts: names as a hostfile has them, and the addresses by which they find each other."""

    kind: str
    names: tuple[str, str]
    addresses: tuple[str, str]
    devices: tuple[str, str]
    ssh: Path
    entered: Path

    def hostfile(self, path: Path, slots: int) -> Path:
        path.write_text(
            "# made for a test\n\n"
            + "".join(f"{name}  slots={slots}  # comment\n" for name in self.names)
        )
        return path

    def environment(self) -> dict[str, str]:
        return {"HF_ZERO_SSH": str(self.ssh)} if self.kind == NAMESPACES else {}

    def inside(self, place: int, command: list[str]) -> list[str]:
        """``command`` as a process of that host."""
        return (
            ["ip", "netns", "exec", self.names[place], *command]
            if self.kind == NAMESPACES
            else command
        )

    def cut(self, place: int) -> None:
        """Take that host off the network: nothing more arrives, and nothing says so."""
        _ip("-n", self.names[place], "link", "set", self.devices[place], "down")


@contextmanager
def namespaces(folder: Path) -> Iterator[Hosts]:
    """Raises OSError or CalledProcessError where the machine forbids them."""
    number = f"{os.getpid()}x{next(_numbers)}"
    names = (f"hfz{number}a", f"hfz{number}b")
    devices = (f"va{number}", f"vb{number}")
    net = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
    addresses = (f"{net}.1", f"{net}.2")
    ssh, log = folder / "ssh", folder / "entered.txt"
    ssh.write_text(SSH.format(log=shlex.quote(str(log))))
    ssh.chmod(0o755)
    log.touch()
    made: list[str] = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        _ip(
            "link",
            "add",
            devices[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            devices[1],
            "netns",
            names[1],
        )
        for name, device, address in zip(names, devices, addresses):
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            _ip("-n", name, "link", "set", device, "up")
        yield Hosts(NAMESPACES, names, addresses, devices, ssh, log)
    finally:
        for name in made:
            _ip("netns", "delete", name)


@contextmanager
def loopback(folder: Path) -> Iterator[Hosts]:
    """Two addresses of this machine, which need no permission."""
    two = ("127.0.0.2", "127.0.0.3")
    yield Hosts(LOOPBACK, two, two, ("lo", "lo"), folder / "no-ssh", folder / "entered.txt")


def namespaces_allowed() -> str:
    """Empty where namespaces can be made and entered, else why not."""
    name = f"hfz{os.getpid()}probe"
    try:
        _ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        return str(getattr(error, "stderr", None) or error).strip()
    try:
        _ip("netns", "exec", name, "true")
        return ""
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip()
    finally:
        _ip("netns", "delete", name)


@contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Namespaces where they are allowed, else loopback addresses, which is said."""
    refused = namespaces_allowed()
    if refused:
        print(
            f"network namespaces are refused ({refused}): two loopback "
            "addresses stand in for hosts",
            file=sys.stderr,
        )
    with (loopback if refused else namespaces)(folder) as hosts:
        yield hosts


def _ip(*words: str) -> None:
    completed(["ip", *words], check=True)
