"""Streams and events: the order of what a device does, and how the host and other streams wait
for it.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hf_zero.device import kinds

Stream = torch.Stream
Event = torch.Event


def new_stream(device: torch.device) -> Stream:
    """A stream of its own on ``device``."""
    made: Stream = kinds.module_of(device).Stream(device)
    return made


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


@functools.cache
def shard_stream(device: torch.device) -> Stream | None:
    """The stream on which shards come from host memory to ``device`` while it computes;
    None on the host.
    """
    return None if kinds.is_host(device) else new_stream(device)
