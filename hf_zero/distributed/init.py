"""``init_distributed``: join the process group that the launcher describes."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist

from hf_zero.config import ZeroConfig
from hf_zero.config.feature_rows import provided
from hf_zero.config.keys import KEYS
from hf_zero.config.value_types import argument, integer
from hf_zero.device import kinds
from hf_zero.distributed.backends import (
    raise_file_limit,
    refuse_missing_backends,
    requested_backend_string,
)
from hf_zero.distributed.collective_log import PendingCollective
from hf_zero.distributed.collectives import DEFAULT_TIMEOUT, MARGIN_SECONDS
from hf_zero.distributed.communicators import device_to_bind, name_ranks
from hf_zero.distributed.hang_detection import HangDetection, Watchdog
from hf_zero.distributed.process_group import (
    CPU,
    default_device,
    destroy_process_group,
    get_rank,
    get_world_size,
    is_initialized,
)
from hf_zero.distributed.rank_hosts import RESOLVE_SECONDS, choose_interface, wait_for_address
from hf_zero.distributed.rank_hosts import VARIABLES as INTERFACE_VARIABLES
from hf_zero.distributed.rendezvous import LOOPBACK, VARIABLES, Place, announce, place_told
from hf_zero.distributed.uncaught import connect_to_agent_store, has_agent_store
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import ConfigError, LaunchError
from hf_zero.logging import first_line, log_rank0

# the group of one rank that init_distributed made last, and the process that made it
_alone: tuple[weakref.ref[dist.ProcessGroup], int] | None = None


@contextmanager
def _environment_restored_on_failure() -> Iterator[None]:
    """Context that an exception leaves with the variables of rendezvous and interfaces as they
    were, so that the arguments of a refused call do not count in the next one.
    """
    before = {name: os.environ.get(name) for name in (*VARIABLES, *INTERFACE_VARIABLES)}
    try:
        yield
    except BaseException:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        with suppress(LaunchError):
            announce()  # what the launcher says stays: reports of the error name the rank by it
        raise


@_environment_restored_on_failure()
def init_distributed(
    backend: str | None = None,
    timeout: float | timedelta | None = None,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    port: int | None = None,
    interface: str | None = None,
) -> None:
    """Join the launcher's process group; without a launcher, create a group of only this process.

    Does nothing if a group exists, except what :func:`leave_group_of_one` does.

    Args:
        backend: None or the device's own, such as "nccl", means that backend, with gloo for host
            memory.
        timeout: how many seconds a rank waits for others before it raises an error.
        port: the port of the rendezvous if MASTER_PORT is not set.
        interface: the network interface that gloo and NCCL use.

    Raises LaunchError if the launcher's variables are incomplete or contradict each other
    (``rendezvous.py``), if ``init_method`` is not an address with ranks, if the name of rank 0's
    host does not resolve, or if the store does not answer; ConfigError for a port that is in use,
    a backend that is not here, a timeout, a port or an interface that a configuration would not
    take, and a rank or a world size that is no integer.
    """
    rank = argument("init_distributed", "rank", integer(), rank)
    world_size = argument("init_distributed", "world_size", integer(), world_size)
    leave_group_of_one(rank, world_size)
    if is_initialized():
        return
    if backend is not None:
        refuse_missing_backends(backend)
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    read = partial(argument, "init_distributed")
    seconds = DEFAULT_TIMEOUT
    if timeout is not None:
        seconds = read("timeout", KEYS["timeout"].value_type, timeout)
    if port is not None:
        port = read("port", KEYS["distributed_port"].value_type, port)
    if interface is not None:
        interface = read("interface", KEYS["distributed_interface"].value_type, interface)
    by_address = init_method not in (None, "env://")
    given = _ranks_by(init_method, rank, world_size) if by_address else (rank, world_size)
    rendezvous = None if by_address else announce(rank, world_size, port)
    known, size = (rendezvous.rank, rendezvous.world_size) if rendezvous is not None else given
    device = default_device(max(known, 0))
    backend = requested_backend_string(backend, device)
    kinds.set_device(device)
    _prepare_network(init_method if by_address else None, rendezvous, seconds, interface)

    def join() -> None:
        raise_file_limit(size)
        group: dict[str, Any] = (
            {"init_method": init_method, "rank": rank, "world_size": world_size}
            if by_address
            else _group_by_store(rendezvous, seconds)
        )
        # a communicator of one rank would take memory for nothing
        bound = device_to_bind(backend, device) if size > 1 else None
        limit = timedelta(seconds=seconds + MARGIN_SECONDS)
        dist.init_process_group(backend, timeout=limit, device_id=bound, **group)
        if bound is not None:  # torch's DeviceMesh splits all backends of a bound group
            name_ranks(bound)
            name_ranks(CPU)

    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    _join(size, str(init_method) if by_address else where, join)
    if get_world_size() > 1:
        get_world_group().log.timeout = seconds
    elif dist.group.WORLD is not None:
        global _alone
        _alone = weakref.ref(dist.group.WORLD), os.getpid()


def leave_group_of_one(rank: int = -1, world_size: int = -1) -> None:
    """Destroy the group of one rank that :func:`init_distributed` made, in this process or in one
    that it was forked from, if ``rank`` and ``world_size``, or else RANK and WORLD_SIZE, name
    another place: this process would train alone.

    Raises LaunchError for other groups if arguments contradict them, or the variables a group of
    one rank. A group of several ranks that a script makes of a part of the launcher's stays.
    """
    is_real = is_initialized() and dist.get_backend() != "fake"  # a simulation has ranks of its own
    place = place_told(os.environ, rank, world_size) if is_real else None
    at, size = get_rank(), get_world_size()
    if place is None or [number.value for number in place] == [at, size]:
        return
    group = dist.group.WORLD
    if size == 1 and _alone is not None and _alone[0]() is group:
        if _alone[1] != os.getpid():  # gloo would wait for threads that a fork does not copy
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        destroy_process_group()
    elif size == 1 or rank >= 0 or world_size >= 0:
        raise LaunchError(
            f"{place[0]} and {place[1]} contradict the process group that exists, of rank {at} "
            f"among {size}; call torch.distributed.destroy_process_group() before, or set both to "
            "those of the group"
        )


def _prepare_network(
    address: str | None, rendezvous: Place | None, seconds: float, interface: str | None
) -> None:
    """Wait until the name of the host resolves where the ranks meet, by ``address`` or by
    ``rendezvous``, and choose the interface for it.
    """
    meeting: str | None = LOOPBACK
    source = f"init_method={address}"
    if rendezvous is not None:
        meeting, source = rendezvous.master_addr, rendezvous.address_source
    elif address is not None:
        meeting = urlsplit(address).hostname
    if meeting is not None and meeting != LOOPBACK:
        wait_for_address(meeting, source, min(RESOLVE_SECONDS, seconds))
    choose_interface(meeting, bool(rendezvous and rendezvous.several_hosts), interface)
    if rendezvous is not None and rendezvous.launcher is not None:
        log_rank0(
            f"{rendezvous.world_size} ranks, started by {rendezvous.launcher}, meet at "
            f"{rendezvous.master_addr}:{rendezvous.master_port}"
        )


def _group_by_store(rendezvous: Place | None, seconds: float) -> dict[str, Any]:
    """Return the store, the rank and the world size of the group, as torch's arguments; without
    a ``rendezvous``, those of a single process.
    """
    if rendezvous is None:
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    rank, size, limit = rendezvous.rank, rendezvous.world_size, timedelta(seconds=seconds)
    meet = provided("store_of_attempt", _store_by_restarts)
    store = meet(_connect(rendezvous, seconds), rank, size, limit)
    return {"store": store, "rank": rank, "world_size": size}


def _ranks_by(init_method: object, rank: int, world_size: int) -> tuple[int, int]:
    """Return the rank and the world size that are passed or stand in the address; -1: neither.

    Raises LaunchError for an address that cannot be read, or lacks what torch needs.
    """
    told = {"rank": rank, "world_size": world_size}
    fault = None
    try:
        address = urlsplit(str(init_method))
        query = parse_qs(address.query)
        in_address = {name: int(query[name][0]) for name in told if name in query}
        has_port = address.port is not None
    except ValueError as error:
        fault = str(error)
    else:
        told |= in_address
        lacking = [name for name, number in told.items() if number < 0]
        if "://" not in str(init_method):
            fault = "it is no address"
        elif address.scheme == "tcp" and not (address.hostname and has_port):
            fault = "it lacks the host or the port"
        elif in_address and (rank >= 0 or world_size >= 0):  # torch takes one place of them
            fault = f"{' and '.join(in_address)} stands in it, and ranks are passed"
        elif address.scheme in ("tcp", "file") and lacking:
            fault = f"{' and '.join(lacking)} is neither in it nor passed"
        elif address.scheme == "file" and not os.path.isdir(os.path.dirname(address.path)):
            fault = f"the folder of its file, {os.path.dirname(address.path)!r}, does not exist"
        elif not lacking and not told["rank"] < told["world_size"]:
            fault = f"there is no rank {told['rank']} of {told['world_size']}"
    if fault is not None:
        raise LaunchError(
            f"init_method={init_method!r}: {fault}; pass tcp://HOST:PORT with rank and world_size, "
            "or leave it out under torchrun"
        )
    return told["rank"], told["world_size"]


def _connect(rendezvous: Place, seconds: float) -> dist.Store:
    """Return a client of the store of torchrun's agent, or of the one that rank 0 hosts without an
    agent. Raises LaunchError if none answers within ``seconds``.
    """
    limit = timedelta(seconds=seconds + MARGIN_SECONDS)
    hosts = rendezvous.rank == 0 and not has_agent_store()
    if not hosts:
        wait = provided("wait_for_store", _connect_at_once)
        wait(rendezvous.master_addr, rendezvous.master_port, seconds)
    return connect_to_agent_store(limit) or dist.TCPStore(
        rendezvous.master_addr,
        rendezvous.master_port,
        rendezvous.world_size,
        is_master=hosts,
        timeout=limit,
        wait_for_workers=False,
        multi_tenant=True,
    )


def _store_by_restarts(store: dist.Store, rank: int, world: int, timeout: timedelta) -> dist.Store:
    """Return ``store`` under a prefix of this attempt, as this host's launcher counts restarts: one
    of an agent has the keys of earlier attempts.
    """
    return dist.PrefixStore(f"hf_zero/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _connect_at_once(address: str, port: int, seconds: float) -> None:
    """Wait for no store: torch's client does."""


