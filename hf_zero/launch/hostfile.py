"""Which hosts take part, with which slots: DeepSpeed's hostfile (``worker-0 slots=4``) and its
filters (``worker-0@worker-1:0,2``).

Nothing that is wrong here becomes one process in silence: every error names the line, or the part
of the filter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_zero.errors import LaunchError

LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\d+)")
NODE = re.compile(r"([^:@]+)(?::([^:@]*))?")
LOCAL = "localhost"


@dataclass(frozen=True)
class Host:
    """One machine and the slots (numbers of GPUs, one rank each) that are used of it; ``chosen``
    if they are not simply all.
    """

    name: str
    slots: tuple[int, ...]
    chosen: bool = False


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file, in its order.

    Raises LaunchError, naming the line, for what is no hostfile.
    """
    try:
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
        found = LINE.fullmatch(text)
        if found is None:
            raise LaunchError(f"{path}, line {number}: {text!r} is not `host slots=N`")
        name, slots = found[1], int(found[2])
        # an option to ssh, or another user's login, which filters could not name
        if name.startswith("-") or "@" in name:
            raise LaunchError(
                f"{path}, line {number}: {name!r} is no host name; users and options belong into "
                "~/.ssh/config or --ssh"
            )
        if slots < 1:
            raise LaunchError(
                f"{path}, line {number}: {text!r} gives no slot; write at least "
                "slots=1, or remove the line"
            )
        if name in hosts:
            raise LaunchError(
                f"{path}, line {number}: {name} stands in line {at[name]} already; write each host "
                "once, with all its slots"
            )
        hosts[name], at[name] = Host(name, tuple(range(slots))), number
    if not hosts:
        raise LaunchError(f"the hostfile {path} lists no host; write `host slots=N` lines")
    return list(hosts.values())


def select(
    hosts: Sequence[Host],
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    num_procs: int | None = None,
    may_be_empty: bool = False,
) -> list[Host]:
    """The part of ``hosts`` that filters or numbers choose, in the order of ``hosts``.

    Raises LaunchError for unknown hosts and slots, for filters as well as numbers, and unless
    ``may_be_empty`` for a filter that leaves nothing.
    """
    given = [option for option, value in (("--include", include), ("--exclude", exclude)) if value]
    numbers = [
        option
        for option, value in (("--num-nodes", num_nodes), ("--num-procs", num_procs))
        if value is not None
    ]
    if len(given) > 1 or (given and numbers):
        raise LaunchError(
            f"{' and '.join([*given, *numbers])} cannot be given together; keep one way to choose"
        )
    chosen = list(hosts)
    if include or exclude:
        option, text = (given[0], include or exclude)
        named = _read_filter(option, text, {host.name: host for host in hosts})
        if include:
            chosen = [
                Host(host.name, named[host.name], named[host.name] != host.slots)
                for host in hosts
                if host.name in named
            ]
        else:
            left = [
                (host, tuple(slot for slot in host.slots if slot not in named.get(host.name, ())))
                for host in hosts
            ]
            chosen = [Host(host.name, slots, slots != host.slots) for host, slots in left if slots]
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
    """Hosts and slots of a filter; a host without slots stands for all of its slots."""
    named: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        found = NODE.fullmatch(part.strip())
        slots = (
            [slot.strip() for slot in found[2].split(",")] if found and found[2] is not None else []
        )
        if found is None or not all(slot.isascii() and slot.isdigit() for slot in slots):
            raise LaunchError(
                f"{option} {text!r}: {part!r} is not HOST or HOST:SLOT,SLOT; hosts are joined by "
                "@, as in worker-0@worker-1:0,2"
            )
        host = hosts.get(found[1])
        if host is None:
            raise LaunchError(
                f"{option} {text!r}: there is no host {found[1]!r}; the hosts are "
                f"{_names(list(hosts.values()))}"
            )
        wanted = set(map(int, slots)) or set(host.slots)
        if unknown := sorted(wanted - set(host.slots)):
            raise LaunchError(
                f"{option} {text!r}: {host.name} has slots {host.slots[0]} to {host.slots[-1]}, "
                f"not {', '.join(map(str, unknown))}"
            )
        named[host.name] = tuple(sorted(wanted | set(named.get(host.name, ()))))
    return named


def _names(hosts: Sequence[Host]) -> str:
    return ", ".join(host.name for host in hosts)
