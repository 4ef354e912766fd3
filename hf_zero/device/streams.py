"""Streams and events: the order of what a device does, and how the host and other streams wait
for it.

[Note: side streams]
torch hands out streams of a pool of 32 for each device and priority, in turn, and NCCL takes those
of its communicators from the pool of the default priority. The 33rd stream of a pool is the first
one again: work on it waits behind whatever the first one waits for, be it a collective that waits
for the rank that asked for this work. So each side stream is made once for a process, all of a
device together (a pool cannot give one of them twice), and of high priority: another pool.
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


HIGH = -1  # priority; NCCL's streams of high priority have the highest one, a further pool


class Use(Enum):
    """Work that has a stream of its own beside the one that computes."""

    SHARDS = "shards come from host memory"
    GRADIENTS = "gradients leave for host memory"
    UPDATES = "updated parameters come from host memory"
    ACTIVATIONS = "activations leave and come back"
    FETCHES = "shards are read for other ranks"
    COUNTS = "labels are counted"
    HOPS = "gathers across nodes go on within each"


_making = threading.Lock()


def side_stream(device: torch.device, use: Use) -> Stream:
    """The stream of this process for ``use`` on ``device``."""
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
    """The stream on which this thread launches on ``device``."""
    current: Stream = kinds.module_of(device).current_stream(device)
    return current


def on_stream(stream: Stream | None) -> AbstractContextManager[Any]:
    """What is launched inside goes to ``stream``; None changes nothing."""
    if stream is None:
        return nullcontext()
    inside: AbstractContextManager[Any] = kinds.module_of(stream.device).stream(stream)
    return inside


def record_event(stream: Stream) -> Event:
    """An event that is over when all that ``stream`` holds now is done.

    A thread that waits for it sleeps.
    """
    event = _new_event(stream.device.type)
    event.record(stream)
    return event


def record_here(device: torch.device) -> Event | None:
    """An event in this thread's current stream; None on the host, where what was called is done."""
    return None if kinds.is_host(device) else record_event(current_stream(device))


def _new_event(kind: str) -> Event:
    made: Event = kinds.module_of(kind).Event(**_options(kind))
    return made


@functools.cache
def _options(kind: str) -> dict[str, Any]:
    """CUDA's events spin in ``synchronize`` unless they are made so; not every kind knows the
    option.
    """
    try:
        kinds.module_of(kind).Event(blocking=True)
    except TypeError:
        return {}
    return {"blocking": True}


def shard_stream(device: torch.device) -> Stream | None:
    """The stream on which shards come from host memory to ``device`` while it computes;
    None on the host.
    """
    return None if kinds.is_host(device) else side_stream(device, Use.SHARDS)
