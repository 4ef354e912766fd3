"""The process group of all ranks, their common collectives, and the mesh of an engine."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from hf_zero.config import ZeroConfig
from hf_zero.device import kinds
from hf_zero.distributed import whereabouts
from hf_zero.distributed.agreement import Agreement
from hf_zero.distributed.axis import (
    BLOCKING,
    CPU,
    DEFAULT_TIMEOUT,
    Axis,
    Handle,
    Ledger,
    break_off,
    meet,
)
from hf_zero.distributed.discovery import LOOPBACK, announce
from hf_zero.distributed.interface import choose_interface
from hf_zero.distributed.lane import Lane, Wait
from hf_zero.distributed.mailbox import Mailbox
from hf_zero.distributed.presence import Presence, first_line
from hf_zero.distributed.resume import Passes, Resumptions
from hf_zero.distributed.watch import Watch
from hf_zero.errors import ConfigError, RankMismatchError
from hf_zero.logs import log_rank0

MARGIN_SECONDS = 30.0  # between our timeout, which names ranks, and the backend's


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_rank(group: Any = None) -> int:
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    return dist.get_world_size(group) if is_initialized() else 1


def get_local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", get_rank()))


def barrier(group: Any = None) -> None:
    if not is_initialized() or dist.get_world_size(group) == 1:
        return
    if group is None or group is dist.group.WORLD:
        everybody().barrier()
    else:
        dist.barrier(group)


def broadcast(tensor: torch.Tensor, source: int) -> None:
    """Copy global rank ``source``'s ``tensor`` to every rank, in place."""
    if is_initialized() and dist.get_world_size() > 1 and tensor.numel():
        everybody().broadcast(tensor, source)


