"""Network namespaces of this machine that stand in for hosts, each joined to a bridge by a pair of
virtual devices. Root alone may make them, with the command `ip`.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress


def ip(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


class Link:
    """A namespace for each of ``count`` hosts and one for the bridge that joins them."""

    def __init__(self, count: int) -> None:
        self.bridge = f"bench{os.getpid()}bridge"
        self.names = [f"bench{os.getpid()}r{host}" for host in range(count)]
        self.devices = [f"vr{os.getpid()}r{host}" for host in range(count)]
        self.ports = [f"vp{os.getpid()}r{host}" for host in range(count)]
        self.addresses = [f"10.231.7.{host + 1}" for host in range(count)]

    def make(self) -> None:
        for name in (self.bridge, *self.names):
            ip("ip", "netns", "add", name)
        ip("ip", "-n", self.bridge, "link", "add", "bridge", "type", "bridge")
        ip("ip", "-n", self.bridge, "link", "set", "bridge", "up")
        for name, device, port, address in zip(
            self.names, self.devices, self.ports, self.addresses
        ):
            ip(
                *("ip", "link", "add", device, "netns", name, "type", "veth"),
                *("peer", "name", port, "netns", self.bridge),
            )
            ip("ip", "-n", self.bridge, "link", "set", port, "master", "bridge", "up")
            ip("ip", "-n", name, "link", "set", "lo", "up")
            ip("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("ip", "-n", name, "link", "set", device, "up")

    def limit(self, megabits: int) -> None:
        """Let that much through a second, from each host and to each."""
        burst = max(32, megabits // 8)  # kB: a hundredth of a second
        ends = [*zip(self.names, self.devices), *((self.bridge, port) for port in self.ports)]
        for name, device in ends:
            ip(
                *("tc", "-n", name, "qdisc", "replace", "dev", device, "root", "tbf"),
                *("rate", f"{megabits}mbit", "burst", f"{burst}kb", "latency", "200ms"),
            )

    def remove(self) -> None:
        for name in (*self.names, self.bridge):
            with suppress(FileNotFoundError):  # where there is no `ip`, there is nothing to remove
                subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def join_hosts(count: int, megabits: int | None = None) -> Link | str:
    """Return ``count`` hosts on a bridge, limited to ``megabits`` a second if given, or the reason
    why there are none.
    """
    link = Link(count)
    try:
        link.make()
        if megabits is not None:
            link.limit(megabits)
    except FileNotFoundError as error:
        why = f"there is no command {error.filename!r}"
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode().strip() or f"exit code {error.returncode}"
        why = f"`{' '.join(error.cmd)}` says: {said}"
        if os.geteuid() != 0:
            why = f"{why} (namespaces take root, and you are not)"
    else:
        return link
    link.remove()
    return why
