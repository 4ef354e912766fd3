"""``init_distributed``: join the process group that the launcher describes."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist

from hf_zero.config import ZeroConfig
from hf_zero.device import kinds
from hf_zero.distributed.attempts import store_of_attempt, wait_for_store
from hf_zero.distributed.collective_log import PendingCollective
from hf_zero.distributed.collectives import DEFAULT_TIMEOUT, MARGIN_SECONDS
from hf_zero.distributed.communicators import device_to_bind, name_ranks
from hf_zero.distributed.process_group import (
    CPU,
    allow_connections,
    backends_asked,
    default_device,
    get_world_size,
    is_initialized,
    refuse_missing_backends,
)
from hf_zero.distributed.rank_hosts import RESOLVE_SECONDS, choose_interface, wait_for_address
from hf_zero.distributed.rank_status import first_line
from hf_zero.distributed.rendezvous import LOOPBACK, Place, announce
from hf_zero.distributed.uncaught import connect_to_agent_store, has_agent_store
from hf_zero.distributed.watchdog import Watchdog
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import ConfigError, LaunchError
from hf_zero.logging import log_rank0


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

    Does nothing if a group exists.

    Args:
        backend: None or the device's own, such as "nccl", means that backend, with gloo for host
            memory.
        timeout: how many seconds a rank waits for others before it raises an error.
        port: the port of the rendezvous if MASTER_PORT is not set.
        interface: the network interface that gloo and NCCL use.

    Raises LaunchError if the launcher's variables are incomplete or contradict each other
    (``rendezvous.py``), if the name of rank 0's host does not resolve, or if the store does not
    answer; ConfigError for a port that is in use, and for a backend that is not here.
    """
    if is_initialized():
        return
    if backend is not None:
        refuse_missing_backends(backend)
    by_address = init_method not in (None, "env://")
    rendezvous = None if by_address else announce(rank, world_size, port)
    seconds = (
        timeout.total_seconds() if isinstance(timeout, timedelta) else timeout or DEFAULT_TIMEOUT
    )
    known = rank if rendezvous is None else rendezvous.rank
    if by_address and rank < 0:  # torch reads it from the address, too
        known = int(parse_qs(urlsplit(init_method or "").query).get("rank", ["0"])[0])
    device = default_device(max(known, 0))
    backend = backends_asked(backend, device)
    kinds.set_device(device)
    meeting = (
        rendezvous.master_addr
        if rendezvous
        else urlsplit(init_method or "").hostname
        if by_address
        else LOOPBACK
    )
    if meeting is not None and meeting != LOOPBACK:
        source = rendezvous.address_source if rendezvous else f"init_method={init_method}"
        wait_for_address(meeting, source, min(RESOLVE_SECONDS, seconds))
    choose_interface(meeting, bool(rendezvous and rendezvous.several_hosts), interface)
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if by_address:
        where = str(init_method)
        group: dict[str, Any] = {"init_method": init_method, "rank": rank, "world_size": world_size}
    elif rendezvous is not None:
        if rendezvous.launcher is not None:
            log_rank0(
                f"{rendezvous.world_size} ranks, started by {rendezvous.launcher}, meet at "
                f"{rendezvous.master_addr}:{rendezvous.master_port}"
            )
        world_size = rendezvous.world_size
        group = {}
    else:
        group = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    limit = timedelta(seconds=seconds + MARGIN_SECONDS)

    def join() -> None:
        allow_connections(world_size)
        if rendezvous is not None:
            store = _connect(rendezvous, seconds)
            attempts = store_of_attempt(
                store, rendezvous.rank, world_size, timedelta(seconds=seconds)
            )
            group.update(store=attempts, rank=rendezvous.rank, world_size=world_size)
        # a communicator of one rank would take memory for nothing
        bound = device_to_bind(backend, device) if world_size > 1 else None
        dist.init_process_group(backend, timeout=limit, device_id=bound, **group)
        if bound is not None:  # torch's DeviceMesh splits all backends of a bound group
            name_ranks(bound)
            name_ranks(CPU)

    _join(world_size, where, join)
    if get_world_size() > 1:
        get_world_group().log.timeout = seconds


def _connect(rendezvous: Place, seconds: float) -> dist.Store:
    """Return a client of the store of torchrun's agent, or of the one that rank 0 hosts without an
    agent. Raises LaunchError if none answers within ``seconds``.
    """
    limit = timedelta(seconds=seconds + MARGIN_SECONDS)
    hosts = rendezvous.rank == 0 and not has_agent_store()
    if not hosts:
        wait_for_store(rendezvous.master_addr, rendezvous.master_port, seconds)
    return connect_to_agent_store(limit) or dist.TCPStore(
        rendezvous.master_addr,
        rendezvous.master_port,
        rendezvous.world_size,
        is_master=hosts,
        timeout=limit,
        wait_for_workers=False,
        multi_tenant=True,
    )


def _join(world_size: int, where: str, join: Callable[[], None]) -> None:
    """Call ``join``, which returns when all ranks have met at ``where``; warn each minute of the
    wait.

    Raises ConfigError for a port that is in use, LaunchError for a store that cannot be reached.
    """
    watchdog = Watchdog(enabled=world_size > 1)
    try:
        with watchdog.watching(PendingCollective(f"all {world_size} ranks to meet at {where}")):
            join()
    except LaunchError as error:
        raise LaunchError(f"the ranks cannot meet at {where}: {error}") from error.__cause__
    except RuntimeError as error:
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
            "training?) uses the port. End it, or choose a port that "
            "is free: `torchrun --master-port N`, `accelerate launch --main_process_port "
            "N`, or MASTER_PORT=N"
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