@contextmanager
def agreed(what: str) -> Iterator[None]:
    """Work that must go well on all ranks.

    Collective: if it raises on one, it raises there, and on the others with its name.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    if get_world_size() > 1 and not isinstance(error, RankMismatchError):
        outcomes = everybody().all_gather_object(
            None if error is None else first_line(error), f"outcome of {what}"
        )
        failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome is not None}
        if error is None and failed:
            rank, outcome = next(iter(failed.items()))
            raise RankMismatchError(
                f"rank {rank} could not {what}: {outcome}. All ranks give it up; mend it "
                "there and start again"
            )
    if error is not None:
        raise error


def destroy_process_group() -> None:
    if is_initialized():
        dist.destroy_process_group()


_chosen: torch.device | None = None


def choose_device(device: torch.device | None) -> None:
    """Compute on ``device`` in this process, for a trainer that has decided it by itself; None:
    as the launcher says.
    """
    global _chosen
    _chosen = device


def default_device() -> torch.device:
    """The device this rank computes on: its own GPU where the launcher has not forced the CPU,
    else the CPU.
    """
    if _chosen is not None:
        return _chosen
    forced = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")
    kind = None if forced else kinds.accelerator()
    if kind is not None:
        return torch.device(kind, get_local_rank() % kinds.device_count())
    return torch.device("cpu")


def backend_for(device: torch.device | str) -> str:
    """The backend of torch.distributed for this kind of device: "nccl" on CUDA, "gloo" on the
    host.
    """
    return "gloo" if kinds.is_host(device) else dist.get_default_backend_for_device(device)


def backends_for(device: torch.device) -> str:
    """What a process group is made with: the backend of ``device``, and one for what lies in
    host memory.
    """
    return "gloo" if kinds.is_host(device) else f"cpu:gloo,{device.type}:{backend_for(device)}"


def init_distributed(
    backend: str | None = None,
    timeout: float | timedelta | None = None,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    port: int | None = None,
    interface: str | None = None,
) -> None:
    """Join the process group of the launcher; without a launcher, make a group of this one process.

    ``timeout`` in seconds is how long a silent wait lasts before it is an error, ``port`` is where
    the ranks meet if MASTER_PORT is not set, ``interface`` the network interface that gloo and NCCL
    use. Does nothing if a group exists. Raises LaunchError where the launcher's variables lack
    something or contradict each other (``discovery.py``), ConfigError for a port that is in use.
    """
    if is_initialized():
        return
    by_address = init_method not in (None, "env://")
    place = None if by_address else announce(rank, world_size, port)
    seconds = (
        timeout.total_seconds() if isinstance(timeout, timedelta) else timeout or DEFAULT_TIMEOUT
    )
    limit = timedelta(seconds=seconds + MARGIN_SECONDS)
    device = default_device()
    backend = backend or backends_for(device)
    kinds.set_device(device)
    meeting = (
        place.master_addr
        if place
        else urlsplit(init_method or "").hostname
        if by_address
        else LOOPBACK
    )
    choose_interface(meeting, bool(place and place.several_hosts), interface)
    if by_address:
        join = partial(
            dist.init_process_group,
            backend,
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=limit,
        )
    elif place is not None:
        if place.launcher is not None:
            log_rank0(
                f"{place.world_size} ranks, started by {place.launcher}, meet at "
                f"{place.master_addr}:{place.master_port}"
            )
        world_size = place.world_size
        join = partial(dist.init_process_group, backend, timeout=limit)
    else:
        join = partial(
            dist.init_process_group,
            backend,
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            timeout=limit,
        )
    where = (
        init_method
        if by_address
        else f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    )
    watch = Watch(enabled=world_size > 1)
    try:
        with watch.over(Wait(f"all {world_size} ranks to meet at {where}")):
            join()
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
            raise
        raise ConfigError(
            f"the ranks cannot meet at {where}: another program on this machine (another "
            "training?) uses the port. End it, or choose a port that "
            "is free: `torchrun --master-port N`, `accelerate launch --main_process_port "
            "N`, or MASTER_PORT=N"
        ) from error
    finally:
        watch.close()
    if get_world_size() > 1:
        everybody().lane.timeout = seconds


def join(config: ZeroConfig, port: int | None = None) -> None:
    """:func:`init_distributed` as ``config`` says; ``port`` goes before its port."""
    init_distributed(
        config.distributed_backend,
        config.timeout,
        port=port or config.distributed_port,
        interface=config.distributed_interface,
    )


def _backend_of(device: torch.device) -> str:
    """The backend that serves ``device``: "gloo", "nccl", "threaded", "fake"."""
    return _serving(device) or str(dist.get_backend())


def _serving(device: torch.device) -> str:
    """The backend of the process group for tensors on ``device``; "" where there is none."""
    for entry in str(dist.get_backend_config()).split(","):
        kind, _, name = entry.strip().rpartition(":")
        if kind in ("", device.type):
            return name
    return ""


class Everybody:
    """All ranks of the job, over the default group: seldom used, blocking collectives, each
    agreed on before.
    """

    def __init__(self, store: Any) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        backend = str(dist.get_backend())
        presence = None
        if self.world > 1 and backend not in ("threaded", "fake"):
            shared = dist.PrefixStore("hf_zero/ranks", store)
            number = shared.add(f"made/{self.rank}", 1)
            agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            presence = Presence(
                dist.PrefixStore(str(number), shared), self.rank, self.world, None if agent else 0
            )
            presence.resumptions = Resumptions(presence.store, self.rank)
        self.watch = Watch(enabled=presence is not None, presence=presence)
        self._agrees = presence is not None and _backend_of(CPU) == "gloo"
        off = partial(
            break_off, dist.group.WORLD, _backend_of(CPU), self.world, self.rank, default_device()
        )
        native = _backend_of(CPU) in BLOCKING  # another backend tells of no peer that dies
        self.lane = Lane("calls of all ranks", range(self.world), DEFAULT_TIMEOUT, off, native)
        if presence is not None:
            presence.lane(self.lane)

    def _call(self, what: str, call: Callable[[], Any], source: int | None = None) -> Any:
        wait = self.lane.issue(
            what, None if source is None else () if source == self.rank else (source,)
        )
        late = (
            meet(wait, range(self.world), self.rank, None, self.watch, source)
            if self._agrees
            else []
        )
        try:
            with self.watch.over(wait):
                answer = call()
        except RuntimeError as error:
            raise self.watch.explain(wait, error) from error
        Handle(late, self.watch, wait).wait()
        return answer

    def barrier(self) -> None:
        self._call("barrier", dist.barrier)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if tensor.device.type == CPU.type and not _serving(CPU):
            raise ConfigError(
                f"the process group ({dist.get_backend_config()}) has no backend for tensors on "
                f"{tensor.device.type}, where a parameter lies that is "
                "to be the same on all ranks; make the group with "
                f"init_process_group({backends_for(default_device())!r}), leave that to "
                "hf_zero.init_distributed(), or move the parameter to the device"
            )
        # As bytes: not every backend knows every dtype.
        flat = tensor.reshape(-1).view(torch.uint8) if tensor.is_contiguous() else tensor
        self._call(
            f"broadcast of {tuple(tensor.shape)} {tensor.dtype} from rank {source}",
            lambda: dist.broadcast(flat, source),
            source,
        )

    def broadcast_object(self, value: Any, source: int = 0, what: str = "an object") -> Any:
        box = [value]
        self._call(
            f"broadcast of {what} from rank {source}",
            lambda: dist.broadcast_object_list(box, source),
            source,
        )
        return box[0]

    def all_gather_object(self, value: Any, what: str = "objects") -> list[Any]:
        box: list[Any] = [None] * self.world
        self._call(f"exchange of {what}", lambda: dist.all_gather_object(box, value))
        return box


_everybody: weakref.WeakKeyDictionary[Any, Everybody] = weakref.WeakKeyDictionary()


def everybody() -> Everybody:
    """All ranks of the process group there is."""
    store = dist.distributed_c10d._get_default_store()
    if store not in _everybody:
        _everybody[store] = Everybody(store)
    return _everybody[store]


class Comm:
    """The ranks of one engine as a mesh of ``shards`` × replicas, and the store in which they
    agree.
    """

    def __init__(
        self,
        shards: int,
        device: torch.device,
        timeout: float = DEFAULT_TIMEOUT,
        updates: bool = False,
    ):
        """``updates``: another communicator over the shards, for a thread that gathers updated
        parameters beside all else.
        """
        self.rank, self.world = get_rank(), get_world_size()
        self.ledger = Ledger()
        self.timeout = timeout
        backend = _backend_of(device)
        self.device = device
        # waiting for a collective blocks the host, not a stream
        self.blocks = kinds.is_host(device)
        self.watch = Watch(enabled=False)
        self.agreement: Agreement | None = None
        self.name = "engine"
        lanes: dict[str, Lane] = {}
        if self.world > 1 and backend != "fake":
            self.watch = everybody().watch
            everybody().lane.timeout = timeout
            store = dist.distributed_c10d._get_default_store()
            self.name = f"engine {store.add(f'hf_zero/engines/{self.rank}', 1)}"
            lanes["agreements"] = lane = Lane(
                f"agreements of {self.name}", range(self.world), timeout, native=False
            )
            if self.watch.presence is not None:
                self.watch.presence.lane(lane)
            shared = dist.PrefixStore(f"hf_zero/{self.name}", store)
            self.agreement = Agreement(shared, self.rank, self.world, timeout, self.watch, lane)
            # Making groups blocks in native code, where a rank that does not come cannot be named.
            self.agreement.settle("initialize", (0, 0), lambda _: "making of the engine")
            if self.watch.presence is not None:
                whereabouts.learn(store, self.rank, self.world)
                if self.watch.presence.keeper is not None:
                    # while it can still be asked
                    self.watch.presence.knows(self.watch.presence.keeper)
        rows = [list(range(start, start + shards)) for start in range(0, self.world, shards)]
        columns = [list(range(start, self.world, shards)) for start in range(shards)]
        self.shard = self._axis(rows, backend, "", device)
        self.replicate = self._axis(columns, backend, " across replicas", device)
        self.updates = (
            self._axis(rows, backend, " of updates", device, self._quiet(), places=1)
            if updates and shards > 1
            else None
        )

        for axis, kind in ((self.shard, ""), (self.replicate, " over replicas")):
            if axis.size > 1:
                lanes |= {f"gathers{kind}": axis.gathers, f"reductions{kind}": axis.reductions}
        self.passes = Passes(self.name, self.rank, self.world, lanes, self.watch, timeout)

    def _quiet(self) -> Watch:
        """A watch that knows what ends this rank, and leaves the watching to whoever waits for
        the thread: a rank waits for one thing.
        """
        watch = Watch(enabled=False)
        watch.presence = self.watch.presence
        return watch

    def _axis(
        self,
        sets: list[list[int]],
        backend: str,
        kind: str,
        device: torch.device,
        watch: Watch | None = None,
        places: int = 2,
    ) -> Axis:
        mine, groups = next(ranks for ranks in sets if self.rank in ranks), [None, None]
        if len(mine) > 1:
            for place in range(places):
                for ranks in sets:
                    # Of the device's backend alone, which need not be the only one of the job's
                    # group.
                    own = None if kinds.is_host(device) else backend
                    made = dist.new_group(
                        ranks, timeout=timedelta(seconds=self.timeout + MARGIN_SECONDS), backend=own
                    )
                    if self.rank in ranks:
                        groups[place] = made
        name = f"{self.name}{kind}"
        if not kinds.is_host(device):
            # Communicators are made by their first collective, which takes memory and blocks the
            # host: not in the midst of a backward.
            for made in filter(None, groups):
                with self.watch.over(Wait(f"the communicators of {name}", needs=tuple(mine))):
                    dist.all_reduce(torch.zeros(1, device=device), group=made)
        return Axis(
            mine,
            self.rank,
            groups[0],
            groups[1],
            backend,
            self.ledger,
            watch or self.watch,
            name,
            self.timeout,
            device,
        )

    @property
    def _axes(self) -> list[Axis]:
        return [self.shard, self.replicate, *([self.updates] if self.updates is not None else [])]

    def close(self, groups: bool = True, why: str = "destroyed its engine") -> None:
        """Let go of threads and, with ``groups``, of the process groups; collectives of this
        mesh end here.
        """
        if self.agreement is not None:
            self.agreement.close(why)
        for axis in self._axes:
            axis.gathers.closed = axis.reductions.closed = why
        if self.watch.presence is not None:
            self.watch.presence.say("here")
        if groups:
            for axis in self._axes:
                axis.close()

    def barrier(self) -> None:
        barrier()

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Copy global rank ``source``'s ``tensor`` to every rank, in place."""
        if self.world > 1 and tensor.numel():
            self.ledger.note("broadcast", "", tensor.nbytes)
            broadcast(tensor, source)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return value if self.world == 1 else everybody().broadcast_object(value, source)

    def all_gather_object(self, value: Any, what: str = "objects") -> list[Any]:
        return [value] if self.world == 1 else everybody().all_gather_object(value, what)

    def mailbox(self, topic: str) -> Mailbox | None:
        """What a thread uses to talk to those of the other ranks; None for one rank, and where
        ranks share no store.
        """
        if self.agreement is None:
            return None
        presence = self.watch.presence
        store = dist.PrefixStore(
            f"hf_zero/{self.name}/{topic}", dist.distributed_c10d._get_default_store()
        )
        return Mailbox(
            store,
            self.rank,
            self.timeout,
            presence.gone if presence is not None else lambda rank: None,
        )
