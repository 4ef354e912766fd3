"""Expansion of SLURM's lists of hosts and tasks in one variable: ``gpu[001-003,7],login`` and
``2(x3),1``. Text only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hf_zero.errors import LaunchError

PLAIN = re.compile(r"[^\[\],\s]+")
GROUP = re.compile(r"\[([^\[\]]*)\]")
RANGE = re.compile(r"(\d+)(?:-(\d+))?")
TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hosts(text: str, name: str) -> list[str]:
    """Return the hosts of a SLURM node list, in its order.

    ``name`` is the variable that holds it, for LaunchError.
    """
    hosts = [host for part in _parts(text, name) for host in _expand(part, text, name)]
    if not hosts:
        raise LaunchError(f"{name}={text!r} lists no host")
    return hosts


def expand_tasks(text: str, name: str) -> list[int]:
    """Return the tasks on each node, as SLURM counts them: ``2(x3),1`` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        found = TASKS.fullmatch(part.strip())
        if found is None:
            raise LaunchError(
                f"{name}={text!r} is not a list of tasks per node as SLURM writes it, such as "
                f"2(x3),1: {part.strip()!r}"
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _parts(text: str, name: str) -> Iterator[str]:
    """Yield the parts between commas outside brackets."""
    depth, start = 0, 0
    for at, letter in enumerate(text + ","):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise LaunchError(f"{name}={text!r} has brackets that do not match")
        if letter == "," and depth == 0:
            part = text[start:at].strip()
            start = at + 1
            if part:
                yield part
    if depth:
        raise LaunchError(f"{name}={text!r} has brackets that do not match")


def _expand(part: str, text: str, name: str) -> Iterator[str]:
    """Yield the hosts of one part: brackets may occur several times, as in rack[1-2]node[01-16]."""
    group = GROUP.search(part)
    if group is None:
        if PLAIN.fullmatch(part) is None:
            raise LaunchError(f"{name}={text!r} holds {part!r}, which is no host name")
        yield part
        return
    for piece in group[1].split(","):
        found = RANGE.fullmatch(piece.strip())
        first, last = (found[1], found[2] or found[1]) if found else ("1", "0")
        if int(first) > int(last):
            raise LaunchError(
                f"{name}={text!r} holds {piece.strip()!r} in brackets, which is no number and "
                "no range such as 01-16"
            )
        for number in range(int(first), int(last) + 1):
            yield from _expand(
                f"{part[: group.start()]}{number:0{len(first)}d}{part[group.end() :]}", text, name
            )
