"""The handle of a collective in flight: its wait, and what becomes of its result."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from hf_zero.device import graphs, kinds, streams
from hf_zero.distributed.collective_log import DEVICE_ERRORS, PendingCollective, refuse_destroyed
from hf_zero.distributed.hang_detection import Watchdog
from hf_zero.distributed.process_group import CPU, Waitable
from hf_zero.errors import PartitionError


class Handle:
    """A collective in flight."""

    def __init__(
        self,
        works: Sequence[Waitable | None],
        watchdog: Watchdog,
        pending: PendingCollective,
        parts: Sequence[torch.Tensor] = (),
        free: Callable[[], None] | None = None,
        finish: Callable[[], None] | None = None,
        follows: torch.device | None = None,
    ):
        """``follows``: the device whose streams alone wait for the works; ``wait`` then returns
        before they are completed.
        """
        # torch returns None for a message of a group that this rank is not in
        self._works = [*filter(None, works)]
        self._watchdog, self._pending = watchdog, pending
        self._parts, self._free = list(parts), free
        self._finish, self._repeats = finish, True
        self._follows = follows
        self._failure: BaseException | None = None
        self._memory: tuple[torch.Tensor, ...] = ()

    def hold(self, *memory: torch.Tensor) -> Handle:
        """Keep ``memory``, which the collective reads or fills, for the stream that will wait: the
        stream that has issued the collective, and gets freed memory back, may not wait for it.
        """
        self._memory += memory
        return self

    def finish_with(self, finish: Callable[[], None], repeats: bool = True) -> None:
        """Have the first wait call ``finish`` once the collective is done; ``repeats``: again in
        the next wait if an interrupt has ended the call.
        """
        self._finish, self._repeats = finish, repeats

    def wait(self) -> None:
        """Block (on a GPU: make the current stream wait) until the collective is done. After a
        failure, every wait raises it; after an interrupt, the next one goes on, unless it broke
        off a ``finish`` that may not be repeated.
        """
        if self._failure is not None:
            raise self._failure
        if self._works:
            works, waited = self._works, 0
            watchdog = self._watchdog
            if not watchdog.started:
                watchdog.start()
            # as in Watchdog.watching, without a call
            outer, watchdog.current = watchdog.current, (self._pending, time.monotonic())
            try:
                try:
                    for work in works:
                        work.wait()
                        waited += 1
                finally:
                    watchdog.current = outer
                    self._works = works[waited:]
            except RuntimeError as error:
                self._works, self._failure = [], error
                if isinstance(error, DEVICE_ERRORS):
                    raise
                self._failure = watchdog.conclude_failure(self._pending, error)
                raise self._failure from error
            if self._follows is not None and self._memory:
                for tensor in self._memory:
                    streams.record_use(tensor, streams.current_stream(self._follows))
            self._memory = ()
            if self._follows is not None and not graphs.capturing():
                # Works keep tensors alive; an event recorded on the stream that waits for them does
                # not.
                event = streams.record_here(self._follows)
                is_over = partial(_are_completed, works) if event is None else event.query
                watchdog.follow(self._pending, is_over, self._follows)
        if self._finish is not None:
            try:
                self._finish()
            except Exception as error:
                self._failure = error
                raise
            except BaseException as error:
                if not self._repeats:
                    self._failure = PartitionError(
                        f"an interrupt has broken off the end of {self._pending.what}: its values "
                        "are added in part; load a checkpoint, or call initialize again"
                    )
                    self._failure.__cause__ = error
                raise
            self._finish = None

    def reduce_into(self, out: torch.Tensor, accumulate: bool, scale: float) -> None:
        """Wait, then set ``out = scale * sum`` or, if ``accumulate``, ``out += scale * sum``.

        Parts from a point-to-point exchange are summed here, in the dtype of ``out``; a
        backend's own reduce-scatter or all-reduce has summed in the wire dtype already.
        """
        self.wait()
        first, *others = self._parts
        if accumulate:
            for part in self._parts:
                out.add_(part, alpha=scale)
        else:
            # equal dtypes: sum or scale straight into `out`, without a copy first
            if others and first.dtype == out.dtype == others[0].dtype:
                torch.add(first, others[0], out=out)
                others = others[1:]
            elif not others and first.dtype == out.dtype:
                torch.mul(first, scale, out=out) if scale != 1.0 else _copy(out, first)
                scale = 1.0
            elif (
                not others
                and first.itemsize < out.itemsize == 4
                and not kinds.is_synchronous(out.device)
            ):
                # One kernel casts and scales. The host would cast through memory of its own.
                torch.add(minus_zero(out.device), first, alpha=scale, out=out)
                scale = 1.0
            elif first.data_ptr() != out.data_ptr() or first.dtype != out.dtype:
                out.copy_(first)
            for part in others:
                out.add_(part)
            if scale != 1.0:
                out.mul_(scale)
        self._release()

    def split(self, sizes: Sequence[int]) -> list[Handle]:
        """Return a handle for each of ``sizes`` consecutive elements of the result: several tensors
        share one message.
        """
        handles: list[Handle] = []
        remaining, at = [len(sizes)], 0

        def free() -> None:
            remaining[0] -= 1
            if not remaining[0]:
                self._release()

        for size in sizes:
            parts = [part.narrow(0, at, size) for part in self._parts]
            # each part waits for the whole message
            handles.append(Handle([self], self._watchdog, self._pending, parts, free))
            at += size
        return handles

    def drop(self) -> None:
        """Wait and discard the result: the peers need what this rank sends."""
        self.wait()
        self._release()

    def _release(self) -> None:
        self._parts = []
        if self._free is not None:
            self._free()
            self._free = None


def _are_completed(works: Sequence[Waitable]) -> bool:
    # where works are followed on a device, they are torch's
    return all(work.is_completed() for work in works)  # type: ignore[attr-defined]


@functools.cache
def minus_zero(device: torch.device) -> torch.Tensor:
    """Return -0.0, [1] fp32: adding it changes no bit, while adding +0.0 turns -0.0 into +0.0."""
    return torch.full((1,), -0.0, device=device)


def _copy(out: torch.Tensor, source: torch.Tensor) -> None:
    if out.data_ptr() != source.data_ptr():
        out.copy_(source)


def tagged_barrier(
    pending: PendingCollective,
    ranks: Sequence[int],
    rank: int,
    group: dist.ProcessGroup | None,
    watchdog: Watchdog,
    source: int | None = None,
) -> list[Waitable | None]:
    """Return when the ranks that ``pending`` needs are at the same collective. ``rank`` and
    ``source`` are indices into ``ranks``.

    The ``source`` of a broadcast waits for no rank: it gets the works to wait for once its values
    are sent.
    """
    empty, tag = torch.zeros(1, dtype=torch.uint8, device=CPU), pending.tag
    sent: list[Waitable | None] = []
    came: list[Waitable | None] = []
    if watchdog.verdict:
        watchdog.check()
    try:
        for peer, target in enumerate(ranks):
            if peer != rank and (source is None or rank == source):
                sent.append(dist.isend(empty, target, group, tag))
        for peer, target in enumerate(ranks):
            if peer != rank and (source is None or peer == source):
                came.append(dist.irecv(empty.clone(), target, group, tag))
    except RuntimeError as error:
        raise watchdog.conclude_failure(pending, error) from error
    except ValueError as error:
        refuse_destroyed(pending, error)
        raise
    if rank == source:
        return sent
    Handle([*came, *sent], watchdog, pending).wait()
    return []
