"""Blocking collectives over all or some ranks of the job, verified on all of them beforehand."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from hf_zero.config.feature_rows import provided
from hf_zero.distributed import backends
from hf_zero.distributed.aborting import abort
from hf_zero.distributed.collective_log import CollectiveLog, PendingCollective, PriorCollectives
from hf_zero.distributed.collectives import BLOCKING, DEFAULT_TIMEOUT, MARGIN_SECONDS, call_each
from hf_zero.distributed.handle import Handle, tagged_barrier
from hf_zero.distributed.hang_detection import HangDetection, Watchdog
from hf_zero.distributed.process_group import (
    CPU,
    Waitable,
    default_device,
    default_store,
    destroy_if_current,
    get_world_size,
    is_initialized,
)
from hf_zero.errors import ConfigError, RankMismatchError
from hf_zero.logging import first_line

ROUND = 64 << 20  # bytes that the first rank receives at a time


T = TypeVar("T")
FRAME = 1024  # bytes of the first message, which has the size and all of a short content
_SIZE = 8  # bytes of the size


class RankTree:
    """Messages of any size along a binomial tree of ``ranks`` (global) with the root at index
    ``root`` and this rank at index ``rank``: a rank exchanges messages with at most log2(ranks)
    others. They have the ``tag`` of the collective, so that ranks need not agree on the collective
    before it runs (collectives.py, the note).
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, root: int, group: dist.ProcessGroup | None, tag: int
    ):
        self._group, self._tag = group, tag
        path, self._children = _in_tree(ranks, rank, root)
        self._parent = path[0] if path else None

    def gather(self, value: bytes) -> list[bytes]:
        """Return the values of this rank and of those below it, in the order of the tree: on the
        root, of all ranks from it on.
        """
        values = [value]
        frames = [torch.empty(FRAME, dtype=torch.uint8, device=CPU) for _ in self._children]
        works = [
            dist.irecv(frame, child, self._group, self._tag)
            for frame, child in zip(frames, self._children)
        ]
        for frame, work, child in zip(frames, works, self._children):
            assert work is not None
            work.wait()
            values += pickle.loads(self._rest(frame, child))
        if self._parent is not None:
            self._send(pickle.dumps(values), [self._parent])
        return values

    def broadcast(self, value: bytes) -> bytes:
        """Return the ``value`` of the root."""
        if self._parent is not None:
            frame = torch.empty(FRAME, dtype=torch.uint8, device=CPU)
            dist.recv(frame, self._parent, self._group, self._tag)
            value = self._rest(frame, self._parent)
        self._send(value, self._children[::-1])
        return value

    def _rest(self, frame: torch.Tensor, sender: int) -> bytes:
        """Return the content whose first message is ``frame``."""
        content = frame.numpy().tobytes()
        size = int.from_bytes(content[:_SIZE], "little")
        content = content[_SIZE : _SIZE + size]
        if size > len(content):
            remainder = torch.empty(size - len(content), dtype=torch.uint8, device=CPU)
            dist.recv(remainder, sender, self._group, self._tag)
            content += remainder.numpy().tobytes()
        return content

    def _send(self, value: bytes, ranks: Sequence[int]) -> None:
        content = bytearray(len(value).to_bytes(_SIZE, "little") + value)
        short = len(content) <= FRAME
        message = torch.frombuffer(content.ljust(FRAME) if short else content, dtype=torch.uint8)
        parts = [message] if short else [message[:FRAME], message[FRAME:]]
        works = [dist.isend(part, rank, self._group, self._tag) for rank in ranks for part in parts]
        for work in filter(None, works):
            work.wait()


