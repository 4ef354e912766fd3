"""Access to a host: this machine directly, another one through ssh; and the address by which its
peers reach it.
"""

from __future__ import annotations

import ipaddress
import os
import random
import shlex
import socket
import subprocess
from collections.abc import Sequence

from hf_zero.errors import LaunchError

# BatchMode: no terminal could answer a question. A host that is gone is noticed after a minute.
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
VARIABLE = "HF_ZERO_SSH"
ANSWER_SECONDS = 60.0
PORTS = (20_000, 32_000)  # below Linux's ephemeral ports, which start at 32,768
ATTEMPTS = 64


def ssh_command(given: str | None = None, port: int | None = None) -> list[str]:
    """Return the program that is called with a host and a line for its shell: ``given``, else
    HF_ZERO_SSH, else ssh.

    Raises LaunchError if it cannot be parsed as a command.
    """
    text = given or os.environ.get(VARIABLE) or SSH
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise LaunchError(
            f"the ssh program {text!r} cannot be read as a command: {error}"
        ) from None
    return [*words, *(["-p", str(port)] if port else [])]


def is_here(host: str) -> bool:
    """Whether ``host`` is this machine: its name, or an address that a socket can be bound to."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def address_of(host: str, ssh: Sequence[str]) -> str:
    """Return the address by which other hosts reach ``host``: the one that its name resolves to
    here or, if that is a loopback address, the one that the host itself reports.

    Raises LaunchError if the host does not report any.
    """
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        known = [str(entry[4][0]) for entry in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)]
    except OSError:
        known = []
    usable = [
        address
        for address in known
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback
    ]
    if usable:
        return min(usable, key=lambda address: ":" in address)  # IPv4 preferred
    asked = ["hostname", "-I"] if is_here(host) else [*ssh, host, "hostname -I"]
    try:
        said = subprocess.run(
            asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"{host} cannot be asked for its address ({shlex.join(asked)}: "
            f"{error}); pass --master-addr"
        ) from None
    words = said.stdout.split()
    if said.returncode or not words:
        raise LaunchError(
            f"{host} does not tell its address: {shlex.join(asked)} ended with {said.returncode}: "
            f"{said.stderr.strip()[-300:]!r}. "
            "Make it reachable without a password, or pass --master-addr"
        )
    return words[0]


def free_port() -> int:
    """Return a free port of this machine below the ephemeral ports, which an outgoing connection
    could take before a server listens.
    """
    draw = random.SystemRandom()  # unaffected by a script's seed: two trainings must not collide
    for _ in range(ATTEMPTS):
        with socket.socket() as probe:
            try:
                probe.bind(("", draw.randrange(*PORTS)))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
