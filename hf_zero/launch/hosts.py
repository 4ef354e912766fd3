"""The hosts of a launch and their slots: DeepSpeed's hostfile (``worker-0 slots=4``) and its
filters (``worker-0@worker-1:0,2``); access to each, this machine directly, another one through ssh;
and the address by which its peers reach it.

No mistake silently results in a single process: every error names the line, or the part of the
filter.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import re
import shlex
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_zero.distributed.rendezvous import is_loopback
from hf_zero.errors import LaunchError

LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\d+)")
NAME = re.compile(r"[\w.:%\[\]-]+")
NODE = re.compile(r"([^:@]+)(?::([^:@]*))?")
SLOT = re.compile(r"[0-9]{1,9}")
LOCAL = "localhost"
# BatchMode: no terminal could answer a question. A host that is gone is noticed after a minute.
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
VARIABLE = "HF_ZERO_SSH"
ANSWER_SECONDS = 60.0
PORTS = (20_000, 32_000)  # below Linux's ephemeral ports, which start at 32,768
ATTEMPTS = 64
MAX_SLOTS = 4096  # of one host
LARGEST = 1 << 24  # bytes of a hostfile
LONGEST_NAME = 253  # characters of a host name (RFC 1035, section 2.3.4, without the lengths)


@dataclass(frozen=True)
class Host:
    """One machine and its used slots (GPU numbers, one rank each). ``chosen`` is true if these are
    not all of its slots.
    """

    name: str
    slots: tuple[int, ...]
    chosen: bool = False


def read_hostfile(path: Path) -> list[Host]:
    """Return the hosts of a hostfile, in its order.

    Raises LaunchError, naming the line, for a malformed file.
    """
    try:
        if (
            path.exists()
            and not path.is_dir()
            and (not path.is_file() or path.stat().st_size > LARGEST)
        ):
            raise OSError(errno.EINVAL, "it is no file of text")
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            f"the hostfile {path} cannot be read ({getattr(error, 'strerror', None) or error}); "
            "pass one, or leave --hostfile out"
        ) from None
    hosts: dict[str, Host] = {}
    at: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = LINE.fullmatch(text)
        if match is None:
            raise LaunchError(f"{path}, line {number}: {text!r:.200} is not `host slots=N`")
        name, slots = match[1], int(match[2][:9])
        # An ssh option or a user's login: filters could not name such a host.
        if name.startswith("-") or "@" in name or not _resolvable(name):
            raise LaunchError(
                f"{path}, line {number}: {name!r:.100} is not a host name; users and options "
                "belong in ~/.ssh/config or --ssh"
            )
        if slots < 1:
            raise LaunchError(
                f"{path}, line {number}: {text!r} gives no slot; write at least "
                "slots=1, or remove the line"
            )
        if slots > MAX_SLOTS:
            raise LaunchError(
                f"{path}, line {number}: {text!r:.100} gives more than {MAX_SLOTS:,} slots; write "
                "the number of the host's GPUs"
            )
        if name in hosts:
            raise LaunchError(
                f"{path}, line {number}: {name} is in line {at[name]} already; write each host "
                "once, with all its slots"
            )
        hosts[name], at[name] = Host(name, tuple(range(slots))), number
    if not hosts:
        raise LaunchError(f"the hostfile {path} lists no host; write `host slots=N` lines")
    return list(hosts.values())


def _resolvable(name: str) -> bool:
    """Return whether ``name`` has the form of a host name or an address: letters, digits and few
    marks, in labels of 63 characters at most.
    """
    try:
        return NAME.fullmatch(name) is not None and len(name.encode("idna")) <= LONGEST_NAME
    except UnicodeError:
        return False


def select(
    hosts: Sequence[Host],
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    num_procs: int | None = None,
    may_be_empty: bool = False,
) -> list[Host]:
    """Return the hosts and slots of ``hosts`` that filters or numbers select, in the same order.

    Raises LaunchError for unknown hosts and slots, for filters combined with numbers, and unless
    ``may_be_empty`` for a filter that leaves no host.
    """
    options = [
        option for option, value in (("--include", include), ("--exclude", exclude)) if value
    ]
    numbers = [
        option
        for option, value in (("--num-nodes", num_nodes), ("--num-procs", num_procs))
        if value is not None
    ]
    if len(options) > 1 or (options and numbers):
        raise LaunchError(
            f"{' and '.join([*options, *numbers])} cannot be given together; keep one way to choose"
        )
    chosen = list(hosts)
    if include or exclude:
        option, text = (options[0], include or exclude)
        named = _read_filter(option, text, {host.name: host for host in hosts})
        if include:
            chosen = [
                Host(host.name, named[host.name], named[host.name] != host.slots)
                for host in hosts
                if host.name in named
            ]
        else:
            slots_left = [
                (host, tuple(slot for slot in host.slots if slot not in named.get(host.name, ())))
                for host in hosts
            ]
            chosen = [Host(host.name, s, s != host.slots) for host, s in slots_left if s]
        if not chosen and not may_be_empty:
            raise LaunchError(f"{option} {text!r} leaves no host; the hosts are {_names(hosts)}")
    if num_nodes is not None:
        if not 1 <= num_nodes <= len(chosen):
            raise LaunchError(
                f"--num-nodes {num_nodes}: there are {len(chosen)} host(s), {_names(chosen)}; "
                f"pass 1 to {len(chosen)}"
            )
        chosen = chosen[:num_nodes]
    if num_procs is not None:
        short = [host for host in chosen if len(host.slots) < num_procs]
        if num_procs < 1 or short:
            raise LaunchError(
                f"--num-procs {num_procs}: the hosts have "
                f"{', '.join(f'{h.name} {len(h.slots)} slot(s)' for h in short or chosen)}"
            )
        chosen = [
            Host(host.name, host.slots[:num_procs], host.chosen or num_procs < len(host.slots))
            for host in chosen
        ]
    return chosen


def _read_filter(option: str, text: str, hosts: dict[str, Host]) -> dict[str, tuple[int, ...]]:
    """Return the hosts and slots of a filter; a host without slots means all of its slots."""
    named: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        match = NODE.fullmatch(part.strip())
        slots = (
            [slot.strip() for slot in match[2].split(",")] if match and match[2] is not None else []
        )
        if match is None or not all(map(SLOT.fullmatch, slots)):
            raise LaunchError(
                f"{option} {text!r}: {part!r} is not HOST or HOST:SLOT,SLOT; hosts are joined by "
                "@, as in worker-0@worker-1:0,2"
            )
        host = hosts.get(match[1])
        if host is None:
            raise LaunchError(
                f"{option} {text!r}: there is no host {match[1]!r}; the hosts are "
                f"{_names(list(hosts.values()))}"
            )
        chosen = set(map(int, slots)) or set(host.slots)
        if unknown := sorted(chosen - set(host.slots)):
            raise LaunchError(
                f"{option} {text!r}: {host.name} has slots {host.slots[0]} to {host.slots[-1]}, "
                f"not {', '.join(map(str, unknown))}"
            )
        named[host.name] = tuple(sorted(chosen | set(named.get(host.name, ()))))
    return named


def _names(hosts: Sequence[Host]) -> str:
    return ", ".join(host.name for host in hosts)


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
    """Return whether ``host`` is this machine: its name, a loopback address, or another one that a
    socket can be bound to.
    """
    if is_loopback(host) or host == socket.gethostname():
        return True
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def address_of(host: str, ssh: Sequence[str]) -> str:
    """Return the address by which other hosts reach ``host``: the one that its name resolves to
    here or, if that or ``host`` is a loopback address, the one that the host itself reports.

    Raises LaunchError if the host does not report any.
    """
    try:
        address = ipaddress.ip_address(host)
        if not address.is_loopback:
            return str(address)
    except ValueError:
        pass
    try:
        addresses = [str(e[4][0]) for e in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)]
    except OSError:
        addresses = []
    usable = [
        address
        for address in addresses
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback
    ]
    if usable:
        return min(usable, key=lambda address: ":" in address)  # IPv4 preferred
    query = ["hostname", "-I"] if is_here(host) else [*ssh, host, "hostname -I"]
    try:
        resolved = subprocess.run(
            query, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"{host} cannot be asked for its address ({shlex.join(query)}: "
            f"{error}); pass --master-addr"
        ) from None
    words = resolved.stdout.split()
    if resolved.returncode or not words:
        raise LaunchError(
            f"{host} does not tell its address: {shlex.join(query)} ended with "
            f"{resolved.returncode}: {resolved.stderr.strip()[-300:]!r}. "
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
