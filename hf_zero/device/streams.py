"""Streams and events: the order of a device's work, and waits for it by the host and other streams;
tensors that are used again, on whichever stream.

[Note: side streams]
torch hands out streams from a pool of 32 for each device and priority, in turn, and NCCL takes
those of its communicators from the pool of the default priority. The 33rd stream of a pool is the
first one again: work on it waits behind whatever the first one waits for, such as a collective that
waits for the rank that asked for this work. So each side stream is made once for a process, all of
a device together (a pool cannot return one of them twice), and of high priority: another pool.

[Note: pooled tensors]
A tensor may be asked for on another stream than the one on which it was used last: two branches of
a model on two streams share the buffers of an engine. The asking stream then waits for the other
one, and torch's allocator, which gives freed memory to the stream that allocated it, is told of
both. On one stream nothing is recorded and nothing waits.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any

import torch

from hf_zero.device import kinds

Stream = torch.Stream
Event = torch.Event


HIGH = -1  # priority; NCCL's high-priority streams have the highest one, a third pool


class Use(Enum):
    """Work that has its own stream beside the one that computes."""

    SHARDS = "shards come from host memory"
    GRADIENTS = "gradients leave for host memory"
    UPDATES = "updated parameters come from host memory"
    ACTIVATIONS = "activations leave and come back"
    FETCHES = "shards are read for other ranks"
    COUNTS = "labels are counted"
    HOPS = "gathers across nodes go on within each"
    CAPTURES = "steps are captured"
    SAVES = "a save copies training state"


_making = threading.Lock()


def side_stream(device: torch.device, use: Use) -> Stream:
    """Return the stream of this process for ``use`` on ``device``."""
    with _making:
        return _side_streams(device)[use]


@functools.cache
def _side_streams(device: torch.device) -> dict[Use, Stream]:
    module = kinds.module_of(device)
    try:
        return {use: module.Stream(device, priority=HIGH) for use in Use}
    except TypeError:  # a kind without priorities
        return {use: module.Stream(device) for use in Use}


def current_stream(device: torch.device) -> Stream:
    """Return the stream on which this thread launches on ``device``."""
    current: Stream = kinds.module_of(device).current_stream(device)
    return current


def wait_for(others: Iterable[Stream], waiting: Stream) -> list[Stream]:
    """Let ``waiting`` wait for the work now on ``others``; return those besides ``waiting``."""
    awaited = [stream for stream in others if stream != waiting]
    for stream in awaited:
        waiting.wait_stream(stream)
    return awaited


def on_stream(stream: Stream | None) -> AbstractContextManager[Any]:
    """Return a context manager that launches on ``stream``; None changes nothing."""
    if stream is None:
        return nullcontext()
    inside: AbstractContextManager[object] = kinds.module_of(stream.device).stream(stream)
    return inside


def record_event(stream: Stream) -> Event:
    """Record and return an event that completes after all work now on ``stream``.

    A thread that waits for it sleeps.
    """
    event = _new_event(stream.device.type)
    event.record(stream)
    return event


def record_here(device: torch.device) -> Event | None:
    """Record an event on this thread's current stream; None on the host, which needs none."""
    return record_event(current_stream(device)) if kinds.drives_streams(device.type) else None


def record_use(tensor: torch.Tensor, stream: Stream) -> None:
    """Keep the memory of ``tensor``, which may be freed next, until the work now on ``stream`` is
    complete: torch's allocator gives it to the stream that allocated it.
    """
    tensor.record_stream(stream)


def _new_event(kind: str) -> Event:
    event: Event = kinds.module_of(kind).Event(**_options(kind))
    return event


@functools.cache
def _options(kind: str) -> dict[str, object]:
    """Return options for events that sleep in ``synchronize``: CUDA's spin by default; not every
    kind has the option.
    """
    try:
        kinds.module_of(kind).Event(blocking=True)
    except TypeError:
        return {}
    return {"blocking": True}


def shard_stream(device: torch.device) -> Stream | None:
    """Return the stream that copies shards from host memory to ``device`` while it computes; None
    on the host.
    """
    return None if kinds.is_synchronous(device) else side_stream(device, Use.SHARDS)


class TensorPool:
    """Free tensors by number of elements and dtype, each with the stream of its last use. See the
    note.
    """

    def __init__(self, most: int | Mapping[int, int]) -> None:
        """``most``: number of free tensors of a kind to keep, or that by number of elements."""
        self._most = most
        self._free: dict[tuple[int, torch.dtype], list[tuple[torch.Tensor, Stream | None]]] = {}

    def acquire(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for the current stream until :meth:`release`: [numel], uninitialized."""
        free = self._free.get((numel, dtype))
        if not free:
            return torch.empty(numel, dtype=dtype, device=device)
        tensor, last = free.pop()
        if last is not None and (current := current_stream(device)) != last:
            current.wait_stream(last)
            record_use(tensor, current)
        return tensor

    def release(self, *tensors: torch.Tensor | None) -> None:
        """Put ``tensors`` back, to be used after the work now on the current stream; free those of
        which enough are kept.
        """
        for tensor in tensors:
            if tensor is None:
                continue
            device, numel, current = tensor.device, tensor.numel(), None
            if device.type not in kinds.IN_HOST_MEMORY and kinds.drives_streams(device.type):
                current = current_stream(device)
            free = self._free.setdefault((numel, tensor.dtype), [])
            if len(free) < (self._most if isinstance(self._most, int) else self._most[numel]):
                free.append((tensor, current))
            elif current is not None:
                record_use(tensor, current)

    def clear(self) -> None:
        """Free all tensors."""
        for free in self._free.values():
            for tensor, last in free:
                if last is not None:
                    record_use(tensor, last)
        self._free.clear()
