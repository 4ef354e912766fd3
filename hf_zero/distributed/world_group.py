"""Blocking collectives over all ranks of the job, each verified on all of them before it runs."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hf_zero.distributed.collective_handle import Handle
from hf_zero.distributed.collective_log import CollectiveLog
from hf_zero.distributed.collectives import (
    BLOCKING,
    CPU,
    DEFAULT_TIMEOUT,
    abort,
    tagged_barrier,
)
from hf_zero.distributed.deferred import DeferredCollectives
from hf_zero.distributed.process_group import (
    backend_serving,
    backends_for,
    default_device,
    get_world_size,
    group_backend,
    is_initialized,
)
from hf_zero.distributed.rank_status import RankStatus, first_line
from hf_zero.distributed.recovery import RecoveryBoard
from hf_zero.distributed.store import TimeoutStore
from hf_zero.distributed.watchdog import Watchdog
from hf_zero.errors import ConfigError, RankMismatchError


class WorldGroup:
    """All ranks of the job, over the default group: seldom used, blocking collectives, each
    agreed on before.
    """

    def __init__(self, store: Any) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        backend = str(dist.get_backend())
        rank_status: RankStatus | None = None
        self.recovery_board: RecoveryBoard | None = None
        if self.world > 1 and backend not in ("threaded", "fake"):
            shared = dist.PrefixStore("hf_zero/ranks", store)
            number = shared.add(f"made/{self.rank}", 1)
            agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            # a client of its own: calls of others block theirs
            own = TimeoutStore(dist.PrefixStore(str(number), shared))
            rank_status = RankStatus(own, self.rank, self.world, None if agent else 0)
            self.recovery_board = RecoveryBoard(own, self.rank)
        self.watchdog = Watchdog(
            enabled=rank_status is not None,
            rank_status=rank_status,
            poll=self.recovery_board.answer_statements if self.recovery_board is not None else None,
        )
        self._agrees = rank_status is not None and group_backend(CPU) == "gloo"
        off = partial(
            abort, dist.group.WORLD, group_backend(CPU), self.world, self.rank, default_device()
        )
        native = group_backend(CPU) in BLOCKING  # another backend tells of no peer that dies
        self.log = CollectiveLog(
            "calls of all ranks", range(self.world), DEFAULT_TIMEOUT, off, native
        )
        if rank_status is not None:
            rank_status.register(self.log)
        self.deferred = DeferredCollectives()
        self.log.issue_deferred = self.deferred.issue

    def _call(self, what: str, call: Callable[[], Any], source: int | None = None) -> Any:
        pending = self.log.issue(
            what, None if source is None else () if source == self.rank else (source,)
        )
        late = (
            tagged_barrier(pending, range(self.world), self.rank, None, self.watchdog, source)
            if self._agrees
            else []
        )
        try:
            with self.watchdog.watching(pending):
                answer = call()
        except RuntimeError as error:
            raise self.watchdog.explain_failure(pending, error) from error
        Handle(late, self.watchdog, pending).wait()
        return answer

    def barrier(self) -> None:
        self._call("barrier", dist.barrier)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if tensor.device.type == CPU.type and not backend_serving(CPU):
            raise ConfigError(
                f"the process group ({dist.get_backend_config()}) has no backend for tensors on "
                f"{tensor.device.type}, where a parameter lies that is "
                "to be the same on all ranks; make the group with "
                f"init_process_group({backends_for(default_device())!r}), leave that to "
                "hf_zero.init_distributed(), or move the parameter to the device"
            )
        # As bytes: not every backend knows every dtype. Bits of a conjugate or negative view, and
        # of one with gaps, are those of a copy.
        held = tensor.resolve_conj().resolve_neg().contiguous()
        flat = held.as_strided((held.numel(),), (1,)).view(torch.uint8)
        self._call(
            f"broadcast of {tuple(tensor.shape)} {tensor.dtype} from rank {source}",
            lambda: dist.broadcast(flat, source),
            source,
        )
        if held.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg():
            tensor.copy_(held)

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


_world_groups: weakref.WeakKeyDictionary[Any, WorldGroup] = weakref.WeakKeyDictionary()


def get_world_group() -> WorldGroup:
    """All ranks of the process group there is."""
    store = dist.distributed_c10d._get_default_store()
    if store not in _world_groups:
        _world_groups[store] = WorldGroup(store)
    return _world_groups[store]


def barrier(group: Any = None) -> None:
    if not is_initialized() or dist.get_world_size(group) == 1:
        return
    if group is None or group is dist.group.WORLD:
        get_world_group().barrier()
    else:
        dist.barrier(group)


def broadcast(tensor: torch.Tensor, source: int) -> None:
    """Copy global rank ``source``'s ``tensor`` to every rank, in place."""
    if is_initialized() and dist.get_world_size() > 1 and tensor.numel():
        get_world_group().broadcast(tensor, source)


@contextmanager
def raise_on_all_ranks(what: str) -> Iterator[None]:
    """Work that must go well on all ranks.

    Collective: if it raises on one, it raises there, and on the others with its name.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    if get_world_size() > 1 and not isinstance(error, RankMismatchError):
        outcomes = get_world_group().all_gather_object(
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
