"""The collectives of one mesh dimension.

Logical collectives are counted (one all-gather or reduction a unit), whatever the backend sends for
them. On gloo, point-to-point exchange is faster than its reduce_scatter and overlaps better than
its all_gather; other backends use their own collectives.

[Note: mismatches]
gloo aborts the process on a message longer than expected and silently accepts a shorter one. So the
tag of every point-to-point message encodes the log, number, name and size of its collective:
different collectives never match, both ranks wait, and the watchdog proves why. Several dimensions
may therefore share the connections of one group. Ranks agree on gloo's own collectives by such
messages first (:func:`tagged_barrier`), except for two kinds. Sums of a few
numbers all have one size, and carry a code that shows whether they are the same sum. Gradient
reductions have a fixed order; if a pass broke on some ranks, they compare sequence numbers before
the next one (recovery.py); at stage 0 :meth:`MeshDim.verify_same_collective` compares their count
in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from hf_zero.device import kinds, streams
from hf_zero.distributed import rank_hosts
from hf_zero.distributed.aborting import abort
from hf_zero.distributed.backends import STORELESS, serving_backend
from hf_zero.distributed.collective_log import (
    CollectiveLog,
    CollectiveStats,
    PendingCollective,
    Starting,
)
from hf_zero.distributed.handle import Handle, tagged_barrier
from hf_zero.distributed.hang_detection import Watchdog
from hf_zero.distributed.process_group import CPU, Waitable, destroy_if_current, is_initialized

DEFAULT_TIMEOUT = 1800.0
MARGIN_SECONDS = 30.0  # between our timeout, which names ranks, and the backend's
SMALL_NUMEL = 6  # sums of at most this many numbers carry a code of their collective
# backends whose works are completed when their wait returns
BLOCKING = ("gloo", "threaded", "fake")


class GatherCodec(Protocol):
    """Encode what one rank sends to another as a message of bytes, and decode what it receives.

    The result is the same on all ranks: the sender, too, uses the decoded values of its message.
    """

    @property
    def differences(self) -> bool:
        """Return whether messages are differences from the values that receivers have."""

    @property
    def reads_master(self) -> bool:
        """Return whether messages of master weights are those of the values cast from them, so that
        a rank needs no parameter shard beside them.
        """

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a message of ``numel`` elements."""

    def encode(
        self, values: torch.Tensor, rows: int = 1, current: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return messages for ``rows`` equal parts of ``values``, 1-D: uint8 [rows, bytes].

        ``current``: the receivers' values at the place of ``values``, equal on all of them.
        """

    def decode(self, messages: torch.Tensor, full: torch.Tensor) -> None:
        """Decode the rows of ``messages`` into ``full``, one part after the other."""


class Codec(GatherCodec, Protocol):
    """A gather codec that also decodes and sums the messages of a reduce-scatter."""

    def decode_sum(self, messages: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sum over the rows of ``messages``, in their order, to ``out``, fp32."""


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device


@dataclass(frozen=True)
class DimGroups:
    """The process groups of one mesh dimension; None for a dimension of one rank."""

    gather: dist.ProcessGroup | None
    reduce: dist.ProcessGroup | None  # None if nothing is reduced over the dimension
    backend: str
    device: torch.device = CPU


class GatherRoute(Protocol):
    """A way of gathers over other dimensions, in several messages each."""

    def gather(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        key: str,
        follows: torch.device | None,
    ) -> Waitable:
        """Begin the gather of ``pairs``, as of :meth:`MeshDim.all_gather`; ``follows`` as for a
        Handle.
        """

    def advance(self, ahead: int = 0) -> None:
        """Issue further messages of the pending gathers, except the last ``ahead``."""


class MeshDim:
    """One dimension of the mesh: the ranks among which state is sharded (shard dimension) or
    replicated (replicate dimension), with this one.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        groups: DimGroups,
        stats: CollectiveStats,
        watchdog: Watchdog,
        name: str = "axis",
        timeout: float = DEFAULT_TIMEOUT,
    ):
        """Global ``ranks``, with this ``rank``; ``name`` names the dimension in messages."""
        backend, device = groups.backend, groups.device
        self.ranks = list(ranks)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(rank)
        self._group = groups.gather
        # Gathers and reductions may interleave differently on different ranks: each kind has a
        # communicator of its own, except where tags tell their messages apart.
        self._reduce_group = groups.reduce
        self._point_to_point = backend == "gloo"
        self._copies_input = backend == "threaded"
        # not of ``backend``: a simulation announces that of the ranks it stands for
        self._is_storeless = is_initialized() and dist.get_backend() in STORELESS
        self._device = device
        self._follows = None if backend in BLOCKING or kinds.is_synchronous(device) else device
        self.stats = stats
        self._handle: Callable[..., Handle] = Handle
        self._watchdog = watchdog
        # the places of the other ranks, from the one after this
        self._peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        self.spare = streams.TensorPool(self.size)  # chunks that arrive for reductions
        self._last_verified: Handle | None = None
        self._small = SMALL_NUMEL
        self._route: GatherRoute | None = None
        # whether a gather sends a second message once its first has arrived
        self.gathers_in_stages = False
        logs = []
        for kind, group in (("gathers", groups.gather), ("reductions", groups.reduce)):
            abort_group = partial(abort, group, backend, device)
            title = f"{kind} of {name} over ranks {rank_hosts.rank_ranges(self.ranks)}"
            log = CollectiveLog(
                title, self.ranks, timeout, abort_group, reports_dead_peers=self._follows is None
            )
            logs.append(log if group is None else watchdog.rank_status.register(log))
        self.gathers, self.reductions = logs

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The torch process group of its gathers, for external code; None for one rank."""
        return self._group

    def observe(self, stats: CollectiveStats, handle: Callable[..., Handle]) -> Callable[[], None]:
        """Count collectives in ``stats`` and make their handles by ``handle``, right after each is
        counted; return the call that restores what was before.
        """
        before = self.stats, self._handle

        def restore() -> None:
            self.stats, self._handle = before

        self.stats, self._handle = stats, handle
        return restore

    @property
    def host_messages_on(self) -> torch.device:
        """The device for messages that the host reads: host memory if the process group has a
        backend for it, so that reading them does not wait for work launched on the device.
        """
        if self._follows is None or (self.size > 1 and serving_backend(CPU)):
            return CPU
        return self._follows

    @property
    def other_ranks(self) -> tuple[int, ...]:
        """Global ranks of the other members."""
        return tuple(rank for index, rank in enumerate(self.ranks) if index != self.rank)

    def gather_over(self, route: GatherRoute) -> None:
        """Gather over ``route`` instead of this dimension's own messages."""
        self._route, self.gathers_in_stages = route, True

    def advance_gathers(self, ahead: int = 0) -> None:
        """Issue further messages of the pending gathers over a route, except the last ``ahead``; no
        effect on other dimensions.
        """
        if self._route is not None:
            self._route.advance(ahead)

    def all_gather(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        key: str,
        codecs: Sequence[GatherCodec | None] = (),
    ) -> Handle:
        """Gather each ``(full, chunk)``: ``full`` [size * n] from ``chunk`` [n] of each rank, which
        must not change before the wait.

        The pairs count as one logical message; ``codecs``, if given, has an entry for each pair.
        Pairs in host memory beside a device (:attr:`host_messages_on`) are exchanged by the hosts:
        waiting for the handle then blocks the host.
        """
        decodes: list[Callable[[], None]] = []
        if any(codecs) and self.size > 1:
            pairs, decodes = self._encoded(pairs, codecs)
        messages, size = pairs if decodes else (), 0
        for full, _ in pairs:
            size += full.nbytes
        pending = self.gathers.issue(f"all-gather of {key}, {size} bytes")
        works: list[Waitable | None] = []
        # tensors in host memory beside a device: exchanged by gloo on the default group
        on_host = self._follows is not None and all(full.device.type == "cpu" for full, _ in pairs)
        if self._route is not None and not on_host:
            works, pairs = [self._route.gather(pairs, key, self._follows)], ()
        elif self.size > 1:
            self.stats.record("all_gather", key, size)
        with Starting(self._watchdog, pending, "all_gather", key, size):
            for full, chunk in pairs:
                target = full.narrow(0, self.rank * chunk.numel(), chunk.numel())
                exchanged = on_host or (
                    self._point_to_point and full.device.type in kinds.IN_HOST_MEMORY
                )
                if target.data_ptr() == chunk.data_ptr():
                    sent = target.clone() if self._copies_input and self.size > 1 else target
                elif exchanged or self.size == 1 or _kind(chunk) != _kind(full):
                    sent = target.copy_(chunk)
                else:
                    sent = chunk  # a collective of the backend copies it to its place
                if self.size == 1 or not chunk.numel():
                    continue
                # as bytes: not every backend supports every dtype
                whole, sent = full.view(torch.uint8), sent.view(torch.uint8)
                if exchanged:
                    parts = whole.chunk(self.size)
                    group = None if on_host else self._group
                    works += self._exchange([sent] * self.size, parts, group, pending)
                    continue
                gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
                works.append(gather(whole, sent, group=self._group, async_op=True))
        handle = self._handle(
            works, self._watchdog, pending, follows=None if on_host else self._follows
        )
        for pair in messages:
            handle.hold(*pair)
        if decodes:
            added = any(codec is not None and codec.differences for codec in codecs)
            handle.finish_with(partial(call_each, decodes), repeats=not added)
        return handle

    def _encoded(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        codecs: Sequence[GatherCodec | None],
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[Callable[[], None]]]:
        """Replace tensors that have a codec by messages; return pairs and the calls that decode."""
        sent, decodes = [], list[Callable[[], None]]()
        for (full, chunk), codec in zip(pairs, codecs, strict=True):
            if codec is None:
                sent.append((full, chunk))
                continue
            target = full.narrow(0, self.rank * chunk.numel(), chunk.numel())
            message = codec.encode(chunk, current=target).view(-1)
            messages = message.new_empty(self.size, message.numel())
            sent.append((messages.view(-1), message))
            decodes.append(partial(codec.decode, messages, full))
        return sent, decodes

    def all_gather_packed(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], key: str
    ) -> Handle:
        """Gather pairs of one dtype like :meth:`all_gather`, in one message.

        The two copies cost less than separate messages for a few small chunks.
        """
        if len(pairs) == 1 or self.size == 1:
            return self.all_gather(pairs, key)
        message = torch.cat([chunk for _, chunk in pairs])
        packed = message.new_empty(self.size * message.numel())
        handle = self.all_gather([(packed, message)], key).hold(packed, message)
        into = [full.view(self.size, chunk.numel()) for full, chunk in pairs]
        widths = [part.shape[1] for part in into]
        received = packed.view(self.size, message.numel()).split(widths, 1)
        # no view at the wait: a selective checkpoint would save it among those of the waiting block
        handle.finish_with(partial(torch._foreach_copy_, into, list(received)))
        return handle

    def reduce_packed(self, fulls: Sequence[torch.Tensor], key: str) -> list[Handle]:
        """Reduce-scatter each of ``fulls``, of one dtype, in one message; return their handles."""
        sizes = [full.numel() // self.size for full in fulls]
        rows = [full.view(self.size, size) for full, size in zip(fulls, sizes)]
        packed = torch.cat(rows, 1).view(-1)
        return self.reduce_scatter(packed, key).hold(packed).split(sizes)

    def _exchange(
        self,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        group: dist.ProcessGroup | None,
        pending: PendingCollective,
    ) -> list[Waitable | None]:
        """Send ``sent[peer]`` to each peer, receive into ``received[peer]``; return the works."""
        works: list[Waitable | None] = []
        tag = pending.tag
        for peer in self._peers:
            if received[peer].numel():
                works.append(dist.irecv(received[peer], self.ranks[peer], group, tag))
        for peer in self._peers:
            if sent[peer].numel():
                works.append(dist.isend(sent[peer], self.ranks[peer], group, tag))
        return works

    def all_to_all(
        self,
        sent: torch.Tensor,
        sizes: Sequence[int],
        counts: Sequence[int],
        key: str,
        operation: str = "all_to_all",
    ) -> tuple[Handle, torch.Tensor]:
        """Send ``sizes[peer]`` elements of ``sent``, 1-D, to each peer. Return a handle and the
        tensor that holds, after the wait, ``counts[peer]`` elements from each peer, in the order of
        the peers. ``operation``: its name in the figures.
        """
        received = sent.new_empty(sum(counts))
        pending = self.reductions.issue(f"all-to-all of {key}")
        self.stats.record(operation, key, sent.nbytes)
        with Starting(self._watchdog, pending, operation, key, sent.nbytes):
            works = self._swap(sent, sizes, received, counts, pending)
        return self._handle(works, self._watchdog, pending, follows=self._follows), received

    def send_to_next(self, sent: torch.Tensor, key: str) -> tuple[Handle, torch.Tensor]:
        """Send ``sent``, 1-D, to the next rank of the dimension, and the last rank's to the first.
        Return a handle and the tensor that holds, after the wait, as much of the rank before.
        """
        sizes, counts = ([0] * self.size for _ in range(2))
        sizes[(self.rank + 1) % self.size] = counts[self.rank - 1] = sent.numel()
        return self.all_to_all(sent, sizes, counts, key, "send_to_next")

    def _swap(
        self,
        sent: torch.Tensor,
        sizes: Sequence[int],
        received: torch.Tensor,
        counts: Sequence[int],
        pending: PendingCollective,
    ) -> list[Waitable | None]:
        """Send ``sizes[peer]`` elements of ``sent`` to each peer, receive ``counts[peer]``."""
        group = self._reduce_group
        if self.size > 1 and not (
            self._point_to_point and sent.device.type in kinds.IN_HOST_MEMORY
        ):
            sizes, counts = list(sizes), list(counts)
            return [dist.all_to_all_single(received, sent, counts, sizes, group, async_op=True)]
        raw = [part.view(torch.uint8) for part in sent.split(list(sizes))]
        into = [part.view(torch.uint8) for part in received.split(list(counts))]
        into[self.rank].copy_(raw[self.rank])
        return self._exchange(raw, into, group, pending)

    def reduce_scatter(self, full: torch.Tensor, key: str, codec: Codec | None = None) -> Handle:
        """Sum ``full`` [size * n] over the dimension; :meth:`Handle.reduce_into` writes this rank's
        chunk [n] of the sum to its destination.

        Without a ``codec``, ``full`` must not change before the handle has been waited for, and
        this rank's chunk of it not before ``reduce_into`` or ``drop``. With a ``codec`` each rank
        sends one message to each other rank, the sum is taken in fp32 in the order of the ranks,
        and ``full`` may be overwritten as soon as this call returns, unless the dimension has one
        rank.
        """
        if codec is not None and self.size > 1:
            return self._reduce_encoded(full, key, codec)
        n = full.numel() // self.size
        part = full.narrow(0, self.rank * n, n)
        pending = self.reductions.issue(f"reduce-scatter of {key}, {full.nbytes} bytes")
        if self.size == 1:
            return self._handle([], self._watchdog, pending, [full])
        self.stats.record("reduce_scatter", key, full.nbytes)
        if self._point_to_point and full.device.type in kinds.IN_HOST_MEMORY:
            raw = full.view(torch.uint8).chunk(self.size) if full.numel() else [full] * self.size
            into, received = list(raw), list[torch.Tensor]()
            for peer in self._peers:
                received.append(self.spare.acquire(n, full.dtype, full.device))
                into[peer] = received[-1].view(torch.uint8)
            with Starting(self._watchdog, pending, "reduce_scatter", key, full.nbytes):
                works = self._exchange(raw, into, self._reduce_group, pending)
            free = partial(self.spare.release, *received)
            return self._handle(works, self._watchdog, pending, [part, *received], free)
        out = self.spare.acquire(n, full.dtype, full.device)
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        with Starting(self._watchdog, pending, "reduce_scatter", key, full.nbytes):
            work = scatter(out, full, group=self._reduce_group, async_op=True)
        return self._handle(
            [work],
            self._watchdog,
            pending,
            [out],
            partial(self.spare.release, out),
            follows=self._follows,
        )

    def _reduce_encoded(self, full: torch.Tensor, key: str, codec: Codec) -> Handle:
        sent = codec.encode(full, self.size)
        pending = self.reductions.issue(f"reduce-scatter of {key}, {sent.nbytes} bytes")
        self.stats.record("reduce_scatter", key, sent.nbytes)
        received, sizes = torch.empty_like(sent), [sent.shape[1]] * self.size
        with Starting(self._watchdog, pending, "reduce_scatter", key, sent.nbytes):
            works = self._swap(sent.view(-1), sizes, received.view(-1), sizes, pending)
        total = torch.empty(full.numel() // self.size, device=full.device)
        finish = partial(codec.decode_sum, received, total)
        handle = self._handle(
            works, self._watchdog, pending, [total], finish=finish, follows=self._follows
        )
        return handle.hold(sent, received, total)

    def all_reduce(
        self, tensor: torch.Tensor, key: str, maximum: bool = False, ordered: bool = False
    ) -> Handle:
        """Sum (or maximum) over the dimension, in place.

        ``ordered``: no rank can be at another reduction (see the note), so no agreement is needed.
        """
        pending = self.reductions.issue(f"all-reduce of {key}, {tensor.nbytes} bytes")
        if self.size == 1:
            return self._handle([], self._watchdog, pending, [tensor])
        self.stats.record("all_reduce", key, tensor.nbytes)
        if self._point_to_point and not ordered:
            if tensor.device.type == "cpu" and tensor.numel() <= self._small and not maximum:
                return self._sum_small(tensor, pending, self._reduce_group)
            tagged_barrier(pending, self.ranks, self.rank, self._reduce_group, self._watchdog)
        operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        with Starting(self._watchdog, pending, "all_reduce", key, tensor.nbytes):
            work = dist.all_reduce(tensor, operation, self._reduce_group, async_op=True)
        return self._handle([work], self._watchdog, pending, [tensor], follows=self._follows)

    def maximum_on_hosts(self, values: Sequence[int], key: str) -> list[int]:
        """Return the maximum of each of ``values`` over the dimension (collective; blocks)."""
        top = torch.tensor(values, dtype=torch.int64, device=self.host_messages_on)
        if self._follows is None or top.device.type != "cpu" or self.size == 1:
            self.all_reduce(top, key, maximum=True).wait()
            return [int(value) for value in top.tolist()]
        pending = self.reductions.issue(f"all-reduce of {key}, {top.nbytes} bytes")
        self.stats.record("all_reduce", key, top.nbytes)
        with Starting(self._watchdog, pending, "all_reduce", key, top.nbytes):
            top = self._maximum_between_hosts(top, pending)
        return [int(value) for value in top.tolist()]

    def _maximum_between_hosts(self, top: torch.Tensor, pending: PendingCollective) -> torch.Tensor:
        """Return the element-wise maximum of ``top``, in host memory: in log2(ranks) rounds over
        the default group.
        """
        tag = pending.tag
        for step in (1 << power for power in range((self.size - 1).bit_length())):
            received = torch.empty_like(top)
            source, target = (self.ranks[(self.rank + way) % self.size] for way in (-step, step))
            works = [dist.irecv(received, source, None, tag), dist.isend(top, target, None, tag)]
            Handle(works, self._watchdog, pending).wait()
            top = torch.maximum(top, received)
        return top

    def allow_small_sums(self, numel: int) -> None:
        """Raise the size limit of small sums, which gloo sends with a code of the collective
        instead of an agreement, to ``numel`` elements. Call it on all ranks with the same number,
        before the first such sum.
        """
        self._small = max(self._small, numel)

    def verify_same_collective(self, what: str, values: torch.Tensor) -> Handle:
        """Sum ``values`` over a dimension of more than one rank, and on gloo compare ``what`` with
        the other ranks.

        It blocks only if the caller waits for the sum: a difference raises at the next call.
        """
        pending = self.gathers.issue(what)
        self.stats.record("all_reduce", "used parameters", values.nbytes)
        if self._point_to_point and values.device.type == "cpu":
            handle = self._sum_small(values, pending, self._group)
        else:
            with Starting(self._watchdog, pending, "all_reduce", "used parameters", values.nbytes):
                work = dist.all_reduce(values, group=self._group, async_op=True)
            handle = self._handle([work], self._watchdog, pending, [values], follows=self._follows)
        before, self._last_verified = self._last_verified, handle
        if before is not None:
            before.wait()
        return handle

    def _sum_small(self, tensor: torch.Tensor, pending: PendingCollective, group: object) -> Handle:
        """Sum ``tensor`` together with a code of ``pending``.

        All such messages have one size, so gloo survives a mismatch.
        """
        code = float(pending.tag & 0xFFFFF)
        message = torch.zeros(self._small + 2, dtype=torch.float64, device=CPU)
        message[: tensor.numel()] = tensor.reshape(-1)
        message[-2], message[-1] = code, code * code
        with Starting(self._watchdog, pending, "all_reduce", "a few numbers", message.nbytes):
            work = dist.all_reduce(message, group=group, async_op=True)

        def finish() -> None:
            total, squares = message[-2:].tolist()
            # equal on all ranks if and only if the variance of the codes is zero
            if (total, squares) != (code * self.size, code * code * self.size):
                raise self._watchdog.report_mismatch(pending)
            tensor.copy_(message[: tensor.numel()].view(tensor.shape))

        return self._handle([work], self._watchdog, pending, [tensor], finish=finish)

    def wait_at_most(self, seconds: float) -> None:
        """Set the timeout of waits for its collectives to ``seconds``."""
        self.gathers.timeout = self.reductions.timeout = seconds
        for group in (self._group, self._reduce_group):
            if group is not None and not self._is_storeless:
                group.set_timeout(timedelta(seconds=seconds + MARGIN_SECONDS))

    def aborts(self) -> dict[str, Callable[[], None]]:
        """Return the calls that abort its communicators, by name: nobody waits for their
        collectives on this rank, and closing a communicator would wait for collectives that other
        ranks have not joined.
        """
        self._last_verified = None
        if self._is_storeless:
            return {}
        logs = ((self._group, self.gathers), (self._reduce_group, self.reductions))
        return {log.name: log.abort for group, log in logs if group is not None}

    def forget_buffers(self) -> None:
        """Free the spare buffers, and wait for the last :meth:`verify_same_collective`."""
        self.spare.clear()
        last, self._last_verified = self._last_verified, None
        if last is not None:
            last.wait()

    def close_connections(self) -> None:
        """Release the communicators of a dimension that only gathers from now on, where the default
        group can carry the messages of these gathers: over gloo, whose messages have tags.
        """
        if self._point_to_point and kinds.is_synchronous(self._device):
            self.close()

    def close(self) -> None:
        """Release the communicators and the spare buffers."""
        self.spare.clear()
        last, self._last_verified = self._last_verified, None
        if last is not None and not self._watchdog.verdict:
            last.wait()
        for group in (self._group, self._reduce_group):
            destroy_if_current(group)
        self._group = self._reduce_group = None
        for log in (self.gathers, self.reductions):
            log.close()


def call_each(calls: Sequence[Callable[[], None]]) -> None:
    """Call ``calls`` in turn."""
    for call in calls:
        call()
