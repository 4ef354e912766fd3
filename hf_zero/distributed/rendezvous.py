"""The rank of this process and the rendezvous address, from the variables of its launcher.

torchrun and ``accelerate launch`` set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
``srun`` and ``mpirun`` use variables of their own, and name no port. Explicit values win; missing
ones are read from the launcher's variables; contradictions are errors. Nothing here talks to
another process: all ranks must reach the same answer, so the port is computed from the id of the
job.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hf_zero.errors import LaunchError

DEFAULT_PORT = 29500
# Below Linux's ephemeral ports (32768 and up), above those of services.
FIRST_PORT, PORTS = 15000, 14000
LOOPBACK = "127.0.0.1"
ELASTIC = "TORCHELASTIC_RUN_ID"
# SLURM's lists: gpu[001-003,7],login and 2(x3),1
PLAIN = re.compile(r"[^\[\],\s]+")
GROUP = re.compile(r"\[([^\[\]]*)\]")
MAX_RANGE = 1 << 16  # hosts: a typing error must not fill the memory
RANGE = re.compile(r"(\d+)(?:-(\d+))?")
TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


class SourcedInt(NamedTuple):
    """A whole number and the variable or argument that it was read from."""

    value: int
    name: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


@dataclass(frozen=True)
class Launcher:
    """The variables of one launcher, a row of ``launchers.toml``, whose head explains them."""

    title: str
    marks: Sequence[str]
    rank: str
    world_size: Sequence[str] = ()
    local_rank: Sequence[str] = ()
    local_world_size: Sequence[str] = ()
    job: Sequence[str] = ()


_TABLE: dict[str, list[dict[str, Any]]] = tomllib.loads(
    Path(__file__).with_name("launchers.toml").read_text("utf-8")
)
LAUNCHERS = [Launcher(**row) for row in _TABLE["launcher"]]
VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """The place of this process among the ranks. ``local_rank`` and ``local_world_size`` are None
    if they are unknown.

    ``launcher``: the launcher whose variables were read; None if RANK and the like sufficed.
    ``address_source``: the variable that gave ``master_addr``, and its value.
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    master_addr: str
    master_port: int
    launcher: str | None
    address_source: str = field(default="", compare=False)

    @property
    def several_hosts(self) -> bool:
        return self.local_world_size is not None and self.local_world_size < self.world_size

    def variables(self) -> dict[str, str]:
        """Return torchrun's variables, which torch, Accelerate and Transformers read."""
        values = (getattr(self, name.lower()) for name in VARIABLES)
        return {name: str(value) for name, value in zip(VARIABLES, values) if value is not None}


def announce(rank: int = -1, world_size: int = -1, port: int | None = None) -> Place | None:
    """Call :func:`discover` on the environment of this process, and set there what it found.

    None: this process is alone.
    """
    rendezvous = discover(os.environ, rank, world_size, port)
    if rendezvous is not None:
        os.environ.update(rendezvous.variables())
    return rendezvous


def discover(
    environ: Mapping[str, str], rank: int = -1, world_size: int = -1, port: int | None = None
) -> Place | None:
    """Return this process's place by ``environ``; ``rank`` and ``world_size`` (-1: not given) count
    as if they were set there.

    ``port`` is used if MASTER_PORT is not set. None if no launcher is recognized, or the only rank
    has no other to meet. Raises LaunchError, naming the variable, if one is missing or two
    contradict each other.
    """
    own_rank, own_size = _given(environ, "RANK", rank), _given(environ, "WORLD_SIZE", world_size)
    launcher = _launcher(environ)
    their_rank = _number(environ, launcher.rank) if launcher else None
    their_size = _first(environ, launcher.world_size) if launcher else None
    if _launched_a_parent(own_rank, own_size, their_rank, their_size):
        launcher = their_rank = their_size = None
    at, size = own_rank or their_rank, own_size or their_size
    if at is None and (size is None or size.value == 1):
        _refuse_half_started(environ)
        return None
    if at is None or size is None:
        _refuse_missing(at, size, launcher)
    assert at is not None and size is not None
    if size.value < 1 or not 0 <= at.value < size.value:
        raise LaunchError(
            f"{at} and {size} contradict each other: ranks are 0 to the world size less 1; set "
            "them right, or unset both to train in one process"
        )
    if size.value == 1 and not _text(environ, "MASTER_ADDR"):
        return None
    local, per_host = _locals(environ, launcher, at, size)
    address, source = _address(environ, launcher, size, per_host)
    where = _port(environ, launcher, port, size.value == 1)
    return Place(
        at.value,
        size.value,
        local.value if local else None,
        per_host.value if per_host else None,
        address,
        where,
        launcher.title if launcher else None,
        source,
    )


def place_told(
    environ: Mapping[str, str], rank: int = -1, world_size: int = -1
) -> tuple[SourcedInt, SourcedInt] | None:
    """Return ``rank`` and ``world_size``, each that is not given (-1) by RANK or WORLD_SIZE of
    ``environ``; None unless both are known.
    """
    at, size = (
        _number(environ, name) if given < 0 else _passed(name, given)
        for name, given in (("RANK", rank), ("WORLD_SIZE", world_size))
    )
    return (at, size) if at is not None and size is not None else None


