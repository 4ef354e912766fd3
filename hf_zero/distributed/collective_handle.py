"""Handles of collectives in flight: waiting for them, and using their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hf_zero.device import streams
from hf_zero.distributed.collective_log import PendingCollective
from hf_zero.distributed.watchdog import Watchdog


class Handle:
    """A collective in flight."""

    def __init__(
        self,
        works: Sequence[Any],
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
        self._works = list(works)
        self._watchdog = watchdog
        self._pending = pending
        self._parts = list(parts)
        self._free = free
        self._finish = finish
        self._follows = follows

    def finish_with(self, finish: Callable[[], None]) -> None:
        """Have the first wait call ``finish`` once the collective is done."""
        self._finish = finish

    def wait(self) -> None:
        """Block (on a GPU: make the current stream wait) until the collective is done."""
        if not self._works:
            return
        works, self._works = self._works, []
        try:
            with self._watchdog.watching(self._pending):
                for work in works:
                    work.wait()
        except RuntimeError as error:
            raise self._watchdog.explain_failure(self._pending, error) from error
        if self._follows is not None:
            # Works keep tensors alive; an event recorded on the stream that waits for them does
            # not.
            event = streams.record_here(self._follows)
            is_over = partial(_are_completed, works) if event is None else event.query
            self._watchdog.follow(self._pending, is_over, self._follows)
        if self._finish is not None:
            self._finish()

    def reduce_into(self, out: torch.Tensor, accumulate: bool, scale: float) -> None:
        """Wait, then set ``out = scale * sum`` or, if ``accumulate``, ``out += scale * sum``. The
        sum is taken in the dtype of ``out``.
        """
        self.wait()
        first, *rest = self._parts
        if accumulate:
            for part in self._parts:
                out.add_(part, alpha=scale)
        else:
            # equal dtypes: sum or scale straight into `out`, without a copy first
            if rest and first.dtype == out.dtype == rest[0].dtype:
                torch.add(first, rest[0], out=out)
                rest = rest[1:]
            elif not rest and first.dtype == out.dtype:
                torch.mul(first, scale, out=out) if scale != 1.0 else _copy(out, first)
                scale = 1.0
            elif first.data_ptr() != out.data_ptr() or first.dtype != out.dtype:
                out.copy_(first)
            for part in rest:
                out.add_(part)
            if scale != 1.0:
                out.mul_(scale)
        self._release()

    def split(self, sizes: Sequence[int]) -> list[Handle]:
        """Return a handle for each of ``sizes`` consecutive elements of the result: several tensors
        share one message.
        """
        handles: list[Handle] = []
        left, at = [len(sizes)], 0

        def free() -> None:
            left[0] -= 1
            if not left[0]:
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


def _are_completed(works: Sequence[Any]) -> bool:
    return all(work.is_completed() for work in works)


def _copy(out: torch.Tensor, source: torch.Tensor) -> None:
    if out.data_ptr() != source.data_ptr():
        out.copy_(source)
