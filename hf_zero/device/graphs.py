"""Graphs of a device (CUDA graphs): work that is captured once and then launched as a whole.

[Note: what a graph reads]
A graph has fixed addresses. Tensors allocated while it is captured come from memory that all graphs
of one :class:`Graphs` share and nobody else gets: graphs that are launched in the order in which
they were captured may reuse each other's temporaries. A tensor from outside must live as long as
the graph; one that only a cache holds is registered with :func:`hold`. Random numbers go on from
torch's generator at each launch, which torch arranges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from hf_zero.device import kinds, streams

_captured: Graph | None = None  # the graph that is being captured
_arguments: frozenset[str] | None = None  # of the forward under :func:`repeatable`
_module: Any = None  # torch's module of the device of that forward


def supports(device: torch.device) -> bool:
    """Return whether ``device`` captures graphs."""
    return not kinds.is_synchronous(device) and hasattr(kinds.module_of(device), "CUDAGraph")


def capturing() -> bool:
    """Return whether this process is capturing a graph: nothing that is launched runs yet."""
    return _captured is not None


def hold(*tensors: torch.Tensor) -> None:
    """Keep ``tensors`` as long as the graph that is being captured, if any."""
    if _captured is not None:
        _captured.held.extend(tensors)


def call_in_launches(call: Callable[[], object]) -> None:
    """Have each launch of the graph that is being captured call ``call``: for what the host counts,
    which the graph does not repeat.
    """
    assert _captured is not None
    _captured.calls.append(call)


@contextmanager
def repeatable(device: torch.device, arguments: Iterable[str]) -> Iterator[None]:
    """Context of a forward with ``arguments`` that is captured, or runs before a capture of its
    like: it must take the same way. Models that ask torch whether a capture is under way are told
    so; Transformers then reads no mask back from the device.
    """
    global _arguments, _module
    _module, _arguments = kinds.module_of(device), frozenset(arguments)
    try:
        with _saying(True):
            yield
    finally:
        _arguments = _module = None


def reading_nothing() -> AbstractContextManager[None]:
    """Return a context of code that reads no values, under :func:`repeatable`: it takes the way
    that it takes without a capture.
    """
    return _saying(False)


@contextmanager
def _saying(captures: bool) -> Iterator[None]:
    """Answer whether a capture is under way."""
    module = _module
    asked = module.is_current_stream_capturing
    module.is_current_stream_capturing = lambda: captures
    try:
        yield
    finally:
        module.is_current_stream_capturing = asked


def arguments() -> frozenset[str] | None:
    """Return the names of the arguments of the forward under :func:`repeatable`; None outside."""
    return _arguments


class Graph:
    """Captured work."""

    def __init__(self, captured: Any):
        self._captured = captured
        self.held: list[torch.Tensor] = []
        self.calls: list[Callable[[], object]] = []  # of the host, in each launch

    def launch(self) -> None:
        """Launch the work on the current stream."""
        self._captured.replay()
        for call in self.calls:
            call()

    def free(self) -> None:
        """Free the work, whoever still refers to it: NCCL ends no communicator before the graphs
        that send over it.
        """
        self._captured.reset()
        self.held.clear()
        self.calls.clear()


class Graphs:
    """The graphs of one engine on ``device``, captured on :attr:`stream`."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = streams.side_stream(device, streams.Use.CAPTURES)
        self._memory: object = None  # of all graphs, once there is one

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Context that captures what is launched inside, on this thread and on those of autograd,
        instead of running it. Waits for the device first.
        """
        global _captured
        module = kinds.module_of(self.device)
        captured = module.CUDAGraph()
        graph = Graph(captured)
        # other threads, such as NCCL's watchdog, may go on asking for events
        options = {"stream": self.stream, "capture_error_mode": "thread_local"}
        capture = module.graph(captured, pool=self._memory, **options)
        with kinds.device_guard(self.device), capture:
            _captured = graph
            try:
                yield graph
            finally:
                _captured = None
        if self._memory is None:
            self._memory = captured.pool()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Context that launches on :attr:`stream`, between the work of the current stream before
        and after it.

        A gradient accumulates on the stream of the forward that first used its parameter, also in
        a later backward that is captured: forwards before a capture run here.
        """
        current = streams.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with streams.on_stream(self.stream):
                yield
        finally:
            current.wait_stream(self.stream)