def _in_tree(ranks: Sequence[int], rank: int, root: int) -> tuple[list[int], list[int]]:
    """Return the path from the rank at index ``rank`` of ``ranks`` to the one at index ``root`` of
    their binomial tree, without its beginning, and the ranks next below it.
    """
    size, position = len(ranks), (rank - root) % len(ranks)
    lowest = position & -position or 1 << (size - 1).bit_length()
    steps = (1 << power for power in range((lowest - 1).bit_length()))
    below = [position + step for step in steps if position + step < size]
    above = []
    while position:
        position &= position - 1
        above.append(position)
    path, children = ([ranks[(at + root) % size] for at in places] for places in (above, below))
    return path, children


@dataclass
class Operation:
    """The operation of all ranks under way, with its number in ``name``; "" between operations."""

    name: str = ""
    number: int = 0


class RankGroup:
    """Blocking, rarely used collectives over ``ranks`` (global) on ``group`` (None: the default
    group). ``agrees``: the ranks agree on each by gloo messages first.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        group: dist.ProcessGroup | None,
        log: CollectiveLog,
        watchdog: Watchdog,
        agrees: bool,
        operation: Operation | None = None,
    ):
        self.ranks, self.rank = tuple(ranks), rank
        self.log, self.watchdog = log, watchdog
        self._operation = operation or Operation()
        self._group, self._agrees = group, agrees

    def _call(
        self,
        what: str,
        call: Callable[[], object],
        source: int | None = None,
        by_tree: Callable[[RankTree], None] | None = None,
    ) -> None:
        """Run ``call``, a blocking collective, once the ranks that it needs are at it: all, or the
        ``source`` of a broadcast. Where ranks agree by messages, ``by_tree`` does the same by a few
        messages, which need no agreement.
        """
        index = self.ranks.index(self.rank)
        source_index = None if source is None else self.ranks.index(source)
        required = self._required(index, source_index, by_tree is not None)
        if self._operation.name:
            what = f"{what} in {self._operation.name}"
        number, completed = self.log.num_issued, False

        def finish() -> None:
            nonlocal completed
            call()
            completed = True

        try:
            pending = self.log.issue(what, required)
            # a blocking call is its own wait
            works: list[Waitable | None] = [SimpleNamespace(wait=finish)]
            if self._agrees and by_tree is not None:
                root, tag = source_index or 0, pending.tag

                def call() -> None:
                    by_tree(RankTree(self.ranks, index, root, self._group, tag))

            elif self._agrees:
                works += tagged_barrier(
                    pending, self.ranks, index, self._group, self.watchdog, source_index
                )
            Handle(works, self.watchdog, pending).wait()
        except BaseException:
            if not completed:
                self.log.abandon(number, what)
            raise

    def _required(self, rank: int, source: int | None, by_tree: bool) -> tuple[int, ...] | None:
        """Return the ranks without which the call does not end on this one, all for None. ``rank``
        and ``source`` are indices into :attr:`ranks`.
        """
        if source is None or (self._agrees and rank == source and not by_tree):
            return None  # a message over gloo ends on the rank that sends it once it is received
        if self._agrees and by_tree:
            above, below = _in_tree(self.ranks, rank, source)
            return (*above, *below)
        return () if rank == source else (self.ranks[source],)

    def close(self) -> None:
        """Release the communicator, if it is this group's own."""
        destroy_if_current(self._group)
        self._group = None
        self.log.close()

    def barrier(self) -> None:
        """Wait for all ranks of the group: in host memory, where a group that is bound to its
        device would use the device.
        """
        if len(self.ranks) > 1:
            on = CPU if backends.serving_backend(CPU) else default_device()
            token = torch.zeros(1, device=on)

            def meet() -> None:
                dist.all_reduce(token, group=self._group)
                token.cpu()  # waits for the device, if it is there

            self._call("barrier", meet)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Copy global rank ``source``'s ``tensor`` to every rank of the group, in place.

        Raises ConfigError for a tensor in host memory without a backend for it.
        """
        if len(self.ranks) == 1 or not tensor.numel():
            return
        if tensor.device.type == CPU.type and not backends.serving_backend(CPU):
            raise ConfigError(
                f"the process group ({dist.get_backend_config()}) has no backend for tensors on "
                f"{tensor.device.type}, where a parameter lies that is "
                "to be the same on all ranks; make the group with "
                f"init_process_group({backends.backend_string(default_device())!r}), leave that to "
                "hf_zero.init_distributed(), or move the parameter to the device"
            )
        # As bytes: not every backend supports every dtype. A conjugate or negative view, or one
        # with gaps, is sent as a resolved contiguous copy.
        dense = tensor.resolve_conj().resolve_neg().contiguous()
        flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
        self._call(
            f"broadcast of {tuple(tensor.shape)} {tensor.dtype} from rank {source}",
            partial(dist.broadcast, flat, source, self._group),
            source,
        )
        if dense.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg():
            tensor.copy_(dense)

    def broadcast_object(
        self, value: object, source: int | None = None, what: str = "an object"
    ) -> Any:
        """Return ``value`` of global rank ``source``, by default the first of the group."""
        source = self.ranks[0] if source is None else source
        if len(self.ranks) == 1:
            return value
        box = [value]

        def by_tree(tree: RankTree) -> None:
            sent = tree.broadcast(pickle.dumps(value) if source == self.rank else b"")
            box[0] = pickle.loads(sent) if source != self.rank else value

        self._call(
            f"broadcast of {what} from rank {source}",
            partial(dist.broadcast_object_list, box, source, self._group),
            source,
            by_tree,
        )
        return box[0]

    def all_gather_object(self, value: T, what: str = "objects") -> list[T]:
        """Return ``value`` of each rank, in the order of :attr:`ranks`."""
        if len(self.ranks) == 1:
            return [value]
        box = [value] * len(self.ranks)

        def by_tree(tree: RankTree) -> None:
            every = pickle.loads(tree.broadcast(pickle.dumps(tree.gather(pickle.dumps(value)))))
            box[:] = map(pickle.loads, every)

        call = partial(dist.all_gather_object, box, value, self._group)
        self._call(f"exchange of {what}", call, by_tree=by_tree)
        return box

    def gather_bytes(
        self, value: bytes, take: Callable[[int, bytes], None], what: str = "bytes"
    ) -> None:
        """Call ``take(place, part)`` on the first rank with consecutive parts of ``value`` of each
        rank, by its place in :attr:`ranks`. The first rank holds at most :data:`ROUND` bytes of all
        ranks at a time; the others receive nothing.
        """
        sizes = self.all_gather_object(len(value), f"sizes of {what}")
        if len(self.ranks) == 1:
            take(0, value)
            return
        at = self.ranks.index(self.rank)
        step = max(1, min(max(sizes), ROUND // len(self.ranks)))
        on = CPU if backends.serving_backend(CPU) else default_device()
        message = torch.zeros(step, dtype=torch.uint8, device=on)
        parts = [torch.empty_like(message) for _ in self.ranks] if at == 0 else None

        def rounds() -> None:
            for begin in range(0, max(sizes), step):
                part = value[begin : begin + step]
                if part:
                    message[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
                dist.gather(message, parts, self.ranks[0], self._group)
                for index, received in enumerate(parts or ()):
                    if begin < sizes[index]:
                        size = min(step, sizes[index] - begin)
                        take(index, received[:size].cpu().numpy().tobytes())

        self._call(f"gather of {what}", rounds)


class EngineResources(Protocol):
    """The resources of an engine that has ended."""

    def release(self) -> None:
        """Release those that no rank uses any more."""


class WorldGroup(RankGroup):
    """All ranks of the job, over the default group."""

    def __init__(self, store: dist.Store) -> None:
        rank, self.world = dist.get_rank(), dist.get_world_size()
        backend = str(dist.get_backend())
        self.prefix, self.engines = "hf_zero", 0  # of keys in the store; engines made so far
        self.detection = HangDetection(rank=rank)
        self._added: dist.ProcessGroupGloo | None = None  # to a default group without gloo
        share_store = self.world > 1 and backend not in backends.STORELESS
        if share_store:
            backends.raise_file_limit(self.world)  # the script may have made the group
            shared = dist.PrefixStore("hf_zero/ranks", store)
            number = shared.add(f"made/{rank}", 1)
            self.prefix += f"/{number}"
            kind: type[HangDetection] = provided("hang_detection", HangDetection)
            self.detection = kind(dist.PrefixStore(str(number), shared), rank, self.world)
        watchdog = self.detection.watchdog
        if share_store:
            every = PendingCollective("gloo's connections", required=tuple(range(self.world)))
            with watchdog.watching(every):
                self._added = backends.add_host_backend(timedelta(seconds=DEFAULT_TIMEOUT))
        # a script's own collectives on the device, too: work behind them would never end
        device = default_device()
        serving = dict.fromkeys((backends.group_backend(CPU), backends.group_backend(device)))
        group = dist.group.WORLD
        off = partial(call_each, [partial(abort, group, backend, device) for backend in serving])
        reports_dead_peers = backends.group_backend(CPU) in BLOCKING
        log = CollectiveLog(
            "calls of all ranks", range(self.world), DEFAULT_TIMEOUT, off, reports_dead_peers
        )
        agrees = share_store and backends.group_backend(CPU) == "gloo"
        super().__init__(range(self.world), rank, None, log, watchdog, agrees)
        watchdog.rank_status.register(log)
        self.prior = PriorCollectives()
        # resources of ended engines that are not released yet
        self.unreleased: list[EngineResources] = []
        self.log.share_prior(self.prior)

    def wait_at_most(self, seconds: float) -> None:
        """Set the timeout of waits for calls of all ranks to ``seconds``: that of the last engine.
        A group of the script keeps its own for its collectives.
        """
        self.log.timeout = seconds
        if self._added is not None:
            self._added.set_timeout(timedelta(seconds=seconds + MARGIN_SECONDS))

    def part(
        self,
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        timeout: float,
        owner: str = "a job",
    ) -> RankGroup:
        """Return the group of some ``ranks``, this one among them, over their process group
        ``group``; this group itself if they are all ranks. Its waits are watched like the waits of
        the group of all ranks. ``owner`` names the group's owner in messages.
        """
        if len(ranks) == self.world:
            return self
        off = partial(abort, group, backends.group_backend(CPU), default_device())
        name = f"calls of {owner} on ranks {', '.join(map(str, ranks))}"
        log = CollectiveLog(name, ranks, timeout, off, self.log.reports_dead_peers)
        self.watchdog.rank_status.register(log)
        log.share_prior(self.prior)
        return RankGroup(ranks, self.rank, group, log, self.watchdog, self._agrees, self._operation)

    @contextmanager
    def during(self, operation: str) -> Iterator[None]:
        """Number the enclosed ``operation``, a save or a load, which all ranks do together: its
        blocking collectives never match the collectives of another operation that a rank has begun
        after an exception.
        """
        under_way = self._operation
        under_way.number += 1
        outer, under_way.name = under_way.name, f"{operation} {under_way.number}"
        try:
            yield
        finally:
            under_way.name = outer


_world_groups: weakref.WeakKeyDictionary[dist.Store, WorldGroup] = weakref.WeakKeyDictionary()


def get_world_group() -> WorldGroup:
    """Return the world group of the current process group, made by the first call (collective)."""
    store = default_store()
    if store not in _world_groups:
        _world_groups[store] = WorldGroup(store)
    return _world_groups[store]


def barrier(group: dist.ProcessGroup | None = None) -> None:
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
    """Run a block that must succeed on all ranks.

    Collective: an exception on one rank is raised there, and as RankMismatchError that names it on
    the others.
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
            follows = RankMismatchError(
                f"rank {rank} could not {what}: {outcome}. All ranks abort; fix the "
                "problem on that rank and restart"
            )
            follows.failed_rank = rank
            raise follows
    if error is not None:
        raise error
