"""Streams and events: the order of a device's work, and waits for it by the host and other streams.

[Note: side streams]
torch hands out streams from a pool of 32 for each device and priority, in turn, and NCCL takes
those of its communicators from the pool of the default priority. The 33rd stream of a pool is the
first one again: work on it waits behind whatever the first one waits for, such as a collective that
waits for the rank that asked for this work. So each side stream is made once for a process, all of
a device together (a pool cannot return one of them twice), and of high priority: another pool.
"""

from __future__ import annotations

import functools
import threading
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


def on_stream(stream: Stream | None) -> AbstractContextManager[Any]:
    """Return a context manager that launches on ``stream``; None changes nothing."""
    if stream is None:
        return nullcontext()
    inside: AbstractContextManager[Any] = kinds.module_of(stream.device).stream(stream)
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


def _new_event(kind: str) -> Event:
    made: Event = kinds.module_of(kind).Event(**_options(kind))
    return made


@functools.cache
def _options(kind: str) -> dict[str, Any]:
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
    return None if kinds.is_host(device) else side_stream(device, Use.SHARDS)