def _join(world_size: int, where: str, join: Callable[[], None]) -> None:
    """Call ``join``, which returns when all ranks have met at ``where``; warn each minute of the
    wait.

    Raises ConfigError for a port that is in use, LaunchError for a store that cannot be reached.
    """
    kind: type[HangDetection] = provided("hang_detection", HangDetection)
    watchdog = kind.watchdog_of_start() if world_size > 1 else Watchdog()
    try:
        with watchdog.watching(PendingCollective(f"all {world_size} ranks to meet at {where}")):
            join()
    except LaunchError as error:
        raise LaunchError(f"the ranks cannot meet at {where}: {error}") from error.__cause__
    except RuntimeError as error:
        if "No rendezvous handler" in str(error):
            raise LaunchError(
                f"init_method={where}: torch knows no such address; pass tcp://HOST:PORT"
            ) from None
        if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
            if not isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
                raise
            raise LaunchError(
                f"the ranks cannot meet at {where}: its store does not answer "
                f"({first_line(error)}). Look at the output of the launcher, or of rank 0, which "
                "hosts it, and whether a firewall is between the hosts"
            ) from error
        raise ConfigError(
            f"the ranks cannot meet at {where}: another program on this machine (another "
            "training?) uses the port. End it, or choose a port that is free: `torchrun "
            "--master-port N`, `accelerate launch --main_process_port N`, or MASTER_PORT=N"
        ) from None
    finally:
        watchdog.close()


def init_from_config(config: ZeroConfig, port: int | None = None) -> None:
    """Call :func:`init_distributed` with the values of ``config``; ``port`` overrides its port."""
    init_distributed(
        config.distributed_backend,
        config.timeout,
        port=port or config.distributed_port,
        interface=config.distributed_interface,
    )