def local_rank_told(environ: Mapping[str, str]) -> int | None:
    """Return LOCAL_RANK of ``environ``; None if it is unset or empty. Raises LaunchError for what
    is no number.
    """
    number = _number(environ, "LOCAL_RANK")
    return None if number is None else number.value


def is_loopback(address: str) -> bool:
    """Return whether ``address`` is written as a loopback address: localhost, 127.0.0.2, ::1."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address == "localhost"


def _text(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name, "").strip()


def _number(environ: Mapping[str, str], name: str) -> SourcedInt | None:
    text = _text(environ, name)
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise LaunchError(f"{name}={text!r} is not a whole number from 0; set it right or unset it")
    return SourcedInt(int(text), name)


def _first(environ: Mapping[str, str], names: Sequence[str]) -> SourcedInt | None:
    return next((number for name in names if (number := _number(environ, name)) is not None), None)


def _passed(name: str, argument: int) -> SourcedInt:
    return SourcedInt(argument, f"init_distributed({name.lower()})")


def _given(environ: Mapping[str, str], name: str, argument: int) -> SourcedInt | None:
    variable = _number(environ, name)
    if argument < 0:
        return variable
    number = _passed(name, argument)
    if variable is not None and variable.value != argument:
        raise LaunchError(f"{number} contradicts {variable}; pass one of them")
    return number


def _launcher(environ: Mapping[str, str]) -> Launcher | None:
    if _text(environ, ELASTIC):
        return None  # torchrun has set everything; srun or mpirun may have started torchrun
    return next((row for row in LAUNCHERS if all(_text(environ, mark) for mark in row.marks)), None)


def _launched_a_parent(
    own_rank: SourcedInt | None,
    own_size: SourcedInt | None,
    rank: SourcedInt | None,
    size: SourcedInt | None,
) -> bool:
    """Return whether the launcher started only this process's parents (torchrun, for instance), so
    that its variables do not apply. Raises LaunchError if they contradict RANK or WORLD_SIZE.
    """
    if own_rank and own_size and size:
        if own_size.value > size.value:
            return True
        if own_size.value < size.value and size.value > 1:
            raise LaunchError(
                f"{own_size} contradicts {size}: {size.value} processes were started and the world "
                f"has room for {own_size.value}. "
                f"Unset RANK and WORLD_SIZE, or set them right for every process"
            )
    for ours, theirs in ((own_rank, rank), (own_size, size)):
        if ours and theirs and ours.value != theirs.value:
            raise LaunchError(
                f"{ours} contradicts {theirs}; unset {ours.name}, or set it to the "
                "launcher's on every process"
            )
    return False


def _refuse_missing(
    at: SourcedInt | None, size: SourcedInt | None, launcher: Launcher | None
) -> None:
    present, lacking = (at, "WORLD_SIZE") if at else (size, "RANK")
    also = ""
    if launcher:
        theirs = [launcher.rank] if lacking == "RANK" else launcher.world_size
        also = (
            f" (nor {' or '.join(theirs)})" if theirs else f" ({launcher.title} does not tell it)"
        )
    raise LaunchError(
        f"{present} is set, but {lacking} is not{also}; export {lacking}, start the script with "
        "torchrun, accelerate launch, srun or mpirun, "
        f"or unset {present.name if present else ''} to train in one process"
    )


def _refuse_half_started(environ: Mapping[str, str]) -> None:
    """Raise LaunchError for one of several processes that would silently train alone."""
    local = _number(environ, "LOCAL_RANK")
    if local is not None and local.value > 0:
        raise LaunchError(
            f"{local} is set, but RANK and WORLD_SIZE are not; export them, or unset LOCAL_RANK to "
            "train in one process"
        )
    tasks = _first(environ, ("SLURM_NTASKS", "SLURM_NPROCS"))
    if (
        _text(environ, "SLURM_PROCID")
        and not _text(environ, "SLURM_STEP_ID")
        and tasks is not None
        and tasks.value > 1
    ):
        raise LaunchError(
            f"{tasks}, but SLURM_STEP_ID is not set: the batch script itself has started this "
            "process, once. Write `srun python ...` in it; "
            "to train in one process, export RANK=0 WORLD_SIZE=1"
        )


def _locals(
    environ: Mapping[str, str], launcher: Launcher | None, at: SourcedInt, size: SourcedInt
) -> tuple[SourcedInt | None, SourcedInt | None]:
    """Return the local rank and the number of ranks on this host."""
    local, ranks_here = _number(environ, "LOCAL_RANK"), _number(environ, "LOCAL_WORLD_SIZE")
    if launcher is not None:
        local = local or _first(environ, launcher.local_rank)
        ranks_here = (
            ranks_here
            or _first(environ, launcher.local_world_size)
            or _tasks_here(environ, launcher)
        )
        if local is None and ranks_here is None and not is_loopback(_text(environ, "MASTER_ADDR")):
            names = " or ".join(launcher.local_rank) or f"{launcher.title} does not tell it"
            raise LaunchError(
                f"LOCAL_RANK is not set ({names}); export it: the number of this rank on its host"
            )
    if ranks_here is None and is_loopback(_text(environ, "MASTER_ADDR")):
        ranks_here = SourcedInt(size.value, "WORLD_SIZE")
    if local is None and ranks_here is not None and ranks_here.value == size.value:
        local = at
    for small, large in ((local, at), (ranks_here, size)):
        if small and small.value > large.value:
            raise LaunchError(
                f"{small} and {large} contradict each other: a host has no more "
                "ranks than the world"
            )
    if local and ranks_here and local.value >= ranks_here.value:
        raise LaunchError(
            f"{local} and {ranks_here} contradict each other: local ranks are 0 to the "
            "ranks on the host less 1"
        )
    return local, ranks_here


def _tasks_here(environ: Mapping[str, str], launcher: Launcher) -> SourcedInt | None:
    """Return the number of tasks of an srun step on this node; None if unknown."""
    name = next(
        (
            name
            for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
            if _text(environ, name)
        ),
        None,
    )
    node = _number(environ, "SLURM_NODEID")
    if launcher.title != "srun" or name is None or node is None:
        return None
    counts = expand_tasks(_text(environ, name), name)
    if node.value >= len(counts):
        raise LaunchError(
            f"{node} and {name}={_text(environ, name)!r} contradict each other: it tells "
            f"of {len(counts)} nodes"
        )
    return SourcedInt(counts[node.value], name)


def _address(
    environ: Mapping[str, str],
    launcher: Launcher | None,
    size: SourcedInt,
    per_host: SourcedInt | None,
) -> tuple[str, str]:
    """Return the address of rank 0's host, and the variable that gave it with its value."""
    address = _text(environ, "MASTER_ADDR")
    one_host = per_host is not None and per_host.value == size.value
    if address:
        if launcher and per_host and not one_host and is_loopback(address):
            raise LaunchError(
                f"MASTER_ADDR={address} is each host's own address, but {per_host} of {size} ranks "
                "are on this one; export the address of rank 0's host"
            )
        return address, f"MASTER_ADDR={address}"
    if launcher and one_host:
        return LOOPBACK, ""
    srun = launcher is not None and launcher.title == "srun"
    # mpirun's daemons on other hosts are a step of their own, without the host of rank 0
    lists = (*(["SLURM_STEP_NODELIST"] if srun else []), "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    name = next((name for name in lists if _text(environ, name)), None)
    if launcher and name:
        nodes = _text(environ, name)
        return expand_hosts(nodes, name)[0], f"{name}={nodes}"
    how = "mpirun -x MASTER_ADDR=HOST, or -genv MASTER_ADDR HOST"
    if srun:
        how = "MASTER_ADDR=HOST srun ..."
    raise LaunchError(
        f"{size} is set, but MASTER_ADDR is "
        f"not{f', and {launcher.title} does not tell the hosts' if launcher else ''}; "
        f"export the address of rank 0's host to all ranks ({how})"
    )


def _port(
    environ: Mapping[str, str], launcher: Launcher | None, port: int | None, alone: bool
) -> int:
    number = _number(environ, "MASTER_PORT") or (
        SourcedInt(port, "distributed_port") if port is not None else None
    )
    if number is not None:
        if not (0 if alone else 1) <= number.value < 65536:
            raise LaunchError(
                f"{number} is not a port; ports are 1 to 65535, the same on all ranks"
            )
        return number.value
    if launcher is None:
        raise LaunchError(
            "RANK and WORLD_SIZE are set, but MASTER_PORT is not; export one free port of rank "
            "0's host to all ranks"
        )
    job = next(
        (text for name in (*launcher.job, "SLURM_JOB_ID") if (text := _text(environ, name))), None
    )
    if job is None:
        return DEFAULT_PORT
    step = _text(environ, "SLURM_STEP_ID") if launcher.title == "srun" else ""
    return FIRST_PORT + zlib.crc32(f"{job}.{step}".encode()) % PORTS


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
        match = TASKS.fullmatch(part.strip())
        if match is None:
            raise LaunchError(
                f"{name}={text!r} is not a list of tasks per node as SLURM writes it, such as "
                f"2(x3),1: {part.strip()!r}"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _parts(text: str, name: str) -> Iterator[str]:
    """Split at the commas outside brackets; yield the parts."""
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
            raise LaunchError(f"{name}={text!r} holds {part!r}, which is not a host name")
        yield part
        return
    for piece in group[1].split(","):
        match = RANGE.fullmatch(piece.strip())
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if not 0 <= int(last) - int(first) < MAX_RANGE:
            raise LaunchError(
                f"{name}={text!r} holds {piece.strip()!r} in brackets, which is not a number and "
                f"no range such as 01-16, of {MAX_RANGE:,} hosts at most"
            )
        for number in range(int(first), int(last) + 1):
            yield from _expand(
                f"{part[: group.start()]}{number:0{len(first)}d}{part[group.end() :]}", text, name
            )
