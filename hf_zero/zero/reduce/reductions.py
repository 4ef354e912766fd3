"""Reductions in flight: messages are sent, waited for, and written into each rank's shard of the
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_zero.device.spans import span
from hf_zero.distributed.collectives import Handle
from hf_zero.distributed.mesh import Mesh
from hf_zero.offload.gradient_offload import GradientOffload
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.gradient_buffer import GradState
from hf_zero.zero.layout.packing import Pack
from hf_zero.zero.reduce.gradient_intake import GradientIntake, WireBuffers
from hf_zero.zero.reduce.norm import sums_of_squares

IN_FLIGHT = 2  # acquired buffers that may be on the wire at once


@dataclass(eq=False)
class _Reduction:
    """The reduction of one flat buffer; its result times ``scale`` goes to the gradient shard."""

    flat: FlatBuffer
    wire: torch.Tensor  # [padded], to be summed
    scale: float
    acquired: torch.Tensor | None  # ``wire``, if it must be released


@dataclass(eq=False)
class _Message:
    """A message in flight, with the reduction of one flat buffer or of several small ones."""

    reductions: Sequence[_Reduction]
    handles: Sequence[Handle]  # one per reduction
    number: int  # number of the message in its backward
    takes_memory: bool  # besides the gradients themselves, until it is over
    # the sum over the shard axis, which is yet to be summed over the replicas
    part: torch.Tensor | None = None


def _nothing() -> None:
    """Default of ``before_wait``."""


class Reductions:
    """Sends the reductions of one engine, in call order.

    ``before_wait`` is called before this waits for a reduction in a backward. Small ones, of at
    most ``packed`` elements together, share a message; larger ones are sent at once.
    """

    def __init__(
        self,
        mesh: Mesh,
        intake: GradientIntake,
        buffers: WireBuffers,
        offload: GradientOffload | None,
        kernels: Any,
        packed: int,
        before_wait: Callable[[], None] = _nothing,
    ):
        self._mesh = mesh
        self._intake = intake
        self._buffers = buffers
        self._offload = offload
        self._kernels = kernels
        self._pack = Pack(packed if mesh.world > 1 else 0)  # of the waiting reductions
        self._before_wait = before_wait
        self.waiting: list[_Reduction] = []  # to share a message with others
        self._messages: list[_Message] = []
        self._taking_memory = 0  # number of such messages
        # On a single rank nothing is on the wire, and gradients for the host should leave at once.
        self._most = IN_FLIGHT if mesh.world > 1 else 0
        self._holds = False
        self._on_reduced: Callable[[FlatBuffer], None] | None = None
        self.sent = 0  # messages in this backward

    def begin(self, holds: bool, on_reduced: Callable[[FlatBuffer], None] | None) -> None:
        """Begin a backward. ``holds`` as in :meth:`hold`; ``on_reduced`` is called with each flat
        buffer whose reduction is over.
        """
        self.sent, self._on_reduced = 0, on_reduced
        self.hold(holds)

    def hold(self, holds: bool) -> None:
        """Set whether, before the end of the backward, this waits only for reductions that all
        ranks have launched. No effect on a single rank.
        """
        self._holds = holds and self._mesh.world > 1

    # ---- sending ----

    def add(
        self, flat: FlatBuffer, wire: torch.Tensor, acquired: torch.Tensor | None, scale: float
    ) -> None:
        """Sum ``wire`` [padded] over the ranks. ``acquired`` is ``wire`` if it must be released
        afterwards.
        """
        elements = flat.layout.padded
        # small ones that are waiting continue to wait for others
        if not self._is_small(flat):
            self._send([_Reduction(flat, wire, scale, acquired)])
            return
        if not self._pack.has_room(elements, wire.dtype, flat.mesh):
            self.flush()
        self.waiting.append(_Reduction(flat, wire, scale, acquired))
        self._pack.add(elements, wire.dtype, flat.mesh)

    def flush_unless_fits(self, flats: Sequence[FlatBuffer]) -> None:
        """Send the waiting reductions, unless the small ones of ``flats``, the next flat buffers,
        fit into their message.
        """
        small = [flat.layout.padded for flat in flats if self._is_small(flat)]
        if not small or not self._pack.has_room(sum(small)):
            self.flush()

    def _is_small(self, flat: FlatBuffer) -> bool:
        """Whether the gradient of ``flat`` may share a message. A sum over two axes needs two
        messages per flat buffer and does not.
        """
        return (
            flat.layout.padded <= self._pack.limit
            and flat.spec.reduce_codec is None
            and not flat.mesh.sums_twice
        )

    def flush(self) -> None:
        """Send the waiting reductions in one message."""
        reductions, self.waiting = self.waiting, []
        self._pack.clear()
        if reductions:
            self._send(reductions)

    def _send(self, reductions: Sequence[_Reduction]) -> None:
        """Send ``reductions`` in one message."""
        wires, flat = [each.wire for each in reductions], reductions[0].flat
        shard, replicate, part = flat.mesh.shard, flat.mesh.replicate, None
        key = flat.key if len(reductions) == 1 else f"{flat.key}..{reductions[-1].flat.key}"
        if len(reductions) > 1 and flat.layout.shards > 1:
            handles = shard.reduce_packed(wires, key)
        elif len(reductions) > 1:
            packed = replicate.all_reduce(torch.cat(wires), key, ordered=True)
            handles = packed.split([wire.numel() for wire in wires])
        elif flat.layout.shards > 1:
            handles = [shard.reduce_scatter(wires[0], key, flat.spec.reduce_codec)]
            if replicate.size > 1:
                part = wires[0].new_empty(flat.layout.chunk)
        else:
            handles = [replicate.all_reduce(wires[0], key, ordered=True)]
        takes_memory = (
            len(reductions) > 1
            or reductions[0].acquired is not None
            or flat.spec.reduce_codec is not None
            or (flat.gradient.offloaded and self._offload is not None)
        )
        self._messages.append(_Message(reductions, handles, self.sent, takes_memory, part))
        self._taking_memory += takes_memory
        self.sent += 1
        if self._holds or self._taking_memory <= self._most:
            return
        self._before_wait()
        while self._taking_memory > self._most:
            self._finish_oldest()

    # ---- results ----

    def finish(self) -> None:
        """Send the waiting reductions, and wait for all of them."""
        self.flush()
        while self._messages:
            self._finish_oldest()

    def finish_beyond(self, number: int) -> None:
        """Wait for the oldest messages in excess of those that may be in flight, among the first
        ``number``, which all ranks have sent.
        """
        # all ranks wait for the same messages
        while self._messages and self._messages[0].number < number - IN_FLIGHT:
            self._finish_oldest()

    def drop(self) -> None:
        """Drop all reductions and their results."""
        for message in self._messages:
            for reduction, handle in zip(message.reductions, message.handles):
                handle.drop()
                self._buffers.release(reduction.acquired)
        for waiting in self.waiting:
            self._buffers.release(waiting.acquired)
        self._messages, self.waiting = [], []
        self._pack.clear()
        self._taking_memory = 0

    def _finish_oldest(self) -> None:
        message = self._messages.pop(0)
        self._taking_memory -= message.takes_memory
        for reduction, handle in zip(message.reductions, message.handles):
            self._finish_one(reduction, handle, message.part)

    def _finish_one(self, reduction: _Reduction, handle: Handle, part: torch.Tensor | None) -> None:
        flat, gradient = reduction.flat, reduction.flat.gradient
        if flat.optimizer_shard.finish_update is not None:
            flat.optimizer_shard.finish_update()
        held = gradient.state
        adds = held is not GradState.EMPTY and held is not GradState.UNREDUCED
        adds = adds and gradient.adds_to_shard
        if adds:
            self._intake.upcast(flat)
        if part is not None:
            with span("wait_reduction", flat.key):
                handle.reduce_into(part, False, 1.0)
            handle = flat.mesh.replicate.all_reduce(part, flat.key, ordered=True)
        assert gradient.shard is not None
        if gradient.offloaded and self._offload is not None:
            gradient.mark_reduced(self._send_to_host(reduction, handle, adds))
        else:
            with span("wait_reduction", flat.key):
                handle.reduce_into(gradient.shard, adds, reduction.scale)
            gradient.mark_reduced()
        self._buffers.release(reduction.acquired)
        if self._on_reduced is not None:
            self._on_reduced(flat)

    def _send_to_host(
        self, reduction: _Reduction, handle: Handle, adds: bool
    ) -> torch.Tensor | None:
        """Copy the result to host memory; return its sum of squares, if all is in it."""
        gradient, wire = reduction.flat.gradient, reduction.acquired
        if wire is None:
            wire = gradient.accumulated_grad  # 32 bits by now, if it was upcast meanwhile
        assert gradient.shard is not None and wire is not None
        values = torch.empty(gradient.shard.numel(), dtype=wire.dtype, device=wire.device)
        # If the host adds or casts, it also multiplies.
        later = reduction.scale if adds or gradient.shard.dtype != wire.dtype else 1.0
        with span("wait_reduction", gradient.key):
            handle.reduce_into(values, False, reduction.scale / later)
        squares = None if adds else sums_of_squares([values], self._kernels)[0] * later**2
        assert self._offload is not None
        self._offload.send(gradient, values, adds, later)
        return squares
