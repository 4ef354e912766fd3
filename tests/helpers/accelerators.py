"""An accelerator that is not there: what hf_zero asks of it is answered, and what it launches is
written down.

Streams run inline, so numbers are those of the CPU; the log says who has waited for whom. What runs
late, and what that does to memory, is the simulated device's to show.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hf_zero.device import kinds, streams


def play_accelerator(monkeypatch: pytest.MonkeyPatch, kind: str = "cuda", count: int = 1) -> None:
    """``count`` devices of ``kind`` are here, the first of them current; 0: none."""
    monkeypatch.setattr(kinds, "accelerator", lambda: kind if count else None)
    monkeypatch.setattr(kinds, "device_count", lambda: count)
    monkeypatch.setattr(kinds, "current_index", lambda device: 0)
    monkeypatch.setattr(kinds, "set_device", lambda device: None)


class PlayedEvent:
    """Over at once, or when somebody has waited for it."""

    def __init__(self, log: list[Any], stream: str, over: bool):
        self._log, self.stream, self.over = log, stream, over

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self._log.append(("host waits", self.stream))
        self.over = True


class PlayedStream:
    device = torch.device("cpu")

    def __init__(self, log: list[Any], name: str):
        self._log, self.name = log, name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlayedStream) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def wait_stream(self, other: PlayedStream) -> None:
        self._log.append((self.name, "waits for", other.name))

    def wait_event(self, event: PlayedEvent) -> None:
        self._log.append((self.name, "waits for event of", event.stream))

    def synchronize(self) -> None:
        self._log.append(("host waits", self.name))


class PlayedStreams:
    """``log`` in order; events are over when they are recorded only if ``prompt``."""

    def __init__(self, prompt: bool):
        self.log: list[Any] = []
        self.events: list[PlayedEvent] = []
        self.prompt = prompt
        self._here = threading.local()
        self._made: dict[streams.Use, int] = {}

    def current_stream(self, device: Any = None) -> PlayedStream:
        return getattr(self._here, "stream", None) or PlayedStream(self.log, "compute")

    def side_stream(self, device: Any, use: streams.Use) -> PlayedStream:
        place = self._made.setdefault(use, len(self._made) + 1)
        return PlayedStream(self.log, f"side {place}")

    @contextmanager
    def on_stream(self, stream: PlayedStream | None) -> Iterator[None]:
        before = getattr(self._here, "stream", None)
        self._here.stream = stream or before
        try:
            yield
        finally:
            self._here.stream = before

    def record_event(self, stream: PlayedStream) -> PlayedEvent:
        self.events.append(PlayedEvent(self.log, stream.name, self.prompt))
        return self.events[-1]

    def record_here(self, device: Any) -> PlayedEvent:
        return self.record_event(self.current_stream())


def play_streams(monkeypatch: pytest.MonkeyPatch, prompt: bool = True) -> PlayedStreams:
    """Streams of any device, the CPU included, are played."""
    played = PlayedStreams(prompt)
    for name in ("current_stream", "side_stream", "on_stream", "record_event", "record_here"):
        monkeypatch.setattr(streams, name, getattr(played, name))
    # the memory of the host is not given back by streams
    monkeypatch.setattr(streams, "record_use", lambda tensor, stream: None)
    return played
